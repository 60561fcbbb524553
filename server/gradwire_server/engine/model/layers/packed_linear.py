"""Products on a CPU with copies of weights in the order in which a kernel reads them.

torch's products are made for many rows. A sampler multiplies the same weights by a few rows once a token: then
:meth:`.cpu_kernels.CpuKernels.product` makes 1.2 to 1.8 times as many products of 64 rows a second as torch, 1.6 to 2.3
times as many of 16 or 4 rows, and 1.1 times as many of one row, in SmolLM2-135M's layers on a core of a Xeon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_server.engine.model.comparison import largest_difference
from gradwire_server.engine.model.layers.cpu_kernels import CpuKernels, cpu_kernels
from gradwire_server.engine.threads import products

MOST_ROWS = 256
"""Rows from which on MKL is faster."""

_packed: ContextVar[Mapping[int, Packed]] = ContextVar("packed", default=MappingProxyType({}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias``, within :meth:`PackedWeights.in_use` with the copy of the weight."""
    found = product_with_copy(x, weight, bias)
    if found is not None:
        return found
    with products():
        return F.linear(x, weight, bias)


def product_with_copy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """The same of float32 states and a weight of any precision; None where there is no copy, or too many rows."""
    packed = _packed.get().get(id(weight))
    if packed is None or x.numel() > MOST_ROWS * x.shape[-1]:
        return None
    return packed.kernels.product(x, packed.panels, bias, packed.outputs)


def copies_in_use() -> Mapping[int, Packed]:
    """The copies of weights that :func:`linear` computes with now; others once they are made anew."""
    return _packed.get()


class Packed(NamedTuple):
    """A copy of a weight, and what computes with it."""

    panels: Tensor
    outputs: int
    kernels: CpuKernels


class _Copy(NamedTuple):
    """A layer, its weight when it was copied, and what computes it; None for a head, which computes with the copy."""

    layer: nn.Linear
    weight: Tensor
    version: tuple[int, int]
    forward: Callable[[Tensor], Tensor] | None


class PackedWeights:
    """Copies of the weights of a model's plain linear layers, made when they are first used.

    Of a model of less precision they are the output head's alone, whose products are in float32.

    Args:
        model: The model, on a CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: list[_Copy] | None = None
        self._packed: dict[int, Packed] = {}

    @property
    def frozen(self) -> bool:
        """Whether no weight is trained that has a copy."""
        return not any(copy.weight.requires_grad for copy in self._copies or ())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the copies within the body, without gradients; copies of changed weights are made anew."""
        copies = self._copies
        if copies is None or any(
            copy.layer._parameters["weight"] is not copy.weight or _version(copy.weight) != copy.version
            for copy in copies
        ):
            copies = self._copies = self._copy()
        before = _packed.set(self._packed)
        layers = [(vars(copy.layer), copy.forward) for copy in copies if copy.forward is not None]
        for attributes, forward in layers:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in layers:
                del attributes["forward"]
            _packed.reset(before)

    @torch.no_grad()
    def _copy(self) -> list[_Copy]:
        copies, self._packed = list[_Copy](), {}
        kernels = cpu_kernels()
        if kernels is None:
            return copies
        head = getattr(self._model, "get_output_embeddings", lambda: None)()
        for layer in self._model.modules():
            # Another forward, such as that of accelerate's hooks, is an attribute of the layer.
            if type(layer) is not nn.Linear or "forward" in vars(layer):
                continue
            weight = layer.weight
            if not weight.is_cpu:  # a meta tensor has no numbers to copy
                continue
            whole = weight.dtype == torch.float32
            if not whole and layer is not head:
                continue
            if id(weight) not in self._packed:
                self._packed[id(weight)] = Packed(kernels.packed(weight.detach().float()), len(weight), kernels)
            forward = partial(linear, weight=weight, bias=layer.bias) if whole else None
            copies.append(_Copy(layer, weight, _version(weight), forward))
        return copies


def _version(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


@cache
@torch.no_grad()
def has_right_products() -> bool:
    """Whether there are kernels here whose products are right."""
    kernels = cpu_kernels()
    if kernels is None:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((2, 7, 96), (80, 96), (80,)))
    apart, size = largest_difference(
        kernels.product(x, kernels.packed(weight), bias, len(weight)), F.linear(x, weight, bias)
    )
    return apart <= 1e-5 * size
