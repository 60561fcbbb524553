"""What the meta device, whose tensors have no numbers, stands for while something is computed on it: a GPU, or a CPU.

Outside of :func:`estimating` it stands for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

DeviceKind = Literal["cpu", "cuda"]

_estimated: ContextVar[DeviceKind | None] = ContextVar("estimated", default=None)


@contextmanager
def estimating(kind: DeviceKind) -> Iterator[None]:
    """Compute on the meta device what a device of this kind would, to count its memory."""
    token = _estimated.set(kind)
    try:
        yield
    finally:
        _estimated.reset(token)


def is_estimate(device: torch.device) -> bool:
    """Whether computations on a device are counted only, so that a kernel may stand for another of the same memory."""
    return device.type == "meta" and _estimated.get() is not None


def computes_as_cpu(device: torch.device) -> bool:
    """Whether computations on a device are those of a CPU."""
    return device.type == "cpu" or (device.type == "meta" and _estimated.get() == "cpu")
