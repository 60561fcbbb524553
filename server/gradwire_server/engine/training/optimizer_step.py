"""The optimizer step: of one run, or of several by as few calls as possible.

AdamW's update of a tensor depends on no other tensor, so those of all runs with the same hyperparameters are one fused
call. Each run has its own count, norm and clipping. On a CPU the bits are those of its step alone, so that a replay
need not know which steps were taken together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from gradwire_losses import host
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.optimizer import FusedUpdate, Optimizer, Step, StepOutcome
from gradwire_server.engine.training.update_rules import fused_adamw


class RunStep(NamedTuple):
    """The step that one run is to take.

    Attributes:
        accumulator: Its gradients; cleared even if the step fails.
        settings: Hyperparameters; ``max_grad_norm`` 0 does not clip.
    """

    optimizer: Optimizer
    accumulator: GradientAccumulator
    settings: training_pb2.OptimStep


def take_steps(runs: Sequence[RunStep]) -> list[StepOutcome | Exception]:
    """Take one step with each run's accumulated gradient, and clear all accumulations.

    Returns:
        For each run the outcome of its step, or in company the error for which its weights and moments are unchanged.

    Raises:
        OperationError: Of a run alone: NOTHING_TO_STEP, INVALID_ARGUMENT, or NON_FINITE unless ``skip_nonfinite``;
            weights and moments are unchanged.
        Exception: Any error in the shared update.
    """
    try:
        return _take_steps(runs)
    finally:
        for run in runs:
            run.accumulator.clear()


def _take_steps(runs: Sequence[RunStep]) -> list[StepOutcome | Exception]:
    alone = len(runs) == 1
    done: dict[int, Step | Exception] = {}
    for number, run in enumerate(runs):
        try:
            done[number] = run.optimizer.begin(run.accumulator, run.settings)
        except Exception as error:  # whatever it is, it is this run's alone
            if alone or is_fatal(error):
                raise
            done[number] = error
    begun = {number: step for number, step in done.items() if isinstance(step, Step)}
    norms = host.fetched([step.norm() for step in begun.values()])
    fused: list[FusedUpdate] = []
    for (number, step), norm in zip(begun.items(), norms, strict=True):
        try:
            step.clip(norm.item())
            if not step.skipped:
                fused += runs[number].optimizer.update(step)
        except Exception as error:  # as above
            if alone or is_fatal(error):
                raise
            done[number] = error
    _update(fused)
    outcomes: list[StepOutcome | Exception] = []
    for run, step_or_error in zip(runs, done.values(), strict=True):
        if isinstance(step_or_error, Exception):
            outcomes.append(step_or_error)
            continue
        if not step_or_error.skipped:
            run.optimizer.end()
        outcomes.append(step_or_error.outcome)
    return outcomes


@torch.no_grad()
def _update(updates: Sequence[FusedUpdate]) -> None:
    """Update by fused AdamW: one call for all tensors with the same hyperparameters and device."""
    alike: dict[tuple[object, ...], list[FusedUpdate]] = {}
    for each in updates:
        group = each.group
        key = (group["lr"], group["betas"], group["eps"], group["weight_decay"], each.masters[0].device)
        alike.setdefault(key, []).append(each)
    for members in alike.values():
        masters = [master for each in members for master in each.masters]
        gradients = [gradient for each in members for gradient in each.gradients]
        states = [state for each in members for state in each.states]
        factor = members[0].factor
        if any(each.factor != factor for each in members):
            # The bits of a fused step with each one's own factor, which a product with the factor would not have.
            torch._foreach_div_(gradients, [1.0 / each.factor for each in members for _ in each.gradients])
            factor = 1.0
        fused_adamw(members[0].group, masters, gradients, states, factor)
