"""Keys and values of the samples in progress.

Legend: ``R`` samples (rows), ``P`` prompts, ``H`` hidden size. Rows may join and leave :class:`.pages.Pages` at any
time, and share what begins alike; this needs a model whose layers all attend to everything before. :class:`Together`
uses any cache of transformers, for rows that begin at the same time.
While requests keep arriving, rows that join sample 1.4 times as many tokens a second (``benchmarks/shortcuts.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gradwire_losses.batch import sent
from torch import Tensor

from gradwire_server.engine.model.policy import Policy

IntArray = npt.NDArray[np.int64]
Prompt = Sequence[int]


class Room(Protocol):
    """Tokens of cache that rows will need."""

    def with_row(self, prompt: Hashable, prompt_tokens: int, limit: int) -> int:
        """Tokens of all rows and one more; rows with equal ``prompt`` have the same one."""

    def add(self, prompt: Hashable, prompt_tokens: int, limit: int) -> None:
        """Add a row."""


class KeyValues(Protocol):
    """The keys and values that a batch of rows keeps between two tokens."""

    joins: bool
    """Whether rows may be added while others are in progress."""

    def room(self) -> Room:
        """An empty count of the tokens that rows will need."""

    def warm(self, policy: Policy, prompt: Prompt) -> bool:
        """Compute a part of a long prompt in advance; returns whether there is more of it to compute so."""

    def prefill(self, policies: Sequence[Policy], prompts: Sequence[Prompt], spread: IntArray) -> Tensor:
        """Add rows, where ``spread [R]`` is each row's index in ``prompts``; returns its last state, ``[R, H]``.

        Each prompt has its policy. Prompts of one policy are neighbours.
        """

    def decode(self, policies: Sequence[Policy], tokens: IntArray, positions: IntArray) -> Tensor:
        """Add a token to every row, given ``[R]`` policies, tokens and positions; returns their states, ``[R, H]``."""

    def keep(self, rows: IntArray) -> None:
        """Keep only these rows, in this order."""

    def end(self) -> None:
        """Drop all rows, and what only they need."""


class PaddedRoom:
    """Every row as long as the longest."""

    def __init__(self) -> None:
        self._rows = self._width = 0

    def with_row(self, prompt: Hashable, prompt_tokens: int, limit: int) -> int:
        return (self._rows + 1) * max(self._width, prompt_tokens + limit)

    def add(self, prompt: Hashable, prompt_tokens: int, limit: int) -> None:
        self._rows, self._width = self._rows + 1, max(self._width, prompt_tokens + limit)


class Together:
    """Rows of one policy that begin at the same time, padded on the left, in the cache that the model itself makes."""

    joins = False

    def __init__(self) -> None:
        self._mask = torch.zeros(0, 0, dtype=torch.int64)
        self._cache: Any = None

    def room(self) -> Room:
        return PaddedRoom()

    def warm(self, policy: Policy, prompt: Prompt) -> bool:
        return False

    def prefill(self, policies: Sequence[Policy], prompts: Sequence[Prompt], spread: IntArray) -> Tensor:
        policy = policies[0]
        policy.activate()
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids[place, width - len(prompt) :] = torch.as_tensor(prompt)
            mask[place, width - len(prompt) :] = 1
        ids, self._mask = sent(ids, policy.device), sent(mask, policy.device)
        output = policy.split_model.trunk(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
        )
        state: Tensor = output.last_hidden_state[:, -1]
        self._cache = output.past_key_values
        if len(spread) > len(prompts):
            self.keep(spread)
            state = state[sent(torch.from_numpy(spread), state.device)]
        return state

    def decode(self, policies: Sequence[Policy], tokens: IntArray, positions: IntArray) -> Tensor:
        policy = policies[0]
        policy.activate()
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        output = policy.split_model.trunk(
            input_ids=sent(torch.from_numpy(tokens)[:, None], policy.device),
            attention_mask=self._mask,
            position_ids=sent(torch.from_numpy(positions)[:, None], policy.device),
            past_key_values=self._cache,
            use_cache=True,
        )
        state: Tensor = output.last_hidden_state[:, -1]
        return state

    def keep(self, rows: IntArray) -> None:
        kept = torch.from_numpy(rows)  # on the CPU, because the cache may be spread over devices
        self._cache.batch_select_indices(kept)
        self._mask = self._mask[sent(kept, self._mask.device)]

    def end(self) -> None:
        self._cache = None
