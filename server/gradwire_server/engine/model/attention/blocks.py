"""Attention over a layout of sequences on the CPU: a kernel of ours, or calls of PyTorch's flash kernel on blocks.

Ours (:meth:`.cpu_kernels.CpuKernels.attend_in_blocks`) takes float32 and most head sizes. A block of the other is a
bucket of segments attending to themselves, or all branches of a node of a tree of prefixes attending to it. A token's
partial results combine by their log-sum-exps. The kernel's backward, given the combined output and log-sum-exp, yields
each block's exact share of the gradient, so no key is copied and no mask is built. Legend: ``M`` tokens, ``H`` heads,
``K`` heads of keys and values, ``D`` head size.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradwire_server.engine.model.attention.masked import masked_attention
from gradwire_server.engine.model.comparison import largest_difference
from gradwire_server.engine.model.layers.cpu_kernels import CpuKernels, cpu_kernels, takes
from gradwire_server.engine.model.meta_device import computes_as_cpu
from gradwire_server.engine.model.packing import Bucket, Layout, tree_layout


def in_blocks(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, *, by_kernel: bool = False
) -> Tensor:
    """Differentiable attention in blocks: ``[1, H, M, D], [1, K, M, D], [1, K, M, D] -> [1, M, H, D]``.

    Args:
        by_kernel: Whether our kernel may compute it: it is right here (:func:`has_right_kernel`).
    """
    kernels = _kernels_for(query, key, value, layout) if by_kernel else None
    attended: Tensor
    if kernels is None:
        attended = _Blocks.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    else:
        attended = _ByKernel.apply(query, key, value, layout, scale, kernels)  # type: ignore[no-untyped-call]
    return attended


def _kernels_for(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> CpuKernels | None:
    """The kernels, if they take such tensors of such a layout."""
    kernels = cpu_kernels()
    taken = computes_as_cpu(query.device) and takes(query, key, value, device=query.device.type)
    if kernels is None or not taken or not kernels.fit(key.shape[1], key.shape[3], layout.query_blocks):
        return None
    return CpuKernels(None) if query.is_meta else kernels


def in_order(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, kernels: CpuKernels, window: int | None
) -> Tensor:
    """:func:`in_blocks` of ``[M, H, D]``, by the kernel in which a query's bits do not depend on what is beside it."""
    attended: Tensor = _InOrder.apply(query, key, value, layout, scale, kernels, window)  # type: ignore[no-untyped-call]
    return attended


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        scale: float,
        kernels: CpuKernels,
        window: int | None,
    ) -> Tensor:
        out, lse = kernels.attend_in_order(query, key, value, layout.ordered, scale, window)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale, ctx.kernels, ctx.window = layout, scale, kernels, window
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        layout: Layout = ctx.layout
        if ctx.window is None:
            plan = layout.query_blocks
            grads = ctx.kernels.attend_in_blocks_gradients(grad_out, *ctx.saved_tensors, plan, ctx.scale)
        else:
            query, key, value = (each.detach().requires_grad_() for each in ctx.saved_tensors[:3])
            with torch.enable_grad():
                again = masked_attention(query, key, value, layout.masked, ctx.scale, ctx.window)
            grads = torch.autograd.grad(again, (query, key, value), grad_out)
        return *grads, None, None, None, None


@cache
@torch.enable_grad()
def has_right_kernel() -> bool:
    """Whether there is a kernel of ours here that gives what PyTorch's gives, with the same gradients."""
    kernels = cpu_kernels()
    if kernels is None:
        return False
    generator, layout = torch.Generator().manual_seed(0), tree_layout()
    shapes = [(1, heads, len(layout.input_ids), 64) for heads in (4, 2, 2)]
    taken = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    mine = _ByKernel.apply(*taken, layout, 0.125, kernels)  # type: ignore[no-untyped-call]
    theirs = _Blocks.apply(*taken, layout, 0.125)  # type: ignore[no-untyped-call]
    by_token = (each[0].transpose(0, 1) for each in taken)
    ordered = _InOrder.apply(*by_token, layout, 0.125, kernels, None)[None]  # type: ignore[no-untyped-call]
    found = [[out, *torch.autograd.grad(out.sin().sum(), taken, retain_graph=True)] for out in (mine, ordered, theirs)]
    pairs = [pair for each in found[:2] for pair in zip(each, found[2], strict=True)]
    return all(apart <= 1e-5 * size for apart, size in itertools.starmap(largest_difference, pairs))


