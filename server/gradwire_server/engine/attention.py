"""Attention over packed sequences, as an attention implementation of transformers.

Without a layout it is transformers' own SDPA, so that a model keeps this implementation for all its life. With one
(keyword :data:`LAYOUT`, which the layers pass on, also when gradient checkpointing calls them again), each segment of
the token axis attends causally to itself and to all of its prefix. Legend: ``M`` tokens, ``H`` heads, ``D`` their size.

On CUDA one varlen kernel does it. On the CPU, PyTorch's flash kernel is called for blocks: each bucket of segments
with itself, and all branches of a prefix with that. A token's partial results combine by their log-sum-exps, and the
kernel's backward, given the combined output and log-sum-exp, yields each block's exact share of the gradient, so that
no key is copied and no mask built. Elsewhere, and for windows and dropout, segments go one by one.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gradwire_server.engine.packing import Bucket, Layout, lay_out

logger = logging.getLogger(__name__)

NAME = "gradwire"
"""Of the attention implementation."""
LAYOUT = "token_layout"
"""The keyword that carries a :class:`.packing.Layout` through a model."""

_HARMLESS = {"position_ids", "cache_position", "use_cache", "is_causal"}
_Varlen = Callable[[Tensor, Tensor, Tensor, Layout, float, int | None], Tensor]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``[1, H, M, D]``, keys and values with as many heads or fewer -> ``[1, M, H, D]``.

    Raises:
        NotImplementedError: the model asks for something else than causal attention within a window.
    """
    layout: Layout | None = kwargs.pop(LAYOUT, None)
    if layout is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **kwargs
        )
        return result
    unknown = [name for name, given in kwargs.items() if name not in _HARMLESS and given not in (None, False)]
    if unknown or not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise NotImplementedError(f"packed attention is causal, and knows nothing of {', '.join(unknown) or 'others'}")
    if _observed is not None:
        _observed.attention_windows.add(sliding_window)
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast: rotary embeddings have widened them
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window and sliding_window < layout.reach else None
    one_size = query.shape[-1] == value.shape[-1]
    varlen = _varlen(query.device, query.dtype) if query.is_cuda and one_size and query.shape[-1] <= 256 else None
    if varlen is not None and not dropout:
        return varlen(query[0], key[0], value[0], layout, scale, window)[None], None
    if query.device.type == "cpu" and one_size and not dropout and window is None:
        return _Blocks.apply(query, key, value, layout, scale), None  # type: ignore[no-untyped-call]
    return _one_by_one(query, key, value, layout, scale, window, dropout), None


# ------------------------------------------------------------------ what the model asks for


@dataclass
class Observed:
    """What a model asked of attention.

    Attributes:
        mask_windows: the widths that its masks bound attention to, of windows or of chunks; None for no bound.
        mask_functions: whether a mask was anything else beside causal.
        attention_windows: the widths that its layers told :func:`packed_attention`.
    """

    mask_windows: set[int | None] = field(default_factory=set)
    mask_functions: bool = False
    attention_windows: set[int | None] = field(default_factory=set)


_observed: Observed | None = None


@contextmanager
def observing() -> Iterator[Observed]:
    """Writes down what models ask for within. Where there is a layout no mask is looked at: it must not matter."""
    global _observed
    _observed = Observed()
    try:
        yield _observed
    finally:
        _observed = None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if _observed is not None:
        _observed.mask_windows.add(kwargs.get("local_size"))
        _observed.mask_functions |= kwargs.get("use_vmap", False)
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)


# ------------------------------------------------------------------ CPU


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        q, k, v = _by_token(query), _repeated(_by_token(key), groups), _repeated(_by_token(value), groups)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for bucket in layout.buckets:
            of_bucket, lse_of_bucket = _flash(*(_take(each, bucket) for each in (q, k, v)), 0.0, True, scale=scale)
            _put(out, bucket, of_bucket.transpose(1, 2))
            _put(lse, bucket, lse_of_bucket.transpose(1, 2))
        for start, stop, prefix_start, prefix_stop in layout.prefix_blocks:
            more, more_lse = _flash(
                _heads(q[start:stop]), _heads(k[prefix_start:prefix_stop]), _heads(v[prefix_start:prefix_stop]),
                0.0, False, scale=scale,
            )  # fmt: skip
            more, more_lse = more[0].transpose(0, 1), more_lse[0].transpose(0, 1)
            own, own_lse = out[start:stop], lse[start:stop]
            total = torch.logaddexp(own_lse, more_lse)
            own *= (own_lse - total).exp_()[..., None]
            own += more * (more_lse - total).exp_()[..., None]
            own_lse.copy_(total)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout: Layout = ctx.layout
        groups = query.shape[1] // key.shape[1]
        q, k, v = _by_token(query), _repeated(_by_token(key), groups), _repeated(_by_token(value), groups)
        grad = grad_out[0].contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for bucket in layout.buckets:
            of_bucket = _flash_backward(
                _take(grad, bucket, only_real=True), *(_take(each, bucket) for each in (q, k, v, out)),
                _take(lse[..., None], bucket)[..., 0], 0.0, True, scale=ctx.scale,
            )  # fmt: skip
            for total, part in zip((grad_q, grad_k, grad_v), of_bucket, strict=True):
                _put(total, bucket, part.transpose(1, 2))
        for start, stop, prefix_start, prefix_stop in layout.prefix_blocks:
            branches, prefix = slice(start, stop), slice(prefix_start, prefix_stop)
            of_block = _flash_backward(
                _heads(grad[branches]), _heads(q[branches]), _heads(k[prefix]), _heads(v[prefix]),
                _heads(out[branches]), lse[branches].T[None], 0.0, False, scale=ctx.scale,
            )  # fmt: skip
            for total, part in zip((grad_q[branches], grad_k[prefix], grad_v[prefix]), of_block, strict=True):
                total += part[0].transpose(0, 1)
        return _heads(grad_q), _heads(_summed(grad_k, groups)), _heads(_summed(grad_v, groups)), None, None


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _by_token(heads: Tensor) -> Tensor:
    """``[1, H, M, D] -> [M, H, D]``, contiguous; a view where a projection's output is one."""
    return heads[0].transpose(0, 1).contiguous()


