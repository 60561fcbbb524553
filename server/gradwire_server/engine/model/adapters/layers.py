"""Linear layers with LoRA that choose an adapter for each range of tokens.

The layers are peft's (Hu et al. 2021: ``y = x W^T + scale * x A^T B^T``), with a forward of their own: one autograd
function computes the frozen product once for all tokens, then adds each adapter's product on its *span* of the token
axis (:mod:`.adapter_products`), so that no further tensor of the output's size is kept or summed. A single run has one
span over all tokens. Several runs in one forward have a span each, and each span's gradient goes only to its own
adapter's parameters. Changing the spans only sets an attribute.

peft itself computes adapters with dropout or on layers that are not linear, one adapter at a time.

Legend: ``N`` tokens, padding included; ``I``, ``O`` features in and out; ``R`` rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from gradwire_server.engine.model.adapters.products import (
    AdapterProducts,
    ByKernels,
    InBuckets,
    InTurn,
    Span,
    SpanBucket,
    add_adapter,
    alike,
    bucketed,
)
from gradwire_server.engine.model.layers.cpu_kernels import sampling_kernels
from gradwire_server.engine.model.layers.exact_products import exact_product
from gradwire_server.engine.model.layers.packed_linear import linear

logger = logging.getLogger(__name__)


@dataclass
class Active:
    """Spans that a model's layers compute with. ``peft``: use peft's own forward with its enabled adapter instead.

    ``ends``: the spans' ends on the device, for grouped kernels; None where these do not run.
    ``everywhere``: the adapter of the only span, if that is all tokens; else empty. ``exact``: as of the model.
    """

    spans: tuple[Span, ...] = ()
    ends: Tensor | None = None
    peft: bool = False
    everywhere: str = ""
    exact: bool = False
    _buckets: dict[tuple[tuple[Span, ...], torch.device], list[SpanBucket]] = field(default_factory=dict)

    def set_spans(self, spans: Sequence[Span], ends: Tensor | None = None) -> None:
        """Compute with these spans."""
        if self.spans != tuple(spans):
            self._buckets.clear()
        self.spans, self.ends = tuple(spans), ends
        self.everywhere = spans[0].adapter if len(spans) == 1 and spans[0] == Span(spans[0].adapter) else ""

    def products(
        self, x: Tensor, spans: Sequence[Span], pairs: Sequence[Tensor], scales: Sequence[float]
    ) -> AdapterProducts:
        """Choose how a layer computes the products of the spans whose adapters are on it."""
        alone = self.exact or (sampling_kernels(x) is not None and not torch.is_grad_enabled())
        if len(spans) == 1 or alone:
            return InTurn(spans, scales, self.exact)
        ends = self.ends if len(spans) == len(self.spans) and alike(pairs, scales) else None
        if ends is not None and ends.device == x.device and grouped_products_run(x.device, x.dtype):
            return ByKernels(ends, scales[0])
        key = tuple(spans), x.device
        if key not in self._buckets:
            self._buckets[key] = bucketed(spans, x.device)
        return InBuckets(self._buckets[key], scales)


class LoraPair(NamedTuple):
    """The factors of an adapter's addition to a linear layer: ``scale * x A^T B^T``."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float

    @classmethod
    def of(cls, layer: LoraLayer, adapter: str) -> LoraPair:
        """The pair of an adapter that one of peft's linear layers holds."""
        a, b = (cast(nn.Linear, side[adapter]).weight for side in (layer.lora_A, layer.lora_B))
        return cls(cast(nn.Parameter, a), cast(nn.Parameter, b), layer.scaling[adapter])


class SpanLinear(LoraLinear):
    """peft's linear layer, computing with the active spans.

    Attributes:
        active: The adapters to compute with.
        pairs: The adapters on this layer, by name; none of them is a module or a parameter of the layer.
    """

    active: Active
    pairs: dict[str, LoraPair]

    @classmethod
    def replace(cls, layer: Any, active: Active) -> None:
        """Make one of peft's linear layers compute so."""
        layer.__class__ = cls
        layer.active, layer.pairs = active, {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = self.active
        if active.peft:
            return super().forward(x, *args, **kwargs)
        base_layer, pairs_here = self.base_layer, self.pairs
        if active.everywhere and not (args or kwargs):
            pair = pairs_here.get(active.everywhere)
            if pair is None:
                return base_layer(x)  # type: ignore[no-any-return]
            weight, bias = _frozen_product(base_layer)
            if weight is not None and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
                if not torch.is_grad_enabled():  # of few tokens, the function around it takes a tenth of the time
                    return _one_product(x, weight, bias, *pair, active.exact)[0]
                return _OneAdapter.apply(x, weight, bias, *pair, active.exact)  # type: ignore[no-any-return, no-untyped-call]
        spans = [span for span in active.spans if span.adapter in pairs_here]
        if not spans:
            return base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]
        weight, bias = _frozen_product(base_layer)
        result = base_layer(x, *args, **kwargs) if weight is None else None
        found = [pairs_here[span.adapter] for span in spans]
        pairs: list[Tensor] = [side for pair in found for side in (pair.a, pair.b)]
        scales = [pair.scale for pair in found]
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            weight, bias, result = (each if each is None else each.to(dtype) for each in (weight, bias, result))
            pairs = [each.to(dtype) for each in pairs]
        products = active.products(x, spans, pairs, scales)
        output: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
            x, result, weight, bias, products, active.exact, *pairs
        )
        return output


