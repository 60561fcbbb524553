"""Norms, gated activations and rotary embeddings by kernels, each in one pass.

transformers computes each of them as some ten small operations, which read and write the hidden states every time: on
an H200 they took half of a step of Qwen3-0.6B. On a GPU liger-kernel's stand for them (``gradwire[kernels]``), in
bfloat16 and float16; on a CPU our own, in float32 (:mod:`gradwire_server.engine.model.layers.cpu_kernels`). A kernel
stands for a module or function only where it gave the same on random numbers at load, with the same gradients. Else
transformers computes as ever; so it does with ``--kernels plain``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.comparison import largest_difference
from gradwire_server.engine.model.layers import cpu_kernels
from gradwire_server.engine.model.layers.feed_forward import feed_forward_layers, takes_one_argument

logger = logging.getLogger(__name__)

PACKAGE = "liger_kernel"
ROTATE = "apply_rotary_pos_emb"
"""What transformers' files call the function ``(q [B, H, M, D], k [B, K, M, D], cos [B, M, D], sin) -> (q, k)``."""

Gate = Callable[[Tensor, Tensor], Tensor]


class Kernels(Protocol):
    """The kernels of a kind of device.

    Attributes:
        device: The kind.
        tolerance: Largest difference from what they stand for, as a part of the largest number.
        gates: Products of an activated tensor and another.
        version: What names them, and which they are.
    """

    device: ClassVar[str]
    tolerance: ClassVar[float]
    gates: Sequence[Gate]
    version: Mapping[str, str]

    def take(self, *tensors: Tensor) -> bool:
        """Whether they compute these."""

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """``hidden / sqrt(mean(hidden^2) + eps) * (offset + weight)``."""

    def rotate(self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """:data:`ROTATE`."""


class _Liger:
    device: ClassVar[str] = "cuda"
    tolerance: ClassVar[float] = 0.02  # some roundings of bfloat16

    def __init__(self) -> None:
        operations: Any = importlib.import_module(f"{PACKAGE}.ops")
        self._norm, self._rotation = operations.LigerRMSNormFunction.apply, operations.LigerRopeFunction.apply
        self.version: Mapping[str, str] = {"liger-kernel": importlib.metadata.version("liger-kernel")}
        silu, gelu = operations.LigerSiLUMulFunction.apply, operations.LigerGELUMulFunction.apply
        self.gates: Sequence[Gate] = (lambda gate, up: silu(gate, up, 1.0, 1.0), gelu)

    def take(self, *tensors: Tensor) -> bool:
        return all(each.is_cuda for each in tensors) and not torch.is_autocast_enabled("cuda")

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        normed: Tensor = self._norm(hidden, weight, eps, offset, "gemma" if offset else "llama", False, None)
        return normed  # not in place

    def rotate(self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = self._rotation(q, k, cosines, sines)
        return rotated


class _OnCpu:
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-5

    def __init__(self, kernels: cpu_kernels.CpuKernels) -> None:
        self._kernels = kernels
        self.gates: Sequence[Gate] = (partial(kernels.gated, gelu=False), partial(kernels.gated, gelu=True))
        self.version: Mapping[str, str] = {"sampler's kernels": kernels.version}

    def take(self, *tensors: Tensor) -> bool:
        return cpu_kernels.takes(*tensors)

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        return self._kernels.norm(hidden, weight, eps, offset)

    def rotate(self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.rotate(q, cosines, sines), self._kernels.rotate(k, cosines, sines)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels for a device, if there are any; on a GPU, float32 and float64 put exactness before speed."""
    if device.type == "cpu" and dtype == torch.float32:
        own = cpu_kernels.cpu_kernels()
        return None if own is None else _OnCpu(own)
    halves = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return _Liger() if halves and importlib.util.find_spec(PACKAGE) is not None else None


def use_fused_kernels(model: PreTrainedModel, kernels: Kernels) -> None:
    """Let a model, whose weights are on their device, compute with them where they are right."""
    chosen: dict[type[nn.Module], type[nn.Module] | None] = {}
    with preserved_rng():
        torch.manual_seed(0)
        gated = {id(layer) for layer in feed_forward_layers(model) if _is_gated(layer)}
        for module in model.modules():
            kind = type(module)
            if kind not in chosen and _is_norm(module):
                chosen[kind] = _for_norms(module, kernels)
            elif kind not in chosen and id(module) in gated:
                chosen[kind] = _for_gated(module, kernels, model.dtype)
            module.__class__ = chosen.get(kind) or kind
        rotated = _rotate_by(kernels, model)
    names = [kind.__name__ for kind, own in chosen.items() if own] + [ROTATE] * rotated
    logger.info("fused kernels for %s", ", ".join(names) or "nothing")


def _is_norm(module: nn.Module) -> bool:
    own = [name for name, _ in module.named_parameters()]
    return type(module).__name__.endswith("RMSNorm") and own == ["weight"] and takes_one_argument(module)


@torch.no_grad()
def _for_norms(norm: Any, kernels: Kernels) -> type[nn.Module] | None:
    plain, weight = type(norm), norm.weight
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight.device.type != kernels.device or not isinstance(eps, float):
        return None
    kept, states = weight.clone(), torch.randn(1, 6, len(weight)).to(weight)
    weight.uniform_(0.5, 1.5)  # as it may be after training: a norm times the weight, or one plus the weight
    try:
        inputs = [states, weight]
        expected = _values(lambda hidden, own: functional_call(norm, {"weight": own}, (hidden,)), inputs)
        for offset in (0.0, 1.0):
            compute = partial(_normed, kernels, eps, offset)
            if _alike(compute, inputs, expected, kernels, plain.__name__):
                return _subclass(plain, kernels, partial(_norm_of, compute))
    finally:
        weight.copy_(kept)
    return None


def _normed(kernels: Kernels, eps: float, offset: float, hidden: Tensor, weight: Tensor) -> Tensor:
    return kernels.norm(hidden, weight, eps, offset)


def _norm_of(compute: Callable[[Tensor, Tensor], Tensor], norm: Any, hidden: Tensor) -> Tensor:
    return compute(hidden, norm.weight)


def _is_gated(module: nn.Module) -> bool:
    return {name for name, _ in module.named_children()} >= {"gate_proj", "up_proj", "down_proj"}


def _for_gated(layer: Any, kernels: Kernels, dtype: torch.dtype) -> type[nn.Module] | None:
    plain, device = type(layer), layer.gate_proj.weight.device
    if device.type != kernels.device:
        return None
    states = torch.randn(1, 6, layer.gate_proj.in_features).to(device, dtype)
    expected = _values(layer, [states])
    for gate in kernels.gates:
        compute = partial(_gated, gate)
        if _alike(partial(compute, layer), [states], expected, kernels, plain.__name__):
            return _subclass(plain, kernels, compute)
    return None


def _gated(gate: Gate, layer: Any, hidden: Tensor) -> Tensor:
    narrowed: Tensor = layer.down_proj(gate(layer.gate_proj(hidden), layer.up_proj(hidden)))
    return narrowed


def _subclass(plain: Any, kernels: Kernels, compute: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        if not kernels.take(hidden):
            return plain.forward(self, hidden)  # type: ignore[no-any-return]
        return compute(self, hidden)

    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "forward": forward})


class _Rotation:
    """Rotates by a kernel what it can, and as ``plain`` what else there is."""

    def __init__(self, plain: Callable[..., Any], kernels: Kernels) -> None:
        self.plain, self.kernels = plain, kernels

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = (
            q.dim() == 4
            and (len(q) == 1 or q.is_cuda)
            and cos.dim() == 3
            and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        )
        if args or kwargs or not fits or not q.dtype == k.dtype == cos.dtype or not self.kernels.take(q, k, cos, sin):
            return self.plain(q, k, cos, sin, *args, **kwargs)
        return self.kernels.rotate(q, k, cos, sin)


def _rotate_by(kernels: Kernels, model: PreTrainedModel) -> bool:
    """Rotate by a kernel wherever a file of transformers that the model comes from rotates as it does."""
    replaced = False
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        plain = vars(file).get(ROTATE)
        replaces = not isinstance(plain, _Rotation) or plain.kernels.device != kernels.device
        if plain is None or model.device.type != kernels.device or not replaces:
            continue
        q, k = (torch.randn(1, heads, 6, 64).to(model.device, model.dtype) for heads in (4, 2))
        angles = torch.rand(1, 6, 32).repeat(1, 1, 2)
        rotary = [each.to(q) for each in (angles.cos(), angles.sin())]
        rotation = _Rotation(plain, kernels)
        expected = _values(lambda *each: plain(*each, *rotary), [q, k])  # noqa: B023
        if _alike(lambda *each: rotation(*each, *rotary), [q, k], expected, kernels, ROTATE):  # noqa: B023
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


def _alike(
    compute: Callable[..., Any], inputs: Sequence[Tensor], expected: Sequence[Tensor], kernels: Kernels, name: str
) -> bool:
    try:
        fused = _values(compute, inputs)
    except Exception as error:  # whatever a kernel raises, what it would replace is right
        logger.warning("%s has no fused kernel: %s", name, error)
        return False
    apart = [largest_difference(mine, theirs) for mine, theirs in zip(fused, expected, strict=True)]
    return all(error <= kernels.tolerance * size for error, size in apart)
