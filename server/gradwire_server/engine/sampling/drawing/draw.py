"""Drawing of tokens by inverting cumulative distributions at uniform numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradwire_server.engine.model.layers.cpu_kernels import sampling_kernels
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.threads import one_thread

BLOCK = 128
"""Tokens whose weights are summed together before a place among them is searched."""
CHUNK_ELEMENTS = 1 << 19
"""Logits that a CPU draws from at a time, whose weights stay in a cache."""
FEW = 256
"""Most probable tokens that are tried first for top-p."""


def draw(
    logits: Tensor, uniform: Tensor, params: SamplingParams, chosen_by: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token from each distribution, given ``[R, V]`` logits over the temperature and ``[R]`` uniform numbers.

    Args:
        uniform: Numbers in [0, 1).
        chosen_by: ``[R, V]`` other logits over the temperature to choose by, -inf for tokens that may not be chosen.

    Returns:
        ``[R]`` tokens, and ``[R]`` their log-probabilities in the whole distribution of ``logits``.
    """
    whole = params.temperature > 0 and not params.top_k and params.top_p >= 1 and params.min_p <= 0
    if chosen_by is None and whole and (kernels := sampling_kernels(logits)) is not None:
        return kernels.draw(logits, uniform)
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    if logits.device.type == "cpu" and len(logits) > rows:
        choosing = [None] * -(-len(logits) // rows) if chosen_by is None else chosen_by.split(rows)
        chunks = zip(logits.split(rows), uniform.split(rows), choosing, strict=True)
        drawn, scores = zip(*[draw(own, numbers, params, by) for own, numbers, by in chunks], strict=True)
        return torch.cat(drawn), torch.cat(scores)
    with in_one_order(logits):
        return _draw(logits, uniform, params, chosen_by, whole)


def _draw(
    logits: Tensor, uniform: Tensor, params: SamplingParams, chosen_by: Tensor | None, whole: bool
) -> tuple[Tensor, Tensor]:
    if chosen_by is None and whole:
        largest = logits.amax(dim=-1, keepdim=True)
        tokens, total = _inverted((logits - largest).exp_(), uniform)
        return tokens.squeeze(1), (logits.gather(1, tokens) - largest - total.log()).to(logits.dtype).squeeze(1)
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    choices = logits if chosen_by is None else chosen_by
    if params.temperature == 0:
        tokens = choices.argmax(dim=-1, keepdim=True)
    else:
        weights, order = _weights(choices, params)
        places, _ = _inverted(weights, uniform)
        tokens = places if order is None else order.gather(1, places)
    return tokens.squeeze(1), (logits.gather(1, tokens) - normalizer).squeeze(1)


def _weights(choices: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """``[R, N]`` probabilities, not normalised, of the tokens to draw from, and their ids; None if these are all."""
    order, total = None, None
    kept = choices
    if 0 < params.top_k < choices.shape[-1]:
        kept, order = choices.topk(params.top_k, dim=-1)
    elif params.top_p < 1:
        kept, order, total = _largest(choices, params.top_p)
    weights = (kept - kept.amax(dim=-1, keepdim=True)).exp()
    if params.top_p < 1:
        total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) if total is None else total
        before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
        weights = weights.masked_fill(before >= params.top_p * total, 0.0)
    if params.min_p > 0:
        weights = weights.masked_fill(weights < params.min_p, 0.0)
    return weights, order


def _largest(choices: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of each row, enough for the share ``top_p`` of its probability, largest first.

    On a CPU, few of them are selected, and more if they are not enough. Elsewhere all are sorted, because a sort takes
    less time there than waiting for the answer whether few are enough.

    Returns:
        ``[R, N]`` logits, ``[R, N]`` their ids, and ``[R, 1]`` the sum of all probabilities over the largest one's.
    """
    largest = choices.amax(dim=-1, keepdim=True)
    total = (choices - largest).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    count = FEW if choices.device.type == "cpu" else choices.shape[-1]
    while count < choices.shape[-1]:
        kept, order = choices.topk(count, dim=-1)
        if bool(((kept - largest).exp().sum(dim=-1, keepdim=True, dtype=torch.float64) >= top_p * total).all()):
            return kept, order, total
        count *= 8
    return *choices.sort(dim=-1, descending=True), total


def _inverted(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """``[R, 1]`` places of ``[R, N]`` weights where their cumulative share passes ``[R]`` numbers, and their sums.

    First the block is found by the sums of blocks, then the place in it, so that only sums of blocks and one block of
    each row are added up in float64, which for all weights would mean a copy of them. A weight of zero is never chosen.
    """
    missing = -weights.shape[1] % BLOCK
    blocks = (nn.functional.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1).to(torch.float64)
    ends = sums.cumsum(dim=-1)
    targets = uniform[:, None].to(ends.dtype) * ends[:, -1:]
    block = torch.searchsorted(ends, targets, right=True).minimum(_last_positive(sums))
    rest = (targets - ends.gather(1, block) + sums.gather(1, block)).clamp(min=0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    place = torch.searchsorted(inside.cumsum(dim=-1, dtype=torch.float64), rest, right=True)
    return block * BLOCK + place.minimum(_last_positive(inside)), ends[:, -1:]


def _last_positive(values: Tensor) -> Tensor:
    """``[R, N] -> [R, 1]``: place of each row's last number that is not zero."""
    return values.shape[-1] - 1 - values.flip(-1).ne(0).long().argmax(dim=-1, keepdim=True)


def draw_many(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draw ``[R, K]`` tokens with replacement, given ``[R, V]`` logits and ``[R, K]`` uniform numbers."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True).expand(-1, uniform.shape[1])
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp()
    return torch.cat([_inverted(weights, numbers)[0] for numbers in uniform.unbind(1)], dim=1)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``[R, count]`` most probable tokens of ``[R, V]`` logits and their log-probabilities, most probable first."""
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    with in_one_order(logits):
        return ids, values - logits.logsumexp(dim=-1, keepdim=True)


def in_one_order(logits: Tensor) -> AbstractContextManager[None]:
    """Sum ``[R, V]`` within the body in an order that does not depend on the rows: a CPU's threads divide one alone."""
    return one_thread() if logits.device.type == "cpu" and len(logits) == 1 else nullcontext()


class Uniforms:
    """Uniform numbers of samples; each has its own Philox stream (Salmon et al. 2011), keyed by seed and place."""

    _BLOCK = 4  # numbers per value of the counter

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._random = np.random.Generator(self._bits)
        # Setting the state of a generator takes a twentieth of the time of making a new one.
        state: Any = self._bits.state
        self._state = state | {"buffer": (0, 0, 0, 0)}

    def numbers(
        self, seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64], start: int, count: int
    ) -> npt.NDArray[np.float64]:
        """``[R, count]`` numbers in [0, 1) of ``R`` streams, from index ``start`` on, a multiple of 4."""
        inner = self._state["state"]
        inner["counter"] = (start // self._BLOCK, 0, 0, 0)
        self._state["buffer_pos"] = self._BLOCK
        rows = []
        for key in zip(seeds.tolist(), places.tolist(), strict=True):
            inner["key"] = key
            self._bits.state = self._state
            rows.append(self._random.random(count))
        return np.array(rows)
