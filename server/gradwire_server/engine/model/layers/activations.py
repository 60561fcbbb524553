"""The handling of a micro-batch's activations between its forward and its backward."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire_server.engine.model.placement import storage_address, storage_addresses

ALL = 1 << 62
"""A number of tokens that no micro-batch has."""
LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device: each copy has a fixed cost."""


class Activations(enum.Flag):
    """The handling of a micro-batch's activations; ``KEEP`` leaves them on the device."""

    KEEP = 0
    RECOMPUTE = enum.auto()
    """Each layer keeps its input alone, and is computed again in the backward pass, with the same bits."""
    OFFLOAD = enum.auto()
    """Kept activations are copied to host memory, and back for the backward pass, with the same bits."""
    CHUNK = enum.auto()
    """Feed-forward layers compute the tokens in chunks (:mod:`.feed_forward`), with the same result up to rounding."""

    @property
    def label(self) -> str:
        """``"keep"``, ``"recompute"``, ``"recompute+chunk"`` and so on."""
        return "keep" if self is Activations.KEEP else "+".join(str(each.name).lower() for each in self)

    def saving(self, weights: Iterable[Tensor]) -> AbstractContextManager[object]:
        """Context of a forward whose saved tensors go where they are to be; weights and buffers stay."""
        return Offloading(weights) if Activations.OFFLOAD in self else nullcontext()


class Offloading(torch.autograd.graph.saved_tensors_hooks):
    """Copy what autograd saves in the context to host memory, and back when a backward pass needs it.

    Within layers that are recomputed it copies their inputs alone. On a GPU the copies are queued behind the
    computations, from and to pinned memory, so the host does not wait for them.

    Args:
        weights: Tensors that stay where they are.

    Attributes:
        bytes: Bytes copied to host memory.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__(self._pack, _unpacked)
        self.bytes = 0
        self._weights = storage_addresses(weights)
        self._copies: dict[tuple[object, ...], tuple[weakref.ref[Any], _OnHost]] = {}

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage, address = tensor.untyped_storage(), storage_address(tensor)
        if storage.nbytes() < LEAST_BYTES or address in self._weights:
            return tensor
        # Memory that several tensors view is copied once. Its address may be other memory's by now.
        key = address, tensor._version, tensor.dtype
        known = self._copies.get(key)
        if known is None or known[0]() is not storage:
            known = self._copies[key] = weakref.ref(storage), _OnHost(tensor)
            self.bytes += storage.nbytes()
        return _View(known[1], tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class _OnHost:
    """A copy in host memory of what a tensor views; of a meta tensor, which has no memory, there is none."""

    def __init__(self, tensor: Tensor) -> None:
        self._count = tensor.untyped_storage().nbytes() // tensor.itemsize
        self._device, self._dtype = tensor.device, tensor.dtype
        self._values: Tensor | None = None
        if not tensor.is_meta:
            self._values = torch.empty(self._count, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._values.copy_(tensor.detach().as_strided((self._count,), (1,), 0), non_blocking=True)

    def on_device(self) -> Tensor:
        """The values on the device where they were, flat."""
        if self._values is None:
            return torch.empty(self._count, dtype=self._dtype, device=self._device)
        return self._values.to(self._device, non_blocking=True)


class _View(NamedTuple):
    """A tensor whose values are in host memory."""

    values: _OnHost
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpacked(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.values.on_device().as_strided(packed.shape, packed.stride, packed.offset)
