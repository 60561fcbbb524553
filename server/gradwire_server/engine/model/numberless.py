"""What the meta device, whose tensors have no numbers, stands for while something is computed on it.

Estimates compute there what a CPU would; where nothing is said, it stands for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_as_on_a_cpu: ContextVar[bool] = ContextVar("as_on_a_cpu", default=False)


@contextmanager
def as_on_a_cpu() -> Iterator[None]:
    """Compute on the meta device what a CPU computes."""
    token = _as_on_a_cpu.set(True)
    try:
        yield
    finally:
        _as_on_a_cpu.reset(token)


def computes_as_cpu(device: torch.device) -> bool:
    """Whether computations on a device are those of a CPU."""
    return device.type == "cpu" or (device.type == "meta" and _as_on_a_cpu.get())
