"""Attention over packed sequences, registered as an attention implementation of transformers.

Without a layout it is transformers' own SDPA, so a model can keep this implementation permanently. With a layout
(keyword :data:`LAYOUT`, which the layers pass on, also when gradient checkpointing recomputes them), each segment of
the token axis attends causally to itself and fully to what is before it in its tree. Legend: ``M`` tokens, ``H`` heads,
``D`` head size.

CUDA uses one varlen kernel (:mod:`.varlen`), the CPU a kernel over blocks of segments
(:mod:`.blocks`). Other devices, and windows and dropout where those do not support them, use masks
(:mod:`.masked`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gradwire_server.engine.model.attention.blocks import in_blocks, in_order
from gradwire_server.engine.model.attention.masked import masked_attention
from gradwire_server.engine.model.attention.paged import PagedDecode, PagedPrefill
from gradwire_server.engine.model.attention.varlen import kernel_for
from gradwire_server.engine.model.layers.cpu_kernels import CpuKernels, cpu_kernels, takes
from gradwire_server.engine.model.meta_device import computes_as_cpu, is_estimate
from gradwire_server.engine.model.packing import Layout, lay_out

NAME = "gradwire"
"""Name of the attention implementation."""
LAYOUT = "token_layout"
"""Keyword that carries a :class:`.packing.Layout`, or a plan of :mod:`.paged`, through a model."""
IN_ORDER = "attends_in_order"
"""Keyword that carries whether a query's bits are not to depend on what is beside it, where a kernel can do that."""
BY_KERNEL = "attends_by_kernel"
"""Keyword that carries whether a kernel of ours may attend on a CPU (:mod:`.blocks`)."""

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes whose attention a CPU's kernel computes in float32, key by key: scores and their softmax rounded to halves,
here in blocks and there by pages, were most of what sampling and training differed by."""
_HARMLESS = {"position_ids", "cache_position", "use_cache", "is_causal"}


class NotCausal(NotImplementedError):
    """A model's tokens attend to later ones."""


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
    """Compute attention: ``[1, H, M, D]``, keys and values with as many heads or fewer -> ``[1, M, H, D]``.

    Raises:
        NotCausal: A token attends to later ones.
        NotImplementedError: The model asks for something other than attention within a window.
    """
    layout: Layout | PagedPrefill | PagedDecode | None = kwargs.pop(LAYOUT, None)
    by_kernel: bool = kwargs.pop(BY_KERNEL, False)
    orders: bool = kwargs.pop(IN_ORDER, False)
    if layout is None and _rows_in_order and attention_mask is None:
        rows, length = query.shape[0], query.shape[2]
        layout = lay_out(torch.zeros(rows * length, dtype=torch.long), torch.full((rows,), length))
        query, key, value = (each.transpose(0, 1).flatten(1, 2)[None] for each in (query, key, value))
        of_rows, _ = packed_attention(
            module, query, key, value, None, dropout, scaling, sliding_window, **{LAYOUT: layout, IN_ORDER: True}
        )
        return of_rows[0].unflatten(0, (rows, length)), None
    if layout is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **kwargs
        )
        return result
    unknown = [name for name, given in kwargs.items() if name not in _HARMLESS and given not in (None, False)]
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise NotCausal("packed attention is causal, and the model's is not")
    if unknown:
        raise NotImplementedError(f"packed attention does not know the model's {', '.join(unknown)}")
    if _observed is not None:
        _observed.attention_windows.add(sliding_window)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings widen them under autocast
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    if orders and value.is_cpu and not dropout:
        ordered = _in_order(module, q, k, v, layout, scale, sliding_window)
        if ordered is not None:
            return ordered.to(value.dtype)[None], None
    if not isinstance(layout, Layout):
        if sliding_window:
            raise NotImplementedError("pages keep all tokens, and a window would leave some out")
        if isinstance(layout, PagedDecode):
            return layout.attend(module, q, k, v, scale)[None], None
        keys, values = layout.write(module, k, v)
        if layout.layout is None:
            kernels = cpu_kernels() if by_kernel and takes(q, keys, values) else None
            if kernels is not None and q.shape[2] == v.shape[2] and not kernels.missing(q.shape[2]):
                return kernels.attend_in_order(q, keys, values, layout.ordered, scale)[0][None], None
            return masked_attention(q, keys, values, layout.segments, scale)[None], None
        layout = layout.layout
    window = sliding_window if sliding_window and sliding_window < layout.reach else None
    one_size = query.shape[-1] == value.shape[-1]
    varlen = None
    if query.is_cuda and one_size and query.shape[-1] <= 256 and not dropout:
        varlen = kernel_for(query, layout, window)
    if varlen is not None:
        return varlen(query[0], key[0], value[0], layout, scale, window)[None], None
    on_blocks = computes_as_cpu(query.device) or is_estimate(query.device)  # they save what the varlen kernel saves
    if on_blocks and one_size and not dropout and window is None:
        return in_blocks(query, key, value, layout, scale, by_kernel=by_kernel), None
    return masked_attention(q, k, v, layout.masked, scale, window, dropout)[None], None


def _in_order(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | PagedPrefill | PagedDecode,
    scale: float,
    window: int | None,
) -> Tensor | None:
    """``[M, H, D]`` attention whose bits in a token depend on nothing beside it, in training as in sampling; None if
    there is no kernel for such heads."""
    kernels, size = cpu_kernels(), q.shape[2]
    if kernels is None or size != v.shape[2]:
        return None
    q, k, v = (nn.functional.pad(each.float(), (0, kernels.missing(size))) for each in (q, k, v))
    return _padded_in_order(module, q, k, v, layout, scale, window or None, kernels)[..., :size]


def _padded_in_order(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | PagedPrefill | PagedDecode,
    scale: float,
    window: int | None,
    kernels: CpuKernels,
) -> Tensor:
    if isinstance(layout, PagedDecode):
        return layout.attend(module, q, k, v, scale, window, in_order=True)
    if isinstance(layout, PagedPrefill):
        keys, values = layout.write(module, k, v)
        if layout.layout is None:
            return kernels.attend_in_order(q, keys, values, layout.ordered, scale, window)[0]
        layout = layout.layout
    return in_order(q, k, v, layout, scale, kernels, window if window and window < layout.reach else None)


# ------------------------------------------------------------------ attention features that a model uses


@dataclass
class Observed:
    """Attention features that a model used.

    Attributes:
        mask_windows: Sizes of the windows or chunks in its masks; None for an unbounded mask.
        mask_functions: Whether a mask had a rule other than causal or windowed.
        attention_windows: Window sizes that its layers passed to :func:`packed_attention`.
    """

    mask_windows: set[int | None] = field(default_factory=set)
    mask_functions: bool = False
    attention_windows: set[int | None] = field(default_factory=set)


_observed: Observed | None = None
_rows_in_order = False


@contextmanager
def rows_in_order(used: bool) -> Iterator[None]:
    """Compute padded rows, too, in the body by the kernel that takes keys in order, if ``used``; to compare with."""
    global _rows_in_order
    _rows_in_order = used
    try:
        yield
    finally:
        _rows_in_order = False


@contextmanager
def observing() -> Iterator[Observed]:
    """Record the attention features used in the body. With a layout, masks are ignored, so they must not matter."""
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
