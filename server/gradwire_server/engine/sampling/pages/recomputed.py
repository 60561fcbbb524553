"""Rows whose tokens all go through the model again for each new one, and which models need that.

Some models keep no cache (GPT), keep it in themselves (RecurrentGemma), or continue from it with other numbers than
those of a forward. The check compares them once, so that what is sampled is what is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gradwire_server.engine.agreement import Agreement, Failure
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.pages.key_values import IntArray, KeyValues, Prompt, Together

logger = logging.getLogger(__name__)

TRIED = ((1, 7), (3, 1))
"""Tokens of the prompts that a cache is tried with, in each of the batches."""
TRIED_STEPS = 3


class Recomputed(Together):
    """Rows of one policy that begin at the same time, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: list[list[int]] = []

    def prefill(
        self, policies: Sequence[Policy], prompts: Sequence[Prompt], spread: IntArray, trees: Sequence[bytes] = ()
    ) -> Tensor:
        self._tokens = [list(prompts[number]) for number in spread.tolist()]
        return self._states(policies[0])

    def decode(self, policies: Sequence[Policy], tokens: IntArray, positions: IntArray) -> Tensor:
        for row, token in zip(self._tokens, tokens.tolist(), strict=True):
            row.append(token)
        return self._states(policies[0])

    def keep(self, rows: IntArray) -> None:
        self._tokens = [list(self._tokens[row]) for row in rows.tolist()]

    def end(self, *, spare_memory: bool = False) -> None:
        self._tokens = []

    def more(self, positions: IntArray) -> int:
        return sum(self._width + 1 for _ in self._tokens)

    def held(self) -> Sequence[float]:
        return [float(self._width) for _ in self._tokens]

    @property
    def _width(self) -> int:
        return max(map(len, self._tokens), default=0)

    def _states(self, policy: Policy) -> Tensor:
        lengths = torch.tensor([len(row) for row in self._tokens])
        ids = torch.tensor([token for row in self._tokens for token in row])
        return policy.hidden(ids, lengths, lengths.cumsum(0) - 1)


def _both_ways(policy: Policy, prompts: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """States of two prompts, one of them twice, and of the tokens behind them: computed again, and from the cache."""
    recomputed: list[Tensor] = []
    cached: list[Tensor] = []
    ways: tuple[tuple[KeyValues, list[Tensor]], ...] = ((Recomputed(), recomputed), (Together(), cached))
    for values, states in ways:
        states.append(values.prefill([policy], prompts, np.array([0, 1, 1])))
        values.keep(np.array([2, 0]))
        places = np.array([len(prompts[1]), len(prompts[0])])
        for step in range(TRIED_STEPS):
            states.append(values.decode([policy], np.array([step + 1, step + 3]), places + step))
    return recomputed, cached


@torch.no_grad()
def keeps_cache(policy: Policy, agreement: Agreement) -> bool:
    """Whether a model continues from its own cache with the states of a forward, for rows of different lengths."""
    facts = policy.facts
    precise = policy.split_model.dtype in (torch.float32, torch.float64)
    for lengths in TRIED:
        if max(lengths) + TRIED_STEPS > facts.context_length:
            continue
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, facts.vocab_size, length).tolist() for length in lengths]
        both = agreement.attempt(partial(_both_ways, policy, prompts))
        if isinstance(both, Failure):  # whatever a model raises that has no such cache
            if both.out_of_memory:
                raise both.error
            error = both.error
            logger.warning("%s samples without a cache: %s: %s", facts.name, type(error).__name__, error)
            return False
        expected, found = both
        scale = max(each.abs().max().item() for each in expected)
        apart = max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))
        if not apart <= (1e-3 if precise else 5e-2) * (1 + scale):
            logger.warning("%s samples without a cache: with its own, states differ by %.3g", facts.name, apart)
            return False
    return True
