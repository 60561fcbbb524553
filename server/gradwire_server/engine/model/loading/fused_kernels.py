"""Norms, gated activations and rotary embeddings on a GPU by the kernels of liger-kernel, each in one pass.

transformers computes each of them as some ten small kernels, which read and write the hidden states every time: on an
H200 they took half of a step of Qwen3-0.6B. A kernel stands for a module or function only where it gave the same on
random numbers at load, with the same gradients. Else transformers computes as ever; so it does for float32 weights, on
a CPU, without the package (``gradwire[kernels]``), and with ``--kernels plain``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.comparison import largest_difference
from gradwire_server.engine.model.layers.feed_forward import feed_forward_layers, takes_one_argument

logger = logging.getLogger(__name__)

PACKAGE = "liger_kernel"
ROTATE = "apply_rotary_pos_emb"
"""What transformers' files call the function ``(q [B, H, M, D], k [B, K, M, D], cos [B, M, D], sin) -> (q, k)``."""
TOLERANCE = 0.02
"""Of the largest number: some roundings of bfloat16."""


def fused_kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are such kernels for a device; in float32 and float64 exactness goes before speed."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and importlib.util.find_spec(PACKAGE) is not None
    )


def use_fused_kernels(model: PreTrainedModel) -> None:
    """Let a model, whose weights are on their device, compute with them where they are right."""
    operations = importlib.import_module(f"{PACKAGE}.ops")
    chosen: dict[type[nn.Module], type[nn.Module] | None] = {}
    with preserved_rng():
        torch.manual_seed(0)
        gated = {id(layer) for layer in feed_forward_layers(model) if _is_gated(layer)}
        for module in model.modules():
            kind = type(module)
            if kind not in chosen and _is_norm(module):
                chosen[kind] = _for_norms(module, operations)
            elif kind not in chosen and id(module) in gated:
                chosen[kind] = _for_gated(module, operations, model.dtype)
            module.__class__ = chosen.get(kind) or kind
        rotated = _rotate_by(operations.LigerRopeFunction, model)
    names = [kind.__name__ for kind, own in chosen.items() if own] + [ROTATE] * rotated
    logger.info("fused kernels for %s", ", ".join(names) or "nothing")


def _is_norm(module: nn.Module) -> bool:
    own = [name for name, _ in module.named_parameters()]
    return type(module).__name__.endswith("RMSNorm") and own == ["weight"] and takes_one_argument(module)


@torch.no_grad()
def _for_norms(norm: Any, operations: Any) -> type[nn.Module] | None:
    plain, weight = type(norm), norm.weight
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not weight.is_cuda or not isinstance(eps, float):
        return None
    kept, states = weight.clone(), torch.randn(1, 6, len(weight)).to(weight)
    weight.uniform_(0.5, 1.5)  # as it may be after training: a norm times the weight, or one plus the weight
    try:
        expected = _values(lambda hidden, own: functional_call(norm, {"weight": own}, (hidden,)), [states, weight])
        for offset, casting in ((0.0, "llama"), (1.0, "gemma")):
            compute = partial(_normed, operations.LigerRMSNormFunction, eps, offset, casting)
            if _alike(lambda: _values(compute, [states, weight]), expected, plain.__name__):  # noqa: B023
                return _subclass(plain, partial(_norm_of, compute))
    finally:
        weight.copy_(kept)
    return None


def _normed(function: Any, eps: float, offset: float, casting: str, hidden: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = function.apply(hidden, weight, eps, offset, casting, False, None)  # not in place
    return normed


def _norm_of(compute: Callable[[Tensor, Tensor], Tensor], norm: Any, hidden: Tensor) -> Tensor:
    return compute(hidden, norm.weight)


def _is_gated(module: nn.Module) -> bool:
    return {name for name, _ in module.named_children()} >= {"gate_proj", "up_proj", "down_proj"}


def _for_gated(layer: Any, operations: Any, dtype: torch.dtype) -> type[nn.Module] | None:
    plain, device = type(layer), layer.gate_proj.weight.device
    if device.type != "cuda":
        return None
    states = torch.randn(1, 6, layer.gate_proj.in_features).to(device, dtype)
    expected = _values(layer, [states])
    for function, more in ((operations.LigerSiLUMulFunction, (1.0, 1.0)), (operations.LigerGELUMulFunction, ())):
        compute = partial(_gated, function, more)
        if _alike(lambda: _values(partial(compute, layer), [states]), expected, plain.__name__):  # noqa: B023
            return _subclass(plain, compute)
    return None


def _gated(function: Any, more: Sequence[float], layer: Any, hidden: Tensor) -> Tensor:
    narrowed: Tensor = layer.down_proj(function.apply(layer.gate_proj(hidden), layer.up_proj(hidden), *more))
    return narrowed


def _subclass(plain: Any, compute: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        if not hidden.is_cuda or torch.is_autocast_enabled("cuda"):
            return plain.forward(self, hidden)  # type: ignore[no-any-return]
        return compute(self, hidden)

    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "forward": forward})


class _Rotation:
    """Rotates by a kernel what it can, and as ``plain`` what else there is."""

    def __init__(self, plain: Callable[..., Any], function: Any) -> None:
        self.plain, self._function = plain, function

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = q.is_cuda and q.dim() == 4 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if args or kwargs or not fits or not q.dtype == k.dtype == cos.dtype:
            return self.plain(q, k, cos, sin, *args, **kwargs)
        return self._function.apply(q, k, cos, sin)


def _rotate_by(function: Any, model: PreTrainedModel) -> bool:
    """Rotate by a kernel wherever a file of transformers that the model comes from rotates as it does."""
    replaced = False
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        plain = vars(file).get(ROTATE)
        if plain is None or isinstance(plain, _Rotation) or model.device.type != "cuda":
            continue
        q, k = (torch.randn(1, heads, 6, 64).to(model.device, model.dtype) for heads in (4, 2))
        angles = torch.rand(1, 6, 32).repeat(1, 1, 2)
        rotary = [each.to(q) for each in (angles.cos(), angles.sin())]
        rotation = _Rotation(plain, function)
        expected = _values(lambda *each: plain(*each, *rotary), [q, k])  # noqa: B023
        if _alike(lambda: _values(lambda *each: rotation(*each, *rotary), [q, k]), expected, ROTATE):  # noqa: B023
            setattr(file, ROTATE, rotation)
            replaced = True
    return replaced


@torch.enable_grad()
def _values(compute: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of a computation, and the gradients in its inputs of their product with fixed numbers."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    results = compute(*(each * 1 for each in leaves))  # a kernel may overwrite what it is given
    results = list(results) if isinstance(results, tuple) else [results]
    weights = [torch.sin(torch.arange(each.numel(), device=each.device)).view_as(each) for each in results]
    total = sum((each.float() * weight).sum() for each, weight in zip(results, weights, strict=True))
    return [each.detach() for each in (*results, *torch.autograd.grad(total, leaves))]


def _alike(compute: Callable[[], list[Tensor]], expected: Sequence[Tensor], name: str) -> bool:
    try:
        fused = compute()
    except Exception as error:  # whatever a kernel raises, what it would replace is right
        logger.warning("%s has no fused kernel: %s", name, error)
        return False
    apart = [largest_difference(mine, theirs) for mine, theirs in zip(fused, expected, strict=True)]
    return all(error <= TOLERANCE * size for error, size in apart)
