"""Update rules that a step may name: AdamW, SGD with momentum and Muon of ``torch.optim``, AdamW with 8-bit moments.

A rule says which of its tensors it keeps per parameter, so that their memory is allocated before anything is changed
and checkpoints hold them. Muon orthogonalises updates of matrices only: embeddings, heads, biases and norms are left to
AdamW, and its update has the size of AdamW's (``match_rms_adamw``), so that one learning rate suits both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor
from torch.optim.adamw import adamw

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
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name, master in masters.items():
        if rule_of(rule, name, master) == rule:
            groups.setdefault((is_head(name), master.ndim >= 2), []).append(name)
    return [
        {"params": [masters[name] for name in names], "names": names, "head": head, "matrices": matrices}
        for (head, matrices), names in groups.items()
    ]


def set_groups(groups: Sequence[dict[str, Any]], rule: UpdateRule, call: training_pb2.OptimStep) -> None:
    """Give the groups the hyperparameters of a step."""
    for group in groups:
        own = group["head"] and call.HasField("head_learning_rate")
        group["lr"] = call.head_learning_rate if own else call.learning_rate
        decays = group["matrices"] or not call.decay_matrices_only
        group["weight_decay"] = call.weight_decay if decays else 0.0
        group.update(rule.settings(call))


def fuses(optimizer: torch.optim.Optimizer, gradients: Iterable[Tensor], factor: float) -> bool:
    """Whether :func:`fused_adamw` can be given these gradients and their factor, which it multiplies them by."""
    plain = all(type(gradient) is Tensor and gradient.dtype == torch.float32 for gradient in gradients)
    return bool(optimizer.defaults.get("fused")) and plain and factor not in (0.0, 1.0)


def fused_adamw(
    group: Mapping[str, Any],
    masters: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    factor: float,
) -> None:
    """Update masters by fused AdamW with a group's hyperparameters and gradients times a factor.

    The step divides each gradient by ``grad_scale`` while it has it at hand, which saves a pass over all of them.
    """
    beta1, beta2 = group["betas"]
    grad_scale = None
    if factor != 1.0:
        grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=masters[0].device)
    adamw(
        masters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        grad_scale=grad_scale,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def is_head(name: str) -> bool:
    """Whether a parameter belongs to the run's own head."""
    return name.startswith(HEAD_PREFIX)