def _frozen_product(layer: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Weight ``[O, I]`` and bias of a plain linear layer; None and None for any other layer."""
    if "_hf_hook" in layer.__dict__:  # accelerate's hook moves data between devices
        return None, None
    if type(layer) is nn.Linear:
        return layer.weight, layer.bias
    if type(layer) is Conv1D:
        return layer.weight.T, layer.bias
    return None, None


def _shaped(output: Tensor, x: Tensor) -> Tensor:
    """``[N, O]`` in the shape of the tokens ``x``; no view to autograd, so that a model may change it in place."""
    shaped: Tensor = torch.ops.aten._unsafe_view(output, [*x.shape[:-1], output.shape[-1]])
    return shaped


class _LoraLinear(torch.autograd.Function):
    """``x W^T + bias``, or a given result in its place, plus the products of the adapters; ``W`` is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        result: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        products: AdapterProducts,
        exact: bool,
        *pairs: Tensor,
    ) -> Tensor:
        tokens = x.flatten(0, -2)
        if weight is not None:
            output = (exact_product if exact else linear)(tokens, weight, bias)
        else:
            assert result is not None
            output = result.flatten(0, -2).clone()
        saved = products.add(output, tokens, pairs)
        ctx.save_for_backward(x, weight, *saved, *pairs)
        ctx.products, ctx.count = products, len(saved)
        return _shaped(output, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rest = ctx.saved_tensors
        saved, pairs = rest[: ctx.count], rest[ctx.count :]
        tokens, grad = x.flatten(0, -2), grad_output.flatten(0, -2)
        into: Tensor | None = None
        if ctx.needs_input_grad[0]:
            into = torch.zeros_like(tokens) if weight is None else grad @ weight
        grads = ctx.products.gradients(grad, tokens, saved, pairs, into)
        of_x = None if into is None else into.unflatten(0, x.shape[:-1])
        return of_x, grad_output if weight is None else None, None, None, None, None, *grads


def _one_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, exact: bool
) -> tuple[Tensor, Tensor]:
    """Return the output of :class:`_OneAdapter`, and ``x A^T``, ``[N, R]``."""
    tokens = x.flatten(0, -2)
    output = (exact_product if exact else linear)(tokens, weight, bias)
    inner = add_adapter(output, tokens, a, b, scale, exact=exact)
    return _shaped(output, x), inner


class _OneAdapter(torch.autograd.Function):
    """``x W^T + bias + scale * x A^T B^T`` with a frozen ``W``.

    What :class:`_LoraLinear` does with one adapter on all tokens, by the fewest calls: with few tokens the calls take
    as long as the products.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, exact: bool
    ) -> Tensor:
        output, inner = _one_product(x, weight, bias, a, b, scale, exact)
        ctx.save_for_backward(x, weight, inner, a, b)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, a, b = ctx.saved_tensors
        tokens, grad, scale = x.flatten(0, -2), grad_output.flatten(0, -2), ctx.scale
        through = grad @ b
        of_a, of_b = through.T @ tokens, grad.T @ inner
        if scale != 1.0:
            of_a.mul_(scale)
            of_b.mul_(scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (grad @ weight).addmm_(through, a, alpha=scale).view(x.shape)
        return of_x, None, None, of_a, of_b, None, None


@cache
def grouped_products_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch's grouped kernels run on the device and agree with single products, for all products used."""
    if not hasattr(F, "grouped_mm"):
        return False
    ends = torch.tensor([8, 24], dtype=torch.int32, device=device)
    spans = [slice(0, 8), slice(8, 24)]
    tokens, between = torch.randn(24, 64, device=device, dtype=dtype), torch.randn(24, 16, device=device, dtype=dtype)
    stacked = torch.randn(2, 16, 64, device=device, dtype=dtype)
    try:
        grouped = [
            F.grouped_mm(tokens, stacked.mT, offs=ends).flatten(),
            F.grouped_mm(between, stacked, offs=ends).flatten(),
            F.grouped_mm(between.T, tokens, offs=ends).flatten(),
        ]
    except (RuntimeError, ValueError) as error:
        logger.warning("no grouped products on %s in %s, adapters are computed in turn: %s", device, dtype, error)
        return False
    expected = [
        torch.cat([(tokens[span] @ each.T).flatten() for span, each in zip(spans, stacked, strict=True)]),
        torch.cat([(between[span] @ each).flatten() for span, each in zip(spans, stacked, strict=True)]),
        torch.cat([(between[span].T @ tokens[span]).flatten() for span in spans]),
    ]
    right = all(torch.allclose(one, other, rtol=5e-2, atol=5e-1) for one, other in zip(grouped, expected, strict=True))
    if not right:
        logger.warning("grouped products are wrong on %s in %s: adapters are computed in turn", device, dtype)
    return right
