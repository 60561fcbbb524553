"""Number of CPU threads for a piece of work: all of them, or one where waking the others takes longer than it saves.

A micro-batch of a small model consists of some hundred matrix products of microseconds each, and a passively waiting
thread takes tens of microseconds to wake (see ``ENVIRONMENT`` in :mod:`gradwire_server.engine_client.process`). The
number depends on the work alone, so a replay of the journal reproduces the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

SMALL = 3e7
"""Tokens times parameters of a forward and backward at which two threads become as fast as one. Measured with 113,000
parameters: 128 tokens took 5.5 ms on one thread and 6.6 ms on two; 512 tokens took 15.1 ms and 13.0 ms."""
STEP_TOKENS = 32
"""Tokens whose forward and backward cost about as much as an optimizer step."""
SMALL_SAMPLING = 5e8
"""Tokens, ``READ_TOKENS`` included, times parameters of a sampler's forward at which two threads become as fast as one.
Measured with a token of each of 32 samples: 4 M parameters took 10.1 ms on one thread and 14.1 ms on two, 15 M took
24.4 and 24.3 ms; one sample with 4 M took 4.2 and 8.5 ms, with 80 M 34.7 and 27.8 ms."""
READ_TOKENS = 16
"""Tokens whose products take as long as reading the weights once, which a token alone waits for."""


def suited_threads(device: torch.device, tokens: int, num_parameters: int) -> AbstractContextManager[None]:
    """Run the body, a forward and backward, with the number of torch threads that suits it, and restore the number."""
    return _threads(device, small=tokens * num_parameters < SMALL)


def sampling_threads(device: torch.device, tokens: int, num_parameters: int) -> AbstractContextManager[None]:
    """The same for a sampler's forward."""
    return _threads(device, small=(READ_TOKENS + tokens) * num_parameters < SMALL_SAMPLING)


@contextmanager
def _threads(device: torch.device, *, small: bool) -> Iterator[None]:
    whole = torch.get_num_threads()
    if device.type != "cpu" or whole == 1 or not small:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(whole)
