"""Drawing of tokens by inverting cumulative distributions at uniform numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradwire_server.engine.sampling.sampler import SamplingParams


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
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    choices = logits if chosen_by is None else chosen_by
    if params.temperature == 0:
        tokens = choices.argmax(dim=-1, keepdim=True)
    else:
        order = None
        kept = choices
        if 0 < params.top_k < logits.shape[-1]:
            kept, order = choices.topk(params.top_k, dim=-1)
        elif params.top_p < 1:
            kept, order = choices.sort(dim=-1, descending=True)
        weights = (kept - kept.amax(dim=-1, keepdim=True)).exp()
        if params.top_p < 1:
            before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
            weights = weights.masked_fill(before >= params.top_p * weights.sum(dim=-1, keepdim=True), 0.0)
        if params.min_p > 0:
            weights = weights.masked_fill(weights < params.min_p, 0.0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        targets = uniform[:, None].to(cumulative.dtype) * cumulative[:, -1:]
        places = torch.searchsorted(cumulative, targets, right=True)
        last = weights.shape[-1] - 1 - weights.flip(-1).ne(0).long().argmax(dim=-1, keepdim=True)
        places = places.minimum(last)
        tokens = places if order is None else order.gather(1, places)
    return tokens.squeeze(1), (logits.gather(1, tokens) - normalizer).squeeze(1)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``[R, count]`` most probable tokens of ``[R, V]`` logits and their log-probabilities, most probable first."""
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return ids, values - logits.logsumexp(dim=-1, keepdim=True)


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
