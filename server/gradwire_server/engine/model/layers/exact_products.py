"""Products whose bits in a row depend on that row alone, on a CPU: what a deterministic run computes with.

torch's products of the same row differ in their last bits with the number of rows beside it, in float32 and in
bfloat16, since another kernel, or another cut of its sums, suits another size. :meth:`.cpu_kernels.CpuKernels.product`
adds up each output in the order of the inputs, in float32, whatever the number of rows and threads. Forwards are
computed by it; backward passes, whose sums go over the rows, by torch.

Legend: ``I``, ``O`` features in and out.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gradwire_server.engine.model.layers.cpu_kernels import CpuKernels, cpu_kernels


def exact_kernels() -> CpuKernels:
    """The kernels, without which no model is loaded so."""
    kernels = cpu_kernels()
    assert kernels is not None
    return kernels


class _Panels(NamedTuple):
    """A weight's copy in a kernel's order, and the state of the weight that it was made of."""

    weight: weakref.ref[Tensor]
    version: tuple[int, int]
    panels: Tensor


_panels: dict[tuple[int, tuple[int, ...]], _Panels] = {}


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [.., I] W^T + bias`` without a gradient, ``W [O, I]``, in the dtype of ``x``."""
    kernels = exact_kernels()
    panels = _panels_of(weight, kernels)
    return kernels.product(x.float(), panels, None if bias is None else bias.float(), len(weight)).to(x.dtype)


def _panels_of(weight: Tensor, kernels: CpuKernels) -> Tensor:
    """The copy of a weight or of a view of one, made when the weight is new or has changed."""
    owner = weight if weight._base is None else weight._base
    key, version = (id(owner), weight.stride()), (weight.data_ptr(), weight._version)
    found = _panels.get(key)
    if found is None or found.weight() is not owner or found.version != version:
        with torch.no_grad():
            panels = kernels.packed(weight.detach().float())
        _panels[key] = found = _Panels(weakref.ref(owner, lambda _: _panels.pop(key, None)), version, panels)
    return found.panels


def compute_exactly(model: nn.Module) -> None:
    """Let a model's linear layers compute so."""
    for layer in _layers(model):
        vars(layer)["forward"] = partial(_of_layer, layer)


def panel_bytes(model: nn.Module) -> int:
    """Bytes of the copies of the weights of a model's linear layers that exact products are computed with."""
    weights = {id(layer.weight): _weight_of(layer) for layer in _layers(model)}
    return sum(map(panel_bytes_of, weights.values()))


def panel_bytes_of(weight: Tensor) -> int:
    """Those of one weight, whose outputs are filled up to whole panels."""
    kernels = cpu_kernels()
    outputs = len(weight) + (0 if kernels is None else kernels.missing(len(weight)))
    return outputs * weight.shape[1] * torch.float32.itemsize


def _layers(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if type(layer) in (nn.Linear, Conv1D)]


def _weight_of(layer: Any) -> Tensor:
    """``[O, I]``."""
    weight: Tensor = layer.weight
    return weight.T if type(layer) is Conv1D else weight


def _of_layer(layer: Any, x: Tensor) -> Tensor:
    product: Tensor = _Product.apply(x, _weight_of(layer), layer.bias)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return exact_product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = of_out.flatten(0, -2)
        return (
            of_out @ weight if of_x else None,
            rows.T @ x.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