def _heads(by_token: Tensor) -> Tensor:
    """``[M, H, D] -> [1, H, M, D]``."""
    return by_token.transpose(0, 1)[None]


def _repeated(by_token: Tensor, groups: int) -> Tensor:
    """``[M, K, D] -> [M, K * groups, D]``: each head of the keys for all queries that share it."""
    return by_token if groups == 1 else by_token.repeat_interleave(groups, dim=1)


def _summed(by_token: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return by_token
    return by_token.view(len(by_token), -1, groups, by_token.shape[2]).sum(dim=2)


def _take(by_token: Tensor, bucket: Bucket, *, only_real: bool = False) -> Tensor:
    """``[M, H, D] -> [rows, H, width, D]``; with ``only_real``, repetitions are zero."""
    count = bucket.rows * bucket.width
    if bucket.start is not None:
        taken = by_token[bucket.start : bucket.start + count]
    elif only_real:
        taken = by_token.new_zeros(count, *by_token.shape[1:])
        taken.index_copy_(0, bucket.real, by_token.index_select(0, bucket.places))
    else:
        taken = by_token.index_select(0, bucket.gathered)
    rows: Tensor = taken.view(bucket.rows, bucket.width, *by_token.shape[1:])
    return rows.transpose(1, 2)


def _put(by_token: Tensor, bucket: Bucket, values: Tensor) -> None:
    """``values [rows, width, ...]`` into ``[M, ...]``, repetitions dropped."""
    if bucket.start is not None:
        place = by_token[bucket.start : bucket.start + bucket.rows * bucket.width]
        place.unflatten(0, (bucket.rows, bucket.width)).copy_(values)
    else:
        by_token.index_copy_(0, bucket.places, values.flatten(0, 1).index_select(0, bucket.real))


# ------------------------------------------------------------------ CUDA, and anything else


@cache
def _varlen(device: torch.device, dtype: torch.dtype) -> _Varlen | None:
    """A kernel for sequences of differing lengths on this device, or None."""
    if dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    for name, kernel in (("torch.nn.attention.varlen", _torch_varlen), ("flash_attn", _flash_varlen)):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        try:
            if _is_right(kernel, device, dtype):
                return kernel
            reason = "its results differ from those of plain attention"
        except (
            RuntimeError,
            TypeError,
            ValueError,
            NotImplementedError,
        ) as error:  # what kernels and their bindings raise
            reason = str(error)
        logger.warning("%s is not used on %s: %s", name, device, reason)
    return None


@torch.no_grad()
def _is_right(kernel: _Varlen, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel sees prefixes, windows and shared key heads as :func:`_one_by_one` does."""
    lengths, group_sizes = torch.tensor([40, 50, 33, 1]), torch.tensor([2, 1, 1])
    layout = lay_out(torch.arange(int(lengths.sum())) % 40, lengths, group_sizes)
    generator = torch.Generator().manual_seed(0)
    size = (1, 4, len(layout.input_ids), 64)
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(3))
    k, v = k[:, :2], v[:, :2]
    for window in (None, 8):
        found = kernel(q[0], k[0], v[0], layout, 0.2, window)
        expected = _one_by_one(q, k, v, layout, 0.2, window, 0.0)[0]
        if not (found - expected).abs().max().item() < 0.05:
            return False
    return True


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    kernel: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    shared_heads: dict[str, Any] = {}
    q, k, v, lengths = _varlen_arguments(q, k, v, layout)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(kernel).parameters:
            shared_heads = {"enable_gqa": True}
        else:
            k, v = (_repeated(each, q.shape[1] // k.shape[1]) for each in (k, v))
    out: Tensor = kernel(q, k, v, *lengths, scale=scale, window_size=(window - 1 if window else -1, 0), **shared_heads)
    return out


def _flash_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    kernel: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    q, k, v, lengths = _varlen_arguments(q, k, v, layout)
    out: Tensor = kernel(
        q, k, v, *lengths, softmax_scale=scale, causal=True, window_size=(window - 1 if window else -1, 0)
    )
    return out


def _varlen_arguments(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, int, int]]:
    """``[H, M, D]`` as the kernels take it: tokens first, keys behind their prefix; causal to the end of the keys."""
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    queries, keys, places = layout.on(q.device)
    if places is not None:
        k, v = k.index_select(0, places), v.index_select(0, places)
    return q, k, v, (queries, keys, layout.longest, layout.reach)


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None, dropout: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
    lengths = [segment.length for segment in layout.segments]
    queries, keys, values = (each.split(lengths, dim=2) for each in (query, key, value))
    index = {segment.start: number for number, segment in enumerate(layout.segments)}
    outputs = []
    for number, segment in enumerate(layout.segments):
        q, k, v, mask = queries[number], keys[number], values[number], None
        if segment.prefix_length:
            holder = index[segment.prefix_start]
            k = torch.cat([keys[holder][:, :, : segment.prefix_length], k], dim=2)
            v = torch.cat([values[holder][:, :, : segment.prefix_length], v], dim=2)
        if segment.prefix_length or (window is not None and window < segment.length):
            at = torch.arange(segment.prefix_length, segment.reach, device=q.device)[:, None]
            others = torch.arange(segment.reach, device=q.device)
            mask = others <= at
            if window is not None:
                mask &= others > at - window
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()
