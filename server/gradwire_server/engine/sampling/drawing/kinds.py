"""Drawing of the next tokens of rows that have different parameters: rows with equal ones are drawn together.

All that the host needs of a token is copied at once.

Logits are adjusted before, in this order, as in transformers, with ``V`` the vocabulary: ``z_v + bias_v``; of tokens in
the prompt or the sample ``z / r`` where positive and ``z r`` elsewhere (Keskar et al. 2019, r the repetition penalty);
of tokens in the sample, n_v times, ``z_v - presence [n_v > 0] - frequency n_v`` (OpenAI's API reference); -inf for
tokens that end a sample too early, and for those outside a grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gradwire_losses import host
from gradwire_losses.batch import sent
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.drawing.draw import draw, top_tokens
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pages.key_values import IntArray
from gradwire_server.engine.sampling.rows import BoolArray, Rows
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams, TopTokens
from gradwire_server.engine.scoring.token_scores import chosen_logprobs, token_logits


def logits_to_choose_by(logits: Tensor, params: SamplingParams, rows: Rows, drawing: IntArray) -> Tensor | None:
    """Logits to choose the next tokens of some rows by; None if they are the model's own.

    A row whose grammar cannot be followed further ends its job with an error.

    Args:
        logits: ``[R, V]`` over the temperature.
        params: The parameters that these rows share.
        drawing: ``[R]`` the rows.
    """
    choices = None
    if params.adjusts:
        prompts = [rows.job[row].prompt_of(rows.row[row]) for row in drawing]
        choices = adjusted(logits, params, prompts, rows.tokens[drawing], rows.count[drawing])
        ends = sorted(rows.job[drawing[0]].ends)  # equal for all, as their parameters and their models are
        early = rows.count[drawing] < params.min_tokens
        if ends and early.any():
            places = torch.from_numpy(early.nonzero()[0])[:, None]
            choices[sent(places, choices.device), sent(torch.tensor(ends), choices.device)] = -torch.inf
    if not params.forms:
        return choices
    choices = logits if choices is None else choices
    refused = np.zeros(choices.shape, np.bool_)
    for place, row in enumerate(drawing.tolist()):
        try:
            refused[place] = ~rows.growing[row].allowed()
        except OperationError as error:
            rows.job[row].error = error
    return choices.masked_fill(sent(torch.from_numpy(refused), choices.device), -torch.inf)


def adjusted(
    logits: Tensor,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    sampled: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int64],
) -> Tensor:
    """Logits to choose from, ``[R, V]`` over the temperature like ``logits``, which stay as they are.

    Args:
        prompts: Tokens of each row's prompt.
        sampled: ``[R, C]`` tokens of each row's sample so far, padded at the end.
        counts: ``[R]`` how many they are.
    """
    temperature = params.temperature or 1.0
    chosen = logits.clone()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        bias = sent(torch.tensor(biases, dtype=logits.dtype) / temperature, logits.device)
        chosen[:, sent(torch.tensor(ids), logits.device)] += bias
    penalises_sample = bool(params.presence_penalty or params.frequency_penalty)
    if params.repetition_penalty == 1 and not penalises_sample:
        return chosen
    times = _times(sampled, counts, logits)
    if params.repetition_penalty != 1:
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), max(lengths)), np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        seen = (times > 0) | (_times(padded, lengths, logits) > 0)
        scaled = torch.where(chosen > 0, chosen / params.repetition_penalty, chosen * params.repetition_penalty)
        chosen = torch.where(seen, scaled, chosen)
    if penalises_sample:
        chosen -= (params.presence_penalty * (times > 0) + params.frequency_penalty * times) / temperature
    return chosen


def _times(tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int64], like: Tensor) -> Tensor:
    """``[R, V]`` how often each token is among each row's first ``counts`` of ``tokens [R, C]``."""
    width = int(counts.max(initial=0))
    ids = torch.from_numpy(tokens[:, :width].astype(np.int64))
    there = torch.from_numpy(np.arange(width) < counts[:, None])
    times = torch.zeros_like(like)
    return times.scatter_add_(1, sent(ids, like.device), sent(there.to(like.dtype), like.device))


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
