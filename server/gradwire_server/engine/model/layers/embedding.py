"""Token embeddings on the CPU whose backward adds the gradient only to the rows that were looked up.

PyTorch's own backward builds a gradient of the whole vocabulary and adds it to the existing one. For a large vocabulary
that is most of the memory traffic of a step with few tokens, and as much memory as the weight again. While the weight
has no gradient yet, PyTorch's backward is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire_server.engine.model.meta_device import computes_as_cpu
from gradwire_server.engine.model.placement import Placement


def add_rows_in_place(embedding: nn.Module, placement: Placement) -> None:
    """Use this backward in a plain embedding; valid with ``torch.autograd.backward`` only."""
    plain = type(embedding) is nn.Embedding and not hasattr(embedding, "_hf_hook")
    if plain and embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse:
        embedding.forward = partial(_embed, embedding, placement)


def _embed(embedding: nn.Embedding, placement: Placement, ids: Tensor) -> Tensor:
    weight = embedding.weight
    trains = weight.requires_grad and torch.is_grad_enabled()
    if trains and computes_as_cpu(weight.device) and placement.adds_in_place(weight):
        embedded: Tensor = _Embed.apply(ids, weight, embedding.padding_idx)  # type: ignore[no-untyped-call]
        return embedded
    return nn.functional.embedding(ids, weight, embedding.padding_idx)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # not a saved tensor: saved-tensor hooks would return something else than the parameter
        ctx.padding_idx = padding_idx
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx
        total = weight.grad
        if total is None or total.dtype != grad.dtype:
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, len(weight), padding, False), None
        ids, grad = ids.flatten(), grad.flatten(0, -2)
        if padding >= 0:
            grad = grad * (ids != padding)[:, None]
        total.index_add_(0, ids, grad)
        return None, None, None
