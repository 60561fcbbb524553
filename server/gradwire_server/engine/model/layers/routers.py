"""The routers of a mixture of experts: what they decide in a forward, and the loss that balances their experts.

Legend: ``M`` computed tokens, ``L`` layers with experts, ``E`` experts of a layer, ``T`` pairs of a token and a layer.
With ``f_e`` the times that expert ``e`` was chosen over ``T``, and ``P_e`` its mean probability over these pairs, the
*load-balancing loss* is ``E * sum_e f_e P_e`` (Fedus et al. 2021, equations 4 to 6), over all layers together, as in
transformers. It is the number of experts per token if all experts are chosen alike, and its gradient goes through
``P_e`` alone.

All figures come from sums over tokens, so they are those of a whole batch however it is split. A token counts once in
each sequence that contains it, also where sequences share the computation of a common prefix; padding does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from gradwire_losses.batch import sent
from gradwire_losses.outputs import Metric, Sum
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.trunk import trunk_of

LOADS, PROBABILITIES, ENTROPY = "router_loads", "router_probabilities", "router_entropy"
ROUTER_SCORES = frozenset({LOADS, PROBABILITIES, ENTROPY})
"""Sums over the tokens of a forward: ``[L, E]`` int64 how often each expert was chosen; ``[E]`` probabilities over all
layers, the only differentiable one; ``[]`` entropy of the probabilities in nats."""
COEFFICIENT: Literal["router_aux_loss_coef"] = "router_aux_loss_coef"
"""Name of the coefficient of the load-balancing loss in a run's settings and in configurations of transformers."""


class Routed(NamedTuple):
    """The output of one router: logits ``[M, E]``, and the experts of each token ``[M, experts per token]``."""

    logits: Tensor
    chosen: Tensor


@dataclass(frozen=True, eq=False)
class RouterSums:
    """The routers' sums over some tokens, detached, and the number of these tokens."""

    loads: Tensor
    probabilities: Tensor
    entropy: Tensor
    num_tokens: int

    @classmethod
    def of(cls, parts: Sequence[Mapping[str, Tensor]], num_tokens: int) -> RouterSums:
        """Add the :data:`ROUTER_SCORES` of micro-batches."""
        loads, probabilities, entropy = (
            torch.stack([part[name].detach() for part in parts]).sum(0) for name in (LOADS, PROBABILITIES, ENTROPY)
        )
        return cls(loads, probabilities, entropy, num_tokens)

    def __add__(self, other: RouterSums) -> RouterSums:
        return RouterSums(
            self.loads + other.loads,
            self.probabilities + other.probabilities,
            self.entropy + other.entropy,
            self.num_tokens + other.num_tokens,
        )

    @property
    def _pairs(self) -> int:
        return self.num_tokens * len(self.loads)

    def balance_gradient(self) -> Tensor:
        """``[E]`` gradient of the load-balancing loss in :attr:`probabilities`, float64."""
        return self.loads.sum(0).double() * (self.loads.shape[1] / self._pairs**2)

    def metrics(self) -> dict[str, Metric]:
        """Figures of these tokens by name, not waited for."""
        loads = self.loads.double()
        return {
            "router_aux_loss": Sum(self.balance_gradient() @ self.probabilities.double()),
            "router_max_load": Sum((loads.amax(1) / loads.mean(1)).amax()),
            "router_unused_experts": Sum((self.loads == 0).double().mean()),
            "router_entropy": Sum(self.entropy.double() / self._pairs),
        }


