"""Products with the output head's weights, and the gradients through them.

Logits before scale and bias are a sum of products of *states* ``[C, ...]`` with a transposed *weight* ``[V, ...]``: the
hidden states with the output weight and, if LoRA is on the output head, their product with its ``A`` with its ``B``
(:meth:`.split_model.OutputHead.operands`).

Legend: ``C`` places of a chunk, ``H`` width of the states, ``V`` vocabulary, or the part of it that a tile covers. Sums
are in float32 (float64 for float64 inputs) whatever the weights' dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, cached_property

import torch
from torch import Tensor

from gradwire_server.engine.model.layers.exact_products import exact_product
from gradwire_server.engine.model.layers.packed_linear import linear, product_with_copy
from gradwire_server.engine.model.meta_device import computes_as_cpu
from gradwire_server.engine.model.split_model import OutputHead

logger = logging.getLogger(__name__)

TILE_ROWS = 8192
"""Rows of the output weight whose gradient is in memory a second time, where a product cannot add to what is there."""
WHOLE = slice(None)
"""The whole vocabulary."""


def head_logits(
    product: HeadProduct,
    states: Sequence[Tensor],
    bias: Tensor | None,
    head: OutputHead,
    temperature: float,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``[C, V]`` logits over the temperature, and tanh of the soft cap's argument if there is a soft cap.

    Args:
        states: States of ``C`` places for each weight of the product.
        place: Tensor to write the logits to; with a soft cap or mixed precision the result is another tensor.
    """
    logits = product.by_transpose(states, place)
    if bias is not None:
        logits += bias
    if head.softcap is not None:
        capped = logits.mul_(head.scale / head.softcap).tanh_()
        return capped * (head.softcap / temperature), capped
    factor = head.scale / temperature
    return (logits if factor == 1.0 else logits.mul_(factor)), None


def parts(states: Sequence[Tensor], part: slice) -> list[Tensor]:
    """Some places of each of the states."""
    return [each[part] for each in states]


class HeadGradients:
    """Required gradients of bias, states and weights, summed chunk by chunk.

    Args:
        operands: States and weights in turns.
        needed: Whether the gradient of the bias is required, and of each operand.
        holder: The output weight as a parameter. If it has the precision of the products, its ``grad`` takes the
            gradient directly: with a vocabulary of 100,000 or more, a second such tensor would dominate a step's peak
            memory.
    """

    def __init__(
        self,
        product: HeadProduct,
        operands: Sequence[Tensor],
        bias: Tensor | None,
        needed: Sequence[bool],
        holder: Tensor | None = None,
    ) -> None:
        self._product, self._operands, self._bias = product, operands, bias
        self._of_states = [
            torch.zeros_like(each, dtype=product.dtype) if need else None
            for each, need in zip(operands[::2], needed[1::2], strict=True)
        ]
        self._held = holder is not None and needed[2] and holder.dtype == product.dtype
        self._of_weights: list[Tensor | None] = []
        for weight, need in zip(operands[1::2], needed[2::2], strict=True):
            if holder is not None and self._held and not self._of_weights:
                if holder.grad is None:
                    holder.grad = torch.zeros_like(holder)
                self._of_weights.append(holder.grad)
            else:
                zeros = torch.zeros(weight.shape, dtype=product.dtype, device=weight.device) if need else None
                self._of_weights.append(zeros)
        weight = operands[1]
        self._of_bias = torch.zeros(len(weight), dtype=product.dtype, device=weight.device) if needed[0] else None

    def add(
        self,
        part: slice,
        grad: Tensor,
        capped: Tensor | None,
        head: OutputHead,
        temperature: float,
        vocabulary: slice = WHOLE,
    ) -> None:
        """Add a chunk's share, given the gradient ``[C, V]`` in its logits from :func:`head_logits`; overwrites it."""
        if capped is not None:
            grad.mul_(1.0 - capped.square())
        factor = head.scale / temperature
        if factor != 1.0:
            grad.mul_(factor)
        factors = self._product.part(vocabulary).factors
        for each, of_states, of_weight, states in zip(
            factors, self._of_states, self._of_weights, self._operands[::2], strict=True
        ):
            if of_states is not None:
                of_states[part] += each.by_weight(grad)
            if of_weight is not None:
                each.add_outer(of_weight[vocabulary], grad, states[part])
        if self._of_bias is not None:
            self._of_bias[vocabulary] += grad.sum(dim=0)

    def add_exponentials(self, part: slice, exponentials: Tensor, factor: Tensor, vocabulary: slice) -> None:
        """Add a chunk's share, given that the gradient in its products is ``factor [C] * exponentials [C, V]``."""
        factors = self._product.part(vocabulary).factors
        for each, of_states, of_weight, states in zip(
            factors, self._of_states, self._of_weights, self._operands[::2], strict=True
        ):
            if of_states is not None:
                of_states[part].addcmul_(each.by_weight(exponentials), factor[:, None])
            if of_weight is not None:
                each.add_outer(of_weight[vocabulary], exponentials, states[part] * factor[:, None])
        if self._of_bias is not None:
            self._of_bias[vocabulary] += factor @ exponentials

    def add_chosen(self, ids: Tensor, factor: Tensor) -> None:
        """Add the share of the given ids ``[T, K]``, given ``factor [T, K]``, the gradient in each one's product."""
        for column, one in zip(ids.T, factor.T, strict=True):
            for of_states, of_weight, states, weight in zip(
                self._of_states, self._of_weights, self._operands[::2], self._operands[1::2], strict=True
            ):
                if of_states is not None:
                    of_states.addcmul_(weight.index_select(0, column).to(of_states.dtype), one[:, None])
                if of_weight is not None:
                    of_weight.index_add_(0, column, states.to(of_weight.dtype) * one[:, None])
            if self._of_bias is not None:
                self._of_bias.index_add_(0, column, one)

    def add_means(self, means: Sequence[Tensor], factor: Tensor) -> None:
        """Add ``factor [T]`` times a mean row of each weight at each place, ``[T, ...]``, to the states' gradients."""
        for of_states, mean in zip(self._of_states, means, strict=True):
            if of_states is not None:
                of_states.addcmul_(mean, factor[:, None])

    def results(self) -> tuple[Tensor | None, ...]:
        """The gradients of the bias and of each operand; None where it is not required or was added in place."""
        bias = None if self._of_bias is None or self._bias is None else self._of_bias.to(self._bias.dtype)
        products: list[Tensor | None] = []
        for of_states, of_weight in zip(self._of_states, self._of_weights, strict=True):
            states, weight = self._operands[len(products)], self._operands[len(products) + 1]
            held = self._held and not products
            products.append(None if of_states is None else of_states.to(states.dtype))
            products.append(None if of_weight is None or held else of_weight.to(weight.dtype))
        return bias, *products


