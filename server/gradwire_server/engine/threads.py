"""Number of CPU threads for a piece of work: all of them, or one where waking the others takes longer than it saves.

A micro-batch of a small model consists of some hundred operations of microseconds each, and handing half of one to
another thread takes microseconds while that thread spins, tens of them when it sleeps (see
:mod:`gradwire_server.engine.process.setup`). The number depends on the work alone, so a replay of the journal
reproduces the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

SMALL = 1e8
"""Tokens times parameters of a forward and backward at which two threads become as fast as one. Measured with 439,000
parameters: 128 tokens took 19.0 ms on one thread and 21.5 ms on two, 256 took 24.5 and 24.2, 512 took 53.5 and 44.3."""
STEP_TOKENS = 32
"""Tokens whose forward and backward cost about as much as an optimizer step."""
SMALL_SAMPLING = 5e8
"""Tokens, ``READ_TOKENS`` included, times parameters of a sampler's forward at which two threads become as fast as one.
Measured with a token of each of 32 samples: 3 M parameters took 14.4 ms on one thread and 14.0 ms on two, 17 M took
38.0 and 36.3 ms; one sample with 17 M took 11.9 and 13.2 ms, with 61 M 28.6 and 29.4 ms."""
SMALL_PRODUCTS = 1.5e8
"""The same where more than one thread computes only products. With 4.4 M parameters a token of each of 16 samples took
18.4 ms on one thread and 17.4 ms on two, of 32 samples 19.0 and 16.9, of 64 samples 29.7 and 25.0 ms."""
READ_TOKENS = 16
"""Tokens whose products take as long as reading the weights once, which a token alone waits for."""
FUNCTIONS = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2",
    "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Functions that torch computes by MKL's vector math."""

_products: ContextVar[int | None] = ContextVar("products", default=None)
"""Number of threads for products within :func:`products_apart`."""


def suited_threads(device: torch.device, tokens: int, num_parameters: int) -> AbstractContextManager[None]:
    """Run the body, a forward and backward, with the number of torch threads that suits it, and restore the number."""
    return _threads(device, small=tokens * num_parameters < SMALL)


def sampling_threads(
    device: torch.device, tokens: int, num_parameters: int, *, products_only: bool
) -> AbstractContextManager[None]:
    """The same for a sampler's forward, of which more than one thread may compute only products."""
    least = SMALL_PRODUCTS if products_only else SMALL_SAMPLING
    return _threads(device, small=(READ_TOKENS + tokens) * num_parameters < least)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one torch thread, and restore the number."""
    whole = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(whole)


@contextmanager
def products_apart() -> Iterator[None]:
    """Compute with one thread within the body, but :func:`products` with all.

    A token of some dozens of rows has as many small operations a layer between its products. Two threads take longer to
    meet for one of them than one takes to compute it: 64 rows of SmolLM2-135M took 0.9 of the time on two idle cores,
    0.65 beside other work, and 0.8 of the processor time.
    """
    before = _products.set(torch.get_num_threads())
    try:
        with one_thread():
            yield
    finally:
        _products.reset(before)


@contextmanager
def products() -> Iterator[None]:
    """Compute the body with all threads, also within :func:`products_apart`."""
    threads = _products.get()
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
    return _products.get() or torch.get_num_threads()


def _threads(device: torch.device, *, small: bool) -> AbstractContextManager[None]:
    return one_thread() if device.type == "cpu" and small else nullcontext()


def choose_functions() -> None:
    """Let MKL choose its functions for this processor, by calling each with one number.

    It chooses at a function's first call. While several threads make that one, a thread may compute its part by a
    function of few digits: 1 of 24 processes began with a sine or cosine that was wrong by 1.5e-4 in its second half
    (pytorch/pytorch#188792).
    """
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(number)
