"""Products with the output weight, and the gradients through them.

Legend: ``C`` places of a chunk, ``H`` hidden size, ``V`` vocabulary, or the part of it that a tile covers. Sums are in
float32 (float64 for float64 inputs) whatever the weights' dtype.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gradwire_server.engine.model.split_model import OutputHead

logger = logging.getLogger(__name__)

TILE_ROWS = 8192
"""Rows of the output weight whose gradient is in memory a second time, where a product cannot add to what is there."""
WHOLE = slice(None)
"""The whole vocabulary."""


def head_logits(
    product: HeadProduct,
    states: Tensor,
    bias: Tensor | None,
    head: OutputHead,
    temperature: float,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``[C, V]`` logits over the temperature, and tanh of the soft cap's argument if there is a soft cap.

    Args:
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


class HeadGradients:
    """Required gradients of hidden states, output weight and bias, summed chunk by chunk.

    Args:
        holder: The weight as a parameter. If it has the precision of the products, its ``grad`` takes the gradient
            directly: with a vocabulary of 100,000 or more, a second such tensor would dominate a step's peak memory.
    """

    def __init__(
        self,
        product: HeadProduct,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: Sequence[bool],
        holder: Tensor | None = None,
    ) -> None:
        self._product, self._hidden = product, hidden
        self._dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self._of_hidden = torch.zeros_like(hidden, dtype=product.dtype) if needed[0] else None
        self._of_weight = None
        self._held = holder is not None and needed[1] and holder.dtype == product.dtype
        if holder is not None and self._held:
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder)
            self._of_weight = holder.grad
        elif needed[1]:
            self._of_weight = torch.zeros(weight.shape, dtype=product.dtype, device=weight.device)
        self._of_bias = torch.zeros(len(weight), dtype=product.dtype, device=weight.device) if needed[2] else None

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
        product = self._product.part(vocabulary)
        if capped is not None:
            grad.mul_(1.0 - capped.square())
        factor = head.scale / temperature
        if factor != 1.0:
            grad.mul_(factor)
        if self._of_hidden is not None:
            self._of_hidden[part] += product.by_weight(grad)
        if self._of_weight is not None:
            product.add_outer(self._of_weight[vocabulary], grad, self._hidden[part])
        if self._of_bias is not None:
            self._of_bias[vocabulary] += grad.sum(dim=0)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight, bias = self._dtypes
        return (
            None if self._of_hidden is None else self._of_hidden.to(hidden),
            None if self._of_weight is None or self._held else self._of_weight.to(weight),
            None if self._of_bias is None or bias is None else self._of_bias.to(bias),
        )


class HeadProduct:
    """Products with the output weight that accumulate in, and return, at least float32.

    GPUs multiply low-precision operands this way without widening them; on a CPU the weight is widened once.
    """

    def __init__(self, weight: Tensor) -> None:
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.mixed = weight.device.type != "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
        self.weight = weight if self.mixed else weight.to(self.dtype)

    def part(self, vocabulary: slice) -> HeadProduct:
        """The products with some rows of the weight."""
        if vocabulary == WHOLE:
            return self
        some = copy.copy(self)
        some.weight = self.weight[vocabulary]
        return some

    def by_transpose(self, states: Tensor, place: Tensor | None = None) -> Tensor:
        """Product with the transposed weight: ``[C, H] -> [C, V]``."""
        if self.mixed:
            return torch.mm(states.to(self.weight.dtype), self.weight.T, out_dtype=self.dtype)
        if place is None:
            return states.to(self.dtype) @ self.weight.T
        return torch.mm(states.to(self.dtype), self.weight.T, out=place)

    def by_weight(self, grad: Tensor) -> Tensor:
        """Product with the weight: ``[C, V] -> [C, H]``."""
        if self.mixed:
            return torch.mm(grad.to(self.weight.dtype), self.weight, out_dtype=self.dtype)
        return grad @ self.weight

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