class Routers:
    """The routers of one copy of a model.

    Args:
        modules: A router for each layer with experts, in the model's order.
        index: Place of the logits in a router's result.
        top_k: Experts per token, for routers whose result does not name those chosen.
    """

    def __init__(self, modules: Sequence[nn.Module], index: int, top_k: int) -> None:
        self._index, self._top_k = index, top_k
        # Routers that choose by a corrected score have probabilities of their own for each expert.
        self._sigmoid = any(getattr(module, "e_score_correction_bias", None) is not None for module in modules)
        self._seen: list[Routed] | None = None
        for module in modules:
            module.register_forward_hook(self._see)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers | None:
        """The routers that transformers reports for a model; None for a model without experts."""
        modules, index = _modules(model)
        top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        return cls(modules, index, int(top_k or 1)) if modules else None

    @contextmanager
    def observed(self) -> Iterator[list[Routed]]:
        """Collect what each router decides in a forward in the body, in the order of the layers."""
        seen: list[Routed] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    def _see(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if self._seen is None:
            return
        results = result if isinstance(result, tuple) else (result,)
        logits = results[self._index].flatten(0, -2)
        chosen = [each for each in results if each.dtype == torch.int64]
        # Detached: gradient checkpointing counts what its first forward saves, and this is not in the second.
        best = chosen[-1].flatten(0, -2) if chosen else logits.detach().topk(self._top_k)[1]
        self._seen.append(Routed(logits, best))

    def sums(self, seen: Sequence[Routed], places: Tensor, *, differentiable: bool) -> dict[str, Tensor]:
        """Add up decisions as :data:`ROUTER_SCORES`.

        Args:
            seen: The decisions of all layers.
            places: Place of each token of the sequences among those computed, on the CPU.
            differentiable: Whether a gradient of the probabilities will be wanted.
        """
        device = seen[0].logits.device
        counts = sent(torch.bincount(places, minlength=len(seen[0].logits)), device)
        loads, probabilities, entropies = [], [], []
        for logits, chosen in seen:
            own_counts = counts.to(logits.device)
            with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
                chances = self._probabilities(logits)
                weights = own_counts.to(chances.dtype)
                probabilities.append((weights @ chances).to(device))
            with torch.no_grad():
                each = own_counts[:, None].expand_as(chosen).flatten()
                load = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
                loads.append(load.scatter_add_(0, chosen.flatten(), each).to(device))
                entropies.append((weights @ torch.special.entr(chances.detach()).sum(-1)).to(device))
        return {
            LOADS: torch.stack(loads),
            PROBABILITIES: torch.stack(probabilities).sum(0),
            ENTROPY: torch.stack(entropies).sum(),
        }

    def _probabilities(self, logits: Tensor) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not self._sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)


def _modules(model: PreTrainedModel) -> tuple[list[nn.Module], int]:
    """A model's routers, and the place of the logits in their results."""
    trunk: Any = trunk_of(model)
    recorder = (getattr(type(trunk), "_can_record_outputs", None) or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder) or recorder.target_class is None:
        return [], 0
    return [module for module in trunk.modules() if isinstance(module, recorder.target_class)], recorder.index


def balance_coefficient(model: PreTrainedModel, config: training_pb2.RunConfig) -> float:
    """Coefficient of the load-balancing loss in a run's training; 0 for none.

    Where the run does not set it, it is what transformers' own forward uses: that of the model's configuration if this
    asks for it (``output_router_logits``), else 0.

    Raises:
        OperationError: INVALID_ARGUMENT for a model that has no such loss.
    """
    text = model.config.get_text_config()
    balanced = _has_balancing_loss(model)
    if not config.HasField(COEFFICIENT):
        asked = balanced and getattr(text, "output_router_logits", False)
        return float(getattr(text, COEFFICIENT, 0.0)) if asked else 0.0
    coefficient = config.router_aux_loss_coef
    if coefficient and not balanced:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"{COEFFICIENT} is {coefficient}, and {_why_not(model)}",
            field=COEFFICIENT,
            rule="a model with a load-balancing loss",
        )
    return coefficient


def balance_hint(model: PreTrainedModel, config: training_pb2.RunConfig, coefficient: float) -> str:
    """A sentence on the coefficient of a run that does not set it; empty for any other."""
    default = getattr(model.config.get_text_config(), COEFFICIENT, None)
    if config.HasField(COEFFICIENT) or not _has_balancing_loss(model):
        return ""
    if coefficient:
        return (
            f"the experts' load-balancing loss is part of the training, times {coefficient:g}, as the model's"
            f" configuration asks for; create_run({COEFFICIENT}=0) leaves it out"
        )
    return (
        f"the experts' load-balancing loss is not part of the training; create_run({COEFFICIENT}={default or 0.001:g})"
        " adds it"
    )


def _has_balancing_loss(model: PreTrainedModel) -> bool:
    """Whether transformers defines a load-balancing loss for a model, and the model has experts."""
    return hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func") and bool(_modules(model)[0])


def _why_not(model: PreTrainedModel) -> str:
    name = type(model).__name__
    if not _modules(model)[0]:
        return f"{name} is not a mixture of experts"
    if any(hasattr(module, "e_score_correction_bias") for module in model.modules()):
        return f"{name} balances its experts by a bias on the router's scores (e_score_correction_bias), not by a loss"
    return f"transformers defines no load-balancing loss for {name}"
