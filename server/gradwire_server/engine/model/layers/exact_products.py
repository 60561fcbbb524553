"""Products whose bits in a row depend on that row alone, on a CPU: what a deterministic server computes with.

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

_used = False


def use_exact_products(used: bool) -> None:
    """Say whether this process computes products so."""
    global _used
    _used = used


def exact_kernels() -> CpuKernels | None:
    """The kernels, where this process computes products so."""
    return cpu_kernels() if _used else None


class _Panels(NamedTuple):
    """A weight's copy in a kernel's order, and the state of the weight that it was made of."""

    weight: weakref.ref[Tensor]
    version: tuple[int, int]
    panels: Tensor


_panels: dict[tuple[int, tuple[int, ...]], _Panels] = {}


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, kernels: CpuKernels) -> Tensor:
    """``x [.., I] W^T + bias`` without a gradient, ``W [O, I]``, in the dtype of ``x``."""
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
    for layer in model.modules():
        if type(layer) in (nn.Linear, Conv1D):
            vars(layer)["forward"] = partial(_of_layer, layer)


def _of_layer(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight.T if type(layer) is Conv1D else layer.weight
    kernels = cpu_kernels()
    assert kernels is not None  # without them no model is loaded so
    product: Tensor = _Product.apply(x, weight, layer.bias, kernels)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: CpuKernels) -> Tensor:
        ctx.save_for_backward(x, weight)
        return exact_product(x, weight, bias, kernels)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        rows = of_out.flatten(0, -2)
        return (
            of_out @ weight if of_x else None,
            rows.T @ x.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
        )
