"""One optimizer step of each of several runs, by as few calls as possible.

AdamW's update of a tensor depends on no other tensor, so those of all runs with the same hyperparameters are one fused
call. Each run has its own count, norm and clipping. On a CPU the bits are those of its step alone, so that a replay
need not know which steps were taken together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from gradwire_losses import host
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.optimizer import Optimizer, Step, StepOutcome, Updated
from gradwire_server.engine.training.update_rules import can_be_scaled, fused_adamw


class RunStep(NamedTuple):
    """The step that one run is to take; arguments as of :meth:`.optimizer.Optimizer.step`."""

    optimizer: Optimizer
    accumulator: GradientAccumulator
    settings: training_pb2.OptimStep


def step_together(runs: Sequence[RunStep]) -> list[StepOutcome | Exception]:
    """Take one step with each run's accumulated gradient, and clear all accumulations.

    Returns:
        For each run the outcome of its step, or the error for which its weights and moments are unchanged.

    Raises:
        Exception: An error within the update itself.
    """
    try:
        return _step_together(runs)
    finally:
        for run in runs:
            run.accumulator.clear()


def _step_together(runs: Sequence[RunStep]) -> list[StepOutcome | Exception]:
    found: dict[int, Step | Exception] = {}
    for number, run in enumerate(runs):
        try:
            found[number] = run.optimizer.begin(run.accumulator, run.settings)
        except Exception as error:  # whatever it is, it is this run's alone
            found[number] = _unless_fatal(error)
    begun = {number: step for number, step in found.items() if isinstance(step, Step)}
    norms = host.fetched([step.norm() for step in begun.values()])
    fused: list[Updated] = []
    alone: dict[int, Mapping[str, str]] = {}
    for (number, step), norm in zip(begun.items(), norms, strict=True):
        try:
            step.clip(norm.item())
            if step.skipped:
                continue
            rules = runs[number].optimizer.allocate(step)
        except Exception as error:  # as above
            found[number] = _unless_fatal(error)
            continue
        if set(rules.values()) == {"adamw"} and can_be_scaled(step.gradients.values(), step.factor):
            fused += runs[number].optimizer.updated(step)
        else:
            alone[number] = rules
    _update(fused)
    for number, rules in alone.items():
        runs[number].optimizer.update(begun[number], rules)
    outcomes: list[StepOutcome | Exception] = []
    for number, run in enumerate(runs):
        step_or_error = found[number]
        if isinstance(step_or_error, Exception):
            outcomes.append(step_or_error)
            continue
        if not step_or_error.skipped:
            run.optimizer.end()
        outcomes.append(step_or_error.outcome)
    return outcomes


@torch.no_grad()
def _update(runs: Sequence[Updated]) -> None:
    """Update by fused AdamW: one call for all tensors with the same hyperparameters and device."""
    alike: dict[tuple[object, ...], list[Updated]] = {}
    for each in runs:
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


def _unless_fatal(error: Exception) -> Exception:
    if is_fatal(error):
        raise error
    return error
