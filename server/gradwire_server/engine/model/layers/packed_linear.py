"""Products on a CPU with weights in the order in which oneDNN reads them.

torch's product of some dozens of rows brings the weight into that order in each call, piece by piece. A sampler
multiplies the same weights once a token, so that a copy in this order pays: a core of an AMD EPYC makes 1.2 times as
many products of 64 rows with SmolLM2-135M's layers, 1.6 times as many with its output head, and for 16 rows 1.5 and 2.4
times. On two threads that model makes 1.7 times as many tokens of 2 or 4 samples. A single row is no faster.
"""

from __future__ import annotations

import logging
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
from gradwire_server.engine.threads import one_thread

logger = logging.getLogger(__name__)

FEWEST_ROWS = 2
"""Rows from which on a product with an ordered weight is faster."""
FEWEST_ENTRIES = 1 << 16
"""Entries of a weight that is worth it."""

_packed: ContextVar[Mapping[int, Tensor]] = ContextVar("packed", default=MappingProxyType({}))
_threads: ContextVar[int | None] = ContextVar("threads", default=None)
"""Number of threads for :func:`products` within :func:`products_apart`."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias``, within :meth:`PackedWeights.in_use` with the copy of the weight."""
    with products():
        packed = _packed.get().get(id(weight))
        if packed is None or x.numel() < FEWEST_ROWS * x.shape[-1]:
            return F.linear(x, weight, bias)
        return _product(x, packed, bias)


@contextmanager
def products() -> Iterator[None]:
    """Compute the body with all threads, also within :func:`products_apart`."""
    threads = _threads.get()
    if threads is None:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def product_threads() -> int:
    """Number of threads of :func:`products`."""
    return _threads.get() or torch.get_num_threads()


@contextmanager
def products_apart() -> Iterator[None]:
    """Compute with one thread within the body, but :func:`products` with all.

    A token of some dozens of rows has as many small operations a layer between its products. Two threads take longer to
    meet for one of them than one takes to compute it: 64 rows of SmolLM2-135M took 0.9 of the time on two idle cores,
    0.65 beside other work, and 0.8 of the processor time.
    """
    before = _threads.set(torch.get_num_threads())
    try:
        with one_thread():
            yield
    finally:
        _threads.reset(before)


class _Copy(NamedTuple):
    """A layer, its weight when it was copied, and what computes it."""

    layer: nn.Linear
    weight: Tensor
    version: tuple[int, int]
    forward: Callable[[Tensor], Tensor]


class PackedWeights:
    """Copies of the weights of a model's plain linear layers, made when they are first used.

    Args:
        model: The model, in float32 on a CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: list[_Copy] | None = None
        self._packed: dict[int, Tensor] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the copies within the body, without gradients; copies of changed weights are made anew."""
        if not _is_right():
            yield
            return
        copies = self._copies
        if copies is None or any(
            copy.layer.weight is not copy.weight or _version(copy.weight) != copy.version for copy in copies
        ):
            copies = self._copies = self._copy()
        before = _packed.set(self._packed)
        for copy in copies:
            vars(copy.layer)["forward"] = copy.forward
        try:
            yield
        finally:
            for copy in copies:
                del vars(copy.layer)["forward"]
            _packed.reset(before)

    @torch.no_grad()
    def _copy(self) -> list[_Copy]:
        copies, self._packed = list[_Copy](), {}
        for layer in self._model.modules():
            # Another forward, such as that of accelerate's hooks, is an attribute of the layer.
            if type(layer) is not nn.Linear or "forward" in vars(layer) or layer.weight.numel() < FEWEST_ENTRIES:
                continue
            weight = layer.weight
            if id(weight) not in self._packed:
                self._packed[id(weight)] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            forward = partial(linear, weight=weight, bias=layer.bias)
            copies.append(_Copy(layer, weight, _version(weight), forward))
        return copies


def _version(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return found


@cache
@torch.no_grad()
def _is_right() -> bool:
    """Whether this torch multiplies so, and the products are right."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((2, 7, 96), (80, 96), (80,)))
    try:
        found = _product(x, torch.ops.mkldnn._reorder_linear_weight(weight), bias)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        logger.info("weights are not put in oneDNN's order: %s", error)
        return False
    apart, size = largest_difference(found, F.linear(x, weight, bias))
    return apart <= 1e-4 * size