class HeadProduct:
    """The sum of the products of states with the transposed weights.

    Args:
        exact: Whether the bits of a place's products depend on its states alone.

    Attributes:
        factors: The product with each weight.
        dtype: Dtype of the results.
    """

    def __init__(self, weights: Sequence[Tensor], *, exact: bool = False) -> None:
        self.factors = [WeightProduct(weight, exact=exact) for weight in weights]
        self.dtype = self.factors[0].dtype

    def part(self, vocabulary: slice) -> HeadProduct:
        """The products with some rows of the weights."""
        return self if vocabulary == WHOLE else HeadProduct([each.stored[vocabulary] for each in self.factors])

    def by_transpose(self, states: Sequence[Tensor], place: Tensor | None = None) -> Tensor:
        """Sum of the products with the transposed weights: ``[C, H]`` each ``-> [C, V]``."""
        total = self.factors[0].by_transpose(states[0], place)
        for factor, own in zip(self.factors[1:], states[1:], strict=True):
            factor.add_by_transpose(total, own)
        return total


class WeightProduct:
    """Products with one weight that accumulate in, and return, at least float32.

    GPUs multiply low-precision operands this way without widening them; on a CPU the weight is widened once, when it is
    used.

    Attributes:
        stored: The weight as it is given.
        exact: As of :class:`HeadProduct`.
    """

    def __init__(self, weight: Tensor, *, exact: bool = False) -> None:
        self.exact = exact
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.mixed = not computes_as_cpu(weight.device) and weight.dtype in (torch.bfloat16, torch.float16)
        self.stored = weight

    @cached_property
    def weight(self) -> Tensor:
        """The weight in the precision of the products."""
        return self.stored if self.mixed else self.stored.to(self.dtype)

    def by_transpose(self, states: Tensor, place: Tensor | None = None) -> Tensor:
        """Product with the transposed weight: ``[C, H] -> [C, V]``."""
        if self.mixed:
            return torch.mm(states.to(self.weight.dtype), self.weight.T, out_dtype=self.dtype)
        if place is None and self.exact:
            return exact_product(states.to(self.dtype), self.stored)
        if place is None:
            states = states.to(self.dtype)
            found = product_with_copy(states, self.stored)
            return linear(states, self.weight) if found is None else found
        return torch.mm(states.to(self.dtype), self.weight.T, out=place)

    def add_by_transpose(self, total: Tensor, states: Tensor) -> None:
        """Add the product with the transposed weight to ``total [C, V]``."""
        if self.mixed or self.exact:
            total += self.by_transpose(states)
        else:
            total.addmm_(states.to(self.dtype), self.weight.T)

    def by_weight(self, grad: Tensor) -> Tensor:
        """Product with the weight: ``[C, V] -> [C, H]``."""
        if self.mixed:
            return torch.mm(grad.to(self.weight.dtype), self.weight, out_dtype=self.dtype)
        return grad @ self.weight

    def add_by_weight(self, total: Tensor, grad: Tensor) -> None:
        """Add the product with the weight to ``total [C, H]``."""
        if self.mixed:
            total += self.by_weight(grad)
        else:
            total.addmm_(grad, self.weight)

    def add_outer(self, total: Tensor, grad: Tensor, states: Tensor) -> None:
        """Add the weight's gradient: ``total [V, H] += grad^T [V, C] states [C, H]``."""
        if self.mixed:
            low = self.weight.dtype
            _add_product(total, grad.to(low).T, states.to(low))
        else:
            total.addmm_(grad.T, states.to(self.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left [V, C] right [C, H]`` of low precision to ``total [V, H]`` of float32."""
    if _adds_products(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        return
    for start in range(0, len(total), TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        total[rows] += torch.mm(left[rows], right, out_dtype=total.dtype)


@cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of low precision to a float32 tensor on the device, and does so correctly."""
    numbers = torch.arange(128, device=device)
    left, right = (numbers % 7).view(8, 16).to(dtype).T, (numbers % 5).view(8, 16).to(dtype)
    total = torch.ones(16, 16, device=device)
    expected = total + left.float() @ right.float()
    try:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        logger.info("no products added in place on %s in %s: %s", device, dtype, error)
        return False
    return device.type == "meta" or bool((total == expected).all())
