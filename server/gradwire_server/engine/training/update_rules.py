"""Update rules that a step may name: AdamW, SGD with momentum and Muon of ``torch.optim``, AdamW with 8-bit moments.

A rule says which of its tensors it keeps per parameter, so that their memory is allocated before anything is changed
and checkpoints hold them. Muon orthogonalises updates of matrices only: embeddings, heads, biases and norms are left to
AdamW, and its update has the size of AdamW's (``match_rms_adamw``), so that one learning rate suits both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.model.policy import HEAD_PREFIX
from gradwire_server.engine.training import eight_bit

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class UpdateRule:
    """A rule.

    Attributes:
        make: Makes the optimizer of parameter groups.
        moments: Names of the tensors kept per parameter.
        settings: The group settings of a step, beside the learning rate and the weight decay.
        allocate: Makes a parameter's moments, all zero, in the optimizer's state.
    """

    make: Callable[[Groups], torch.optim.Optimizer]
    moments: Sequence[str]
    settings: Callable[[training_pb2.OptimStep], Mapping[str, Any]]
    allocate: Callable[[torch.optim.Optimizer, Tensor], None]


def _shaped(*moments: str) -> Callable[[torch.optim.Optimizer, Tensor], None]:
    """Moments of the parameter's shape and dtype, and a count of steps as a scalar where it is named."""

    def allocate(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        optimizer.state[parameter] = {
            moment: torch.zeros((), dtype=torch.float32, device=parameter.device)
            if moment == "step"
            else torch.zeros_like(parameter, requires_grad=False)
            for moment in moments
        }

    return allocate


def _adamw(groups: Groups) -> torch.optim.Optimizer:
    parameters: list[Tensor] = [each for group in groups for each in group["params"]]
    fused = all(each.is_floating_point() for each in parameters)
    return torch.optim.AdamW(groups, lr=0.0, fused=fused)


def _adamw_settings(call: training_pb2.OptimStep) -> Mapping[str, Any]:
    return {"betas": (call.beta1, call.beta2), "eps": call.eps}


def _momentum(default: float) -> Callable[[training_pb2.OptimStep], Mapping[str, Any]]:
    return lambda call: {"momentum": call.momentum if call.HasField("momentum") else default}


RULES = {
    "adamw": UpdateRule(
        _adamw,
        ("exp_avg", "exp_avg_sq", "step"),
        _adamw_settings,
        _shaped("exp_avg", "exp_avg_sq", "step"),
    ),
    "adamw8bit": UpdateRule(eight_bit.adamw, eight_bit.MOMENTS, _adamw_settings, eight_bit.allocate),
    "sgd": UpdateRule(
        lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.9),
        ("momentum_buffer",),
        _momentum(0.9),
        _shaped("momentum_buffer"),
    ),
    "muon": UpdateRule(
        lambda groups: torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw"),
        ("momentum_buffer",),
        _momentum(0.95),
        _shaped("momentum_buffer"),
    ),
}
"""Name -> rule; ``optim_step(optimizer=...)`` takes these names."""


def rule_of(optimizer: str, name: str, master: Tensor) -> str:
    """Name the rule that updates a parameter when a step names this optimizer."""
    inner_matrix = master.ndim == 2 and not is_head(name) and "embed" not in name and "lm_head" not in name
    return "adamw" if optimizer == "muon" and not inner_matrix else optimizer


def parameter_groups(masters: Mapping[str, Tensor], rule: str) -> Groups:
    """Group the parameters that a rule may update: trunk and head, each with and without weight decay."""
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, master in masters.items():
        if rule_of(rule, name, master) == rule:
            groups.setdefault((is_head(name), master.ndim >= 2), []).append(master)
    return [{"params": params, "head": head, "matrices": matrices} for (head, matrices), params in groups.items()]


def set_groups(groups: Sequence[dict[str, Any]], rule: UpdateRule, call: training_pb2.OptimStep) -> None:
    """Give the groups the hyperparameters of a step."""
    for group in groups:
        own = group["head"] and call.HasField("head_learning_rate")
        group["lr"] = call.head_learning_rate if own else call.learning_rate
        decays = group["matrices"] or not call.decay_matrices_only
        group["weight_decay"] = call.weight_decay if decays else 0.0
        group.update(rule.settings(call))


def scale(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], factor: float) -> None:
    """Multiply the gradients of parameters by a factor: within the step if it is fused, else at once.

    A fused step divides each gradient by ``grad_scale`` while it has it at hand, which saves a pass over all of them.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    plain = all(type(gradient) is Tensor and gradient.dtype == torch.float32 for gradient in gradients)
    fused = plain and bool(optimizer.defaults.get("fused"))
    devices = {gradient.device for gradient in gradients}
    within = fused and factor not in (0.0, 1.0) and len(devices) == 1
    given = torch.full((), 1.0 / factor, dtype=torch.float32, device=devices.pop()) if within else None
    optimizer.grad_scale = given  # type: ignore[attr-defined]  # read by fused optimizers
    if not within and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def is_head(name: str) -> bool:
    """Whether a parameter belongs to the run's own head."""
    return name.startswith(HEAD_PREFIX)
