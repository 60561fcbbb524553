"""Copies from the model's device to the host, which wait for the device.

A GPU executes what it was given while the host prepares the next kernels, until the host asks for a number. So
everything that is needed from the device goes through :func:`fetched`, all at once, at most twice an operation and once
a sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host, detached, and wait for the device once; tensors on the host are not copied."""
    copies = [_copy(tensor.detach()) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
