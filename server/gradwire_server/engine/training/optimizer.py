"""The optimizer of a run: its moments, and the parts of a step on its policy's masters (:mod:`.optimizer_step`).

The rules of :mod:`.update_rules` do the arithmetic; a step names one, AdamW (Loshchilov and Hutter 2019) by default. A
parameter without a gradient is left unchanged, also by weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.crash_points import crash_point
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.placement import assign, total_norm
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.update_rules import (
    RULES,
    fuses,
    is_head,
    parameter_groups,
    parameter_kinds,
    rule_of,
    set_groups,
)

MIN_EPS = 1e-30
"""Smallest eps. AdamW divides by the root of the second moment plus eps; an eps that underflows in float32 would make
a gradient of 0 give NaN."""


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step.

    Attributes:
        grad_norm: Global norm of the averaged gradient, before clipping.
        num_accumulated: Number of operations whose gradients were accumulated.
        skipped: Whether the step was skipped because the gradient was not finite.
    """

    grad_norm: float
    num_accumulated: int
    skipped: bool


class FusedUpdate(NamedTuple):
    """The update of one run by fused AdamW: masters, their gradients, the gradients' factor, moments, settings."""

    masters: list[Tensor]
    gradients: list[Tensor]
    factor: float
    states: list[Mapping[str, Tensor]]
    group: Mapping[str, Any]


@dataclass
class Step:
    """A step that has begun.

    Attributes:
        gradients: Master's name -> gradient, still to be multiplied by ``factor``.
        factor: One over the count, and once :meth:`clip` is done, what clips the norm.
        num_accumulated: Number of accumulated operations.
        known_norm: The result of :meth:`norm`, if it is known.
        skipped: Whether the step is not taken, because the gradient is not finite.
        grad_norm: Global norm before clipping.
    """

    gradients: Mapping[str, Tensor]
    factor: float
    settings: training_pb2.OptimStep
    num_accumulated: int
    known_norm: Tensor | None = None
    skipped: bool = False
    grad_norm: float = 0.0

    def norm(self) -> Tensor:
        """Norm of the gradients without the factor, 0-d."""
        if self.known_norm is not None:
            return self.known_norm
        return total_norm(list(self.gradients.values())) if self.gradients else torch.zeros(())

    def clip(self, norm: float) -> None:
        """Take note of the result of :meth:`norm`.

        Raises:
            OperationError: NON_FINITE unless ``skip_nonfinite``.
        """
        self.grad_norm = norm * self.factor
        if math.isfinite(self.grad_norm):
            most = self.settings.max_grad_norm
            if most and self.grad_norm > most:
                self.factor *= most / self.grad_norm
        elif self.settings.skip_nonfinite:
            self.skipped = True
        else:
            raise OperationError(
                training_pb2.ERROR_CODE_NON_FINITE,
                "the accumulated gradient is not finite; it is dropped, and the weights are untouched. "
                "on_nonfinite='skip' makes such a step a warning",
            )

    @property
    def outcome(self) -> StepOutcome:
        return StepOutcome(self.grad_norm, self.num_accumulated, self.skipped)


