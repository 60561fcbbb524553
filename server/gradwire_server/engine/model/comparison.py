"""How far two computations of the same numbers are apart, for the checks of models and kernels at load."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_difference(mine: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, NaN if one has a NaN, and the size by which a tolerance of it is
    multiplied: one more than the largest of ``theirs``."""
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return (mine - theirs).abs().max().item(), 1.0 + theirs.abs().max().item()


def relative_tolerance(dtype: torch.dtype) -> float:
    """How far two computations in this dtype may be apart, as a part of :func:`largest_difference`'s size."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
