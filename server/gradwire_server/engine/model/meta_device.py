"""The device that the meta device, whose tensors have no numbers, stands for: a GPU, or a CPU.

Outside of :func:`estimating` it stands for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DeviceKind = Literal["cpu", "cuda"]

_estimated: ContextVar[DeviceKind | None] = ContextVar("estimated", default=None)


@contextmanager
def estimating(kind: DeviceKind) -> Iterator[None]:
    """Compute on the meta device what a device of this kind would, to count its memory; may be within itself."""
    if _estimated.get() == kind:
        yield
        return
    token = _estimated.set(kind)
    try:
        with _GroupedProducts():  # type: ignore[no-untyped-call]
            yield
    finally:
        _estimated.reset(token)


def is_estimate(device: torch.device) -> bool:
    """Whether computations on a device are counted only, so that a kernel may stand for another of the same memory."""
    return device.type == "meta" and _estimated.get() is not None


def computes_as_cpu(device: torch.device) -> bool:
    """Whether computations on a device are those of a CPU."""
    return device.type == "cpu" or (device.type == "meta" and _estimated.get() == "cpu")


class _GroupedProducts(TorchDispatchMode):
    """Let grouped products of meta tensors have any dtype and layout, as a device's have; torch's own are bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return _grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, bias: None = None, out_dtype: None = None) -> Tensor:
    """Tokens by weights ``[S, I], [E, I, O] -> [S, O]``, or by tokens, ``[I, S], [S, O] -> [E, I, O]``."""
    shape = (len(a), b.shape[-1]) if b.dim() == 3 else (len(offs), len(a), b.shape[-1])
    return a.new_empty(shape)