class _ByKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, kernels: CpuKernels
    ) -> Tensor:
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        out, lse = kernels.attend_in_blocks(query, key, value, layout.query_blocks, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.kernels = layout.query_blocks, scale, kernels
        return out[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.kernels.attend_in_blocks_gradients(grad_out[0], *ctx.saved_tensors, ctx.plan, ctx.scale)
        return *(_heads(each) for each in grads), None, None, None


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        ctx.layout, ctx.scale = layout, scale
        if layout.whole is not None:
            taken = _rows(query, layout.whole), *(_rows(repeated(each, groups), layout.whole) for each in (key, value))
            out, lse = _flash(*taken, 0.0, True, scale=scale)
            ctx.save_for_backward(query, key, value, out, lse)
            attended: Tensor = out.transpose(1, 2).flatten(0, 1)[None]
            return attended
        q, k, v = _by_token(query), repeated(_by_token(key), groups), repeated(_by_token(value), groups)
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
        return out[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout: Layout = ctx.layout
        groups = query.shape[1] // key.shape[1]
        if layout.whole is not None:
            taken = _rows(query, layout.whole), *(_rows(repeated(each, groups), layout.whole) for each in (key, value))
            of_rows = _flash_backward(
                _rows(grad_out.transpose(1, 2), layout.whole), *taken, out, lse, 0.0, True, scale=ctx.scale
            )
            of_q, of_k, of_v = (each.transpose(0, 1).flatten(1, 2) for each in of_rows)
            return of_q[None], _of_shared(of_k, groups)[None], _of_shared(of_v, groups)[None], None, None
        q, k, v = _by_token(query), repeated(_by_token(key), groups), repeated(_by_token(value), groups)
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
    """Order by token: ``[1, H, M, D] -> [M, H, D]``, contiguous; a view if the memory is already in this order."""
    return heads[0].transpose(0, 1).contiguous()


def _heads(by_token: Tensor) -> Tensor:
    """Order by head: ``[M, H, D] -> [1, H, M, D]``."""
    return by_token.transpose(0, 1)[None]


def repeated(shared: Tensor, groups: int) -> Tensor:
    """Repeat each key or value head for the query heads that share it: ``[:, K, ...] -> [:, K * groups, ...]``."""
    return shared if groups == 1 else shared.repeat_interleave(groups, dim=1)


def _rows(heads: Tensor, whole: Bucket) -> Tensor:
    """Cut the token axis into rows of equal length: ``[1, H, M, D] -> [rows, H, width, D]``, a view."""
    return heads if whole.rows == 1 else heads[0].unflatten(1, (whole.rows, whole.width)).transpose(0, 1)


def _of_shared(grad: Tensor, groups: int) -> Tensor:
    """Gradient of the heads that :func:`repeated` repeated: ``[K * groups, M, D] -> [K, M, D]``."""
    return grad if groups == 1 else grad.unflatten(0, (-1, groups)).sum(dim=1)


def _summed(by_token: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return by_token
    return by_token.view(len(by_token), -1, groups, by_token.shape[2]).sum(dim=2)


def _take(by_token: Tensor, bucket: Bucket, *, only_real: bool = False) -> Tensor:
    """Gather a bucket: ``[M, H, D] -> [rows, H, width, D]``; with ``only_real``, repeated tokens are zero."""
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
    """Write ``values [rows, width, ...]`` into ``[M, ...]``, dropping repeated tokens."""
    if bucket.start is not None:
        place = by_token[bucket.start : bucket.start + bucket.rows * bucket.width]
        place.unflatten(0, (bucket.rows, bucket.width)).copy_(values)
    else:
        by_token.index_copy_(0, bucket.places, values.flatten(0, 1).index_select(0, bucket.real))
