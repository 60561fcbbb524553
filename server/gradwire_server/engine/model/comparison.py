"""Distance of two computations of the same numbers, for the checks of models and kernels at load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def forward_by(module: nn.Module, compute: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module compute with other numbers than its weights."""
    own = vars(module)
    kept = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = compute
    try:
        yield
    finally:
        del own["forward"]
        own.update(kept)


def largest_difference(mine: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, NaN if one has a NaN, and the size by which a tolerance of it is
    multiplied: the largest number of ``theirs``, or next to nothing where all are zero."""
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return (mine - theirs).abs().max().item(), max(theirs.abs().max().item(), sys.float_info.min)


def relative_tolerance(dtype: torch.dtype) -> float:
    """How far two computations in this dtype may be apart, as a part of :func:`largest_difference`'s size."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def ordinary_ids(count: int, vocab_size: int) -> Tensor:
    """``[count]`` tokens from all over a vocabulary. Its first ones are special: to a model in bfloat16 those alone are
    noise, in which two computations of SmolLM2-135M's logits were 1.8 of 36 apart."""
    return (1 + torch.arange(count)) * max(1, vocab_size // (count + 1)) % vocab_size
