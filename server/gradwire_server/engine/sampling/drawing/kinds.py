"""Drawing of the next tokens of rows that have different parameters: rows with equal ones are drawn together.

All that the host needs of a token is copied at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gradwire_losses import host
from gradwire_losses.batch import sent
from torch import Tensor

from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.drawing.adjustments import logits_to_choose_by
from gradwire_server.engine.sampling.drawing.draw import draw, top_tokens
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pages.key_values import IntArray
from gradwire_server.engine.sampling.rows import BoolArray, Rows
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams, TopTokens
from gradwire_server.engine.scoring.token_scores import chosen_logprobs, token_logits

SPARE_KINDS = 32
"""Drawing parameters that no row uses, kept for the requests to come."""
_NOT_OF_DRAWING: dict[str, Any] = {
    "max_tokens": 0, "seed": 0, "n": 1, "stop": (), "stream": False, "first_prompt": 0,
    "keep_special_tokens": False,
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """The next token of each row.

    Attributes:
        tokens: ``[R]`` the tokens.
        logprobs: ``[R]`` their log-probabilities; NaN where the model's logits are not finite.
        ends: ``[R]`` whether a token ends its sample.
        tops: ``[k]`` the most probable tokens of the rows that want them.
    """

    tokens: IntArray
    logprobs: npt.NDArray[np.float32]
    ends: BoolArray
    tops: Mapping[int, TopTokens]


Logits = Mapping[int, tuple[IntArray, Tensor]]
"""For each number of drawing parameters ``[K]`` places of states, in their order, and their logits ``[K, V]``."""


@dataclass(frozen=True)
class _Kind:
    """Rows that are drawn together: their parameters, and ``[V]`` whether a token ends a sample.

    ``policy`` is one whose output head they have.
    """

    key: tuple[SamplingParams, frozenset[int], str]
    params: SamplingParams
    policy: Policy
    ends: BoolArray


class Kinds:
    """The drawing parameters of the rows of a batch, numbered.

    Args:
        vocab_size: Number of the model's logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kinds: dict[int, _Kind] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def number(self, job: LocalJob) -> int:
        """Number of a job's drawing parameters, shared by jobs with equal ones."""
        own_head = job.policy.output_head().adapter is not None
        head = job.policy.adapter if own_head else None
        key = (dataclasses.replace(job.params, **_NOT_OF_DRAWING), job.ends, head or "")
        for number, kind in self._kinds.items():
            if kind.key == key:
                return number
        ends = np.zeros(self._vocab_size, np.bool_)
        ends[[token for token in job.ends if 0 <= token < len(ends)]] = True
        number = max(self._kinds, default=-1) + 1
        self._kinds[number] = _Kind(key, job.params, job.policy, ends)
        return number

    def forget(self, rows: Rows, jobs: int) -> None:
        """Forget what no row uses, if there is much more than so many jobs need."""
        if len(self._kinds) > jobs + SPARE_KINDS:
            used = set(rows.kind.tolist())
            self._kinds = {number: kind for number, kind in self._kinds.items() if number in used}

    def logits(self, states: Tensor, kinds: IntArray) -> Logits:
        """Logits over the temperature of ``[T, H]`` states, given the number ``[T]`` of each one's parameters."""
        of_kinds: dict[int, tuple[IntArray, Tensor]] = {}
        for number in np.unique(kinds).tolist():
            kind, places = self._kinds[number], np.flatnonzero(kinds == number)
            part = _taken(states, places)
            logits = token_logits(part, kind.policy.output_head(), temperature=kind.params.temperature or 1.0)
            of_kinds[number] = places, logits
        return of_kinds

    def draw(self, of_kinds: Logits, rows: Rows, places: IntArray, uniform: npt.NDArray[np.float64]) -> Drawn:
        """Draw the next token of rows, given ``[R]`` the places of their states and ``[R]`` uniform numbers."""
        count = len(rows)
        drawn: list[tuple[_Kind, IntArray]] = []
        outputs: list[Tensor] = []
        for number in np.unique(rows.kind).tolist():
            kind = self._kinds[number]
            of_kind = np.flatnonzero(rows.kind == number)
            known, logits = of_kinds[number]
            logits = _taken(logits, np.searchsorted(known, places[of_kind]))
            choices = logits_to_choose_by(logits, kind.params, rows, of_kind)
            drawn.append((kind, of_kind))
            token, logprob = draw(logits, sent(torch.from_numpy(uniform[of_kind]), logits.device), kind.params, choices)
            if kind.policy.split_model.exact:
                logprob = chosen_logprobs(logits, token[:, None])[:, 0]
            outputs += token, logprob
            if kind.params.top_logprobs:
                outputs += top_tokens(logits, kind.params.top_logprobs)
        tokens, ends = np.empty(count, np.int64), np.empty(count, np.bool_)
        logprobs = np.empty(count, np.float32)
        tops: dict[int, TopTokens] = {}
        copies = iter(host.fetched(outputs))
        for kind, of_kind in drawn:
            tokens[of_kind] = next(copies).numpy()
            ends[of_kind] = kind.ends[tokens[of_kind]]
            logprobs[of_kind] = next(copies).float().numpy()
            if kind.params.top_logprobs:
                ids, values = next(copies).int().numpy(), next(copies).float().numpy()
                tops.update(zip(of_kind.tolist(), zip(ids, values, strict=True), strict=True))
        return Drawn(tokens, logprobs, ends, tops)


def _taken(tensor: Tensor, rows: IntArray) -> Tensor:
    """These rows of a tensor, in rising order; itself for all."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, sent(torch.from_numpy(rows), tensor.device))