class Optimizer:
    """The optimizer of one run. Hyperparameters come with each step; the state is only moments and step counts."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._masters = policy.masters()
        self._kinds = parameter_kinds(policy)
        self._made: dict[str, torch.optim.Optimizer] = {}
        self._added: list[torch.optim.Optimizer] = []

    @property
    def num_updated(self) -> int:
        """Number of parameters with moments, counted once for each rule."""
        return sum(len(optimizer.state) for optimizer in self._made.values())

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Update these of the policy's masters from now on as well."""
        self._added.clear()
        self._kinds = parameter_kinds(self._policy)
        new = {name: master for name, master in self._masters.items() if any(master is each for each in parameters)}
        for rule, optimizer in self._made.items():
            groups = parameter_groups(new, self._kinds, rule)
            for group in groups:
                optimizer.add_param_group(group)
            self._added += [optimizer] * len(groups)

    def drop_added(self) -> None:
        """Undo the newest :meth:`add`, before a step with what it added."""
        for optimizer in self._added:
            optimizer.param_groups.pop()
        self._added.clear()

    def begin(self, accumulator: GradientAccumulator, settings: training_pb2.OptimStep) -> Step:
        """Check a step and collect its gradients."""
        check_settings(settings)
        if accumulator.parts:
            raise OperationError(
                training_pb2.ERROR_CODE_NOTHING_TO_STEP,
                f"the batch of {accumulator.parts.loss_fn} is incomplete: {len(accumulator.parts)} parts came with "
                "accumulate=True, and its loss is evaluated with the last part, which comes without",
            )
        if accumulator.empty or not self._masters:
            raise OperationError(
                training_pb2.ERROR_CODE_NOTHING_TO_STEP,
                "optim_step has no gradient to apply: call forward_backward first",
            )
        if settings.HasField("head_learning_rate") and not any(map(is_head, self._masters)):
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                "optim_step: head_learning_rate is of a run's own head, and this run has none: leave it out",
                field="head_learning_rate",
            )
        sums, factor = accumulator.normalised()
        # In a fixed order, because the norm's last bit must not depend on whether a checkpoint was loaded in between.
        gradients = {name: sums[name] for name in self._masters if name in sums}
        norm = accumulator.norm if gradients and len(gradients) == len(sums) else None
        return Step(gradients, factor, settings, accumulator.num_operations, norm)

    def allocate(self, step: Step) -> Mapping[str, str]:
        """Allocate missing moments before anything is changed, as memory may run out here; returns each rule."""
        named = step.settings.optimizer or "adamw"
        if named == "adamw" and len(self._of(named).state) == len(self._masters):
            return dict.fromkeys(step.gradients, named)  # of a rule for all of them, with all of its moments
        rules = {name: rule_of(named, self._kinds[name]) for name in step.gradients}
        for name, rule in rules.items():
            self._prepare(rule, self._masters[name])
        return rules

    def update(self, step: Step) -> list[FusedUpdate]:
        """Change weights and moments by each one's rule, except by fused AdamW.

        Returns:
            What fused AdamW is to update; several runs can share its call.
        """
        rules = self.allocate(step)
        fused: list[FusedUpdate] = []
        for rule in RULES:
            gradients = {name: gradient for name, gradient in step.gradients.items() if rules[name] == rule}
            if not gradients:
                continue
            optimizer = self._of(rule)
            set_groups(optimizer.param_groups, RULES[rule], step.settings)
            if fuses(optimizer, gradients.values(), step.factor):
                fused += _fused_updates(optimizer, gradients, step.factor)
                continue
            for name, gradient in gradients.items():
                self._masters[name].grad = gradient.to(self._masters[name].dtype)
            if step.factor != 1.0:
                torch._foreach_mul_(
                    [grad for name in gradients if (grad := self._masters[name].grad) is not None], step.factor
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return fused

    def end(self) -> None:
        """Make the model compute with the changed weights."""
        crash_point("engine.inside_optim_step")
        self._policy.sync()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments as ``"moment|parameter"`` -> the tensor itself, not a copy; empty before the first step.

        Moments of another rule than AdamW are ``"rule.moment|parameter"``.
        """
        return {
            f"{_prefix(rule)}{moment}|{name}": state[moment]
            for rule, optimizer in self._made.items()
            for name, master in self._masters.items()
            if (state := optimizer.state.get(master))
            for moment in RULES[rule].moments
            if moment in state
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all moments and step counts; an empty mapping gives a fresh optimizer."""
        for optimizer in self._made.values():
            optimizer.state.clear()
        for path, tensor in tensors.items():
            stored, name = path.split("|", 1)
            rule, _, moment = stored.rpartition(".")
            rule = rule or "adamw"
            self._prepare(rule, self._masters[name])
            assign(self._of(rule).state[self._masters[name]][moment], tensor)

    def release_tensors(self) -> None:
        """Give up the moments of :meth:`state_tensors`, which somebody else keeps until :meth:`put_tensors`."""
        self._made.clear()
        self._added.clear()

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take moments, as of :meth:`state_tensors`, as this optimizer's own, without a copy."""
        for path, tensor in tensors.items():
            stored, name = path.split("|", 1)
            rule, _, moment = stored.rpartition(".")
            self._of(rule or "adamw").state[self._masters[name]][moment] = tensor

    def _of(self, rule: str) -> torch.optim.Optimizer:
        if rule not in self._made:
            self._made[rule] = RULES[rule].make(parameter_groups(self._masters, self._kinds, rule))
        return self._made[rule]

    def _prepare(self, rule: str, master: Tensor) -> None:
        """Allocate a parameter's moments before anything is changed, because memory may run out here."""
        optimizer = self._of(rule)
        if not optimizer.state.get(master):
            RULES[rule].allocate(optimizer, master)


def _fused_updates(
    optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], factor: float
) -> list[FusedUpdate]:
    """One update for each of the optimizer's groups with gradients, which are still to be multiplied by ``factor``."""
    updates = []
    for group in optimizer.param_groups:
        pairs = zip(group["names"], group["params"], strict=True)
        chosen = [(master, gradients[name]) for name, master in pairs if name in gradients]
        if chosen:
            masters, own = map(list, zip(*chosen, strict=True))
            updates.append(FusedUpdate(masters, own, factor, [optimizer.state[master] for master in masters], group))
    return updates


def _prefix(rule: str) -> str:
    return "" if rule == "adamw" else f"{rule}."


def check_settings(settings: training_pb2.OptimStep) -> None:
    """Check the arguments of a step.

    Raises:
        OperationError: INVALID_ARGUMENT, with the argument and its rule.
    """
    rules = {
        "learning_rate": (0 <= settings.learning_rate < math.inf, "learning_rate >= 0"),
        "beta1": (0 <= settings.beta1 < 1, "0 <= beta1 < 1"),
        "beta2": (0 <= settings.beta2 < 1, "0 <= beta2 < 1"),
        "eps": (MIN_EPS <= settings.eps < math.inf, f"eps >= {MIN_EPS:g}"),
        "weight_decay": (0 <= settings.weight_decay < math.inf, "weight_decay >= 0"),
        "max_grad_norm": (0 <= settings.max_grad_norm < math.inf, "max_grad_norm >= 0"),
        "momentum": (0 <= settings.momentum < 1, "0 <= momentum < 1"),
        "head_learning_rate": (0 <= settings.head_learning_rate < math.inf, "head_learning_rate >= 0"),
        "optimizer": (settings.optimizer in ("", *RULES), f"one of {', '.join(RULES)}"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"optim_step: {name} is {getattr(settings, name)!r}; the rule is {rule}",
                field=name,
                rule=rule,
            )
