"""Update rules that a step may name: AdamW, SGD with momentum and Muon of ``torch.optim``, AdamW with 8-bit moments.

A rule says which of its tensors it keeps per parameter, so that their memory is allocated before anything is changed
and checkpoints hold them. Muon orthogonalises the updates of linear layers' weights only (:class:`Kind`): it leaves the
rest to AdamW, and its update has the size of AdamW's (``match_rms_adamw``), so that one learning rate suits both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn
from torch.optim.adamw import adamw
from transformers.pytorch_utils import Conv1D

from gradwire_server.engine.model.policy import HEAD_PREFIX, Policy
from gradwire_server.engine.training import eight_bit

Groups = list[dict[str, Any]]
OF_ROUTERS = re.compile(r"Router|Gating|MoE\w*Gate")
"""In the name of a router's class, or of the class that holds its only layer."""
OF_WEIGHTS = re.compile(r"^[vw]\d$|(weight|proj|(^|_)fn)$")
"""Names of weights, in modules that are neither linear layers nor norms: experts, routers, convolutions, embeddings."""


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


class Kind(Enum):
    """The kind of a parameter, as update rules distinguish them.

    Attributes:
        MATRIX: The weight of a linear layer within the model, or of an adapter on one: Muon orthogonalises its updates.
        WEIGHT: Another weight that decays: of an embedding, an output head, a router, a convolution, experts.
        OTHER: A norm, a bias or a constant such as Mamba's ``A_log``: it does not decay with ``decay="matrices"``.
    """

    MATRIX = "matrix"
    WEIGHT = "weight"
    OTHER = "other"


def parameter_kinds(policy: Policy) -> dict[str, Kind]:
    """The kind of each parameter, by the module that computes with it."""
    model: Any = policy.model
    modules = dict(model.named_modules())
    ends = [_base(model.get_input_embeddings()), _base(model.get_output_embeddings())]

    def kind_of(name: str, master: Tensor) -> Kind:
        if is_head(name):
            return Kind.WEIGHT if master.ndim >= 2 else Kind.OTHER
        adapted, _, of_adapter = name.partition(".lora_")
        path, _, leaf = (adapted.replace(".base_layer", ""), "", "weight") if of_adapter else name.rpartition(".")
        module = _base(modules[path])
        parent = modules[path.rpartition(".")[0]]
        if isinstance(module, nn.Linear | Conv1D) and leaf == "weight":
            inner = not any(module is end for end in ends) and not _is_router(path, module, parent)
            return Kind.MATRIX if inner else Kind.WEIGHT
        if of_adapter:  # of an embedding or of experts
            return Kind.WEIGHT
        norm = "Norm" in type(module).__name__ and not isinstance(module, nn.Embedding)  # Inkling's normed embedding
        shaped = master.ndim >= 2 and not norm
        return Kind.WEIGHT if shaped and OF_WEIGHTS.search(leaf) else Kind.OTHER

    return {name: kind_of(name, master) for name, master in policy.masters().items()}


def _base(module: Any) -> Any:
    """The module itself, or the one below an adapter."""
    return getattr(module, "base_layer", module)


def _is_router(path: str, module: nn.Module, parent: nn.Module) -> bool:
    own = path.rpartition(".")[2]
    typed = any(OF_ROUTERS.search(type(each).__name__) for each in (module, parent))
    return typed or "router" in own or ("gate" in own and hasattr(parent, "experts"))


def rule_of(optimizer: str, kind: Kind) -> str:
    """Name the rule that updates a parameter of this kind when a step names this optimizer."""
    return "adamw" if optimizer == "muon" and kind is not Kind.MATRIX else optimizer


def parameter_groups(masters: Mapping[str, Tensor], kinds: Mapping[str, Kind], rule: str) -> Groups:
    """Group the parameters that a rule may update: trunk and head, each with and without weight decay."""
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name in masters:
        if rule_of(rule, kinds[name]) == rule:
            groups.setdefault((is_head(name), kinds[name] is not Kind.OTHER), []).append(name)
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
