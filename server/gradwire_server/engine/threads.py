"""Number of CPU threads for a piece of work: all of them, or one where waking the others takes longer than it saves.

A micro-batch of a small model consists of some hundred matrix products of microseconds each, and a passively waiting
thread takes tens of microseconds to wake (see ``ENVIRONMENT`` in :mod:`gradwire_server.engine_client.process`). The
number depends on the work alone, so a replay of the journal reproduces the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 3e7
"""Tokens times parameters of a forward and backward at which two threads become as fast as one. Measured with 113,000
parameters: 128 tokens took 5.5 ms on one thread and 6.6 ms on two; 512 tokens took 15.1 ms and 13.0 ms."""
STEP_TOKENS = 32
"""Tokens whose forward and backward cost about as much as an optimizer step."""


@contextmanager
def suited_threads(device: torch.device, tokens: int, num_parameters: int) -> Iterator[None]:
    """Run the body with the number of torch threads that suits its work; restore the number afterwards."""
    whole = torch.get_num_threads()
    if device.type != "cpu" or whole == 1 or tokens * num_parameters >= SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(whole)
