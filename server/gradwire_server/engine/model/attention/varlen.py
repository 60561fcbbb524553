"""Attention over a layout of sequences with kernels of a GPU: a varlen kernel, and cuDNN's for long sequences.

cuDNN's takes 0.58 of the time of FlashAttention 2, forward and backward together, on an H200. It computes a sequence a
call and plans anew for each length, so lengths are filled up to few. ``--kernels plain`` leaves it out.

Legend: ``M`` tokens, ``H`` heads, ``K`` heads of keys and values, ``D`` head size.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradwire_server.engine.model.attention.blocks import repeated
from gradwire_server.engine.model.attention.masked import masked_attention
from gradwire_server.engine.model.comparison import largest_difference
from gradwire_server.engine.model.packing import Layout, lay_out, tree_layout

logger = logging.getLogger(__name__)

LONG = 2048
"""Tokens of the shortest sequence of a layout that cuDNN computes."""
FILLED_UP = 512
"""Tokens are filled up to a multiple of this."""
HEAD_SIZES = (64, 128)
"""Sizes of heads with which the kernel was tried."""

Varlen = Callable[[Tensor, Tensor, Tensor, Layout, float, int | None], Tensor]
"""Kernel: ``(query [H, M, D], key [K, M, D], value [K, M, D], layout, scale, window) -> [M, H, D]``."""


def kernel_for(query: Tensor, layout: Layout, window: int | None) -> Varlen | None:
    """The fastest kernel that gives correct results for queries and a layout on their device, or None."""
    device, dtype = query.device, query.dtype
    long = window is None and all(each.length >= LONG and not each.spans for each in layout.segments)
    if long and query.shape[-1] in HEAD_SIZES and torch.backends.cuda.cudnn_sdp_enabled():
        return long_kernel(device, dtype) or varlen_kernel(device, dtype)
    return varlen_kernel(device, dtype)


@cache
def long_kernel(device: torch.device, dtype: torch.dtype) -> Varlen | None:
    """A kernel for long sequences without prefixes that gives correct results on this device, or None."""
    if dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability(device) < (9, 0):
        return None
    lengths = torch.tensor([FILLED_UP + 40, 90])
    try:
        if _is_right(_cudnn_each, device, dtype, lay_out(torch.arange(int(lengths.sum())), lengths), [None]):
            return _cudnn_each
        reason = "its results differ from those of plain attention"
    except RuntimeError as error:
        reason = str(error)
    logger.warning("cuDNN's attention is not used on %s: %s", device, reason)
    return None


@cache
def varlen_kernel(device: torch.device, dtype: torch.dtype) -> Varlen | None:
    """A kernel for sequences of different lengths that gives correct results on this device, or None."""
    if dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    layout = tree_layout()
    for name, kernel in (
        ("torch.nn.attention.varlen", _torch_varlen),
        ("torch.nn.attention.varlen", _torch_varlen_of_repeated),
        ("flash_attn", _flash_varlen),
    ):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        try:
            if _is_right(kernel, device, dtype, layout, [None, 8]):
                return kernel
            reason = "its results differ from those of plain attention"
        except (RuntimeError, TypeError, ValueError) as error:  # raised by kernels and their bindings
            reason = str(error)
        logger.warning("%s is not used on %s: %s", name, device, reason)
    return None


@torch.enable_grad()
def _is_right(
    kernel: Varlen, device: torch.device, dtype: torch.dtype, layout: Layout, windows: Sequence[int | None]
) -> bool:
    """Whether a kernel agrees with plain attention over a layout, also in its gradients and with shared heads."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, len(layout.input_ids), 64) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes)
    for window in windows:
        queries, keys, values = (each.transpose(0, 1) for each in (q, k, v))
        expected = masked_attention(queries, keys, values, layout.masked, 0.2, window)
        by_kernel = kernel(q, k, v, layout, 0.2, window)
        weights = torch.sin(torch.arange(by_kernel.numel(), device=device)).view_as(by_kernel)
        gradients = [torch.autograd.grad((each * weights).sum(), (q, k, v)) for each in (by_kernel, expected)]
        for mine, right in ((by_kernel, expected), *zip(*gradients, strict=True)):
            error, size = largest_difference(mine, right)
            if not error < 0.02 * size:
                return False
    return True


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    kernel: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    q, k, v, lengths = _varlen_arguments(q, k, v, layout)
    shared_heads = {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}
    out: Tensor = kernel(q, k, v, *lengths, scale=scale, window_size=(window - 1 if window else -1, 0), **shared_heads)
    return out


def _torch_varlen_of_repeated(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int | None
) -> Tensor:
    k, v = (repeated(each[None], len(q) // len(each))[0] for each in (k, v))
    return _torch_varlen(q, k, v, layout, scale, window)


def _flash_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    kernel: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    q, k, v, lengths = _varlen_arguments(q, k, v, layout)
    out: Tensor = kernel(
        q, k, v, *lengths, softmax_scale=scale, causal=True, window_size=(window - 1 if window else -1, 0)
    )
    return out


def _cudnn_each(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    lengths = [segment.length for segment in layout.segments]
    rows = zip(q.split(lengths, dim=1), k.split(lengths, dim=1), v.split(lengths, dim=1), strict=True)
    return torch.cat([_cudnn(*row, scale) for row in rows], dim=1).transpose(0, 1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    tokens = q.shape[1]
    q, k, v = (F.pad(each, (0, 0, 0, -tokens % FILLED_UP))[None] for each in (q, k, v))  # no token sees a later one
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0, :, :tokens]


def _varlen_arguments(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, int, int]]:
    """Arguments for the kernels: tokens first, each segment's keys after its nodes'; causal to the keys' end."""
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    queries, keys, places = layout.on(q.device)
    if places is not None:
        k, v = k.index_select(0, places), v.index_select(0, places)
    return q, k, v, (queries, keys, layout.longest, layout.reach)
