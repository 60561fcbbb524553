"""How many of the CPU's threads compute a piece of work: all of them, or one where waking others takes longer.

A micro-batch of a small model is some hundred products of microseconds, and a thread that waits passively (see
``engine_process.ENVIRONMENT``) takes tens of them to wake. The number depends on the work alone, so that a replay of
the journal gives the bits that were given before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 3e7
"""Tokens times parameters of a forward and backward for which two threads are as quick as one. Of 113,000 parameters,
128 tokens took 5.5 ms with one thread and 6.6 with two, 512 tokens 15.1 and 13.0."""
STEP_TOKENS = 32
"""Tokens whose forward and backward is about the work of an optimizer's step."""


@contextmanager
def suited_threads(device: torch.device, tokens: int, num_parameters: int) -> Iterator[None]:
    """Torch computes with the number of threads that suits this work within."""
    whole = torch.get_num_threads()
    if device.type != "cpu" or whole == 1 or tokens * num_parameters >= SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(whole)
