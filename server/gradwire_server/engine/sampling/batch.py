"""Continuous batching of samples, of one policy or of several on one copy of a model.

A prompt shared by several rows goes through the model once. Rows join and leave between two tokens. All that the host
needs of a token is copied at once. A token is drawn by inverting the cumulative distribution at one uniform number.
These numbers belong to the sample, so batching with other samples changes only float rounding.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gradwire_losses import host
from gradwire_losses.batch import sent
from torch import Tensor

from gradwire_server.engine.agreement import Agreement, Failure
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.sampling.drawing.adjustments import logits_to_choose_by
from gradwire_server.engine.sampling.drawing.draw import Uniforms, draw, top_tokens
from gradwire_server.engine.sampling.growing.growing_sample import GrowingSample
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pages.key_values import IntArray, KeyValues
from gradwire_server.engine.sampling.rows import DRAWS, BoolArray, Rows, widened
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams, TopTokens
from gradwire_server.engine.sampling.several_policies import neighbours
from gradwire_server.engine.scoring.token_scores import token_logits
from gradwire_server.engine.threads import sampling_threads

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 1 << 14
"""Maximum prompt tokens in one forward, padding included; a longer prompt goes alone."""
SPARE_KINDS = 32
"""Drawing parameters that no row uses, kept for the requests to come."""
_NOT_OF_DRAWING: dict[str, Any] = {"max_tokens": 0, "seed": 0, "n": 1, "stop": (), "stream": False}


@dataclass(frozen=True)
class _Kind:
    """Rows that are drawn together: their parameters, and ``[V]`` whether a token ends a sample.

    ``policy`` is one whose output head they have.
    """

    key: tuple[SamplingParams, frozenset[int], str]
    params: SamplingParams
    policy: Policy
    ends: BoolArray


class Batch:
    """The samples of one policy, or of several that compute in spans.

    Args:
        split_model: The copy of the model that they are computed with.
        values: Makes the keys and values of no rows.
        cache_tokens: Maximum tokens of key-value cache, including room for tokens to come.
        rows: Maximum rows at a time.
        uniforms: Source of random numbers.
        agreement: Tells whether a step failed.

    Attributes:
        values: Keys and values of the rows in progress.
    """

    def __init__(
        self,
        split_model: SplitModel,
        values: Callable[[], KeyValues],
        cache_tokens: int,
        rows: int,
        uniforms: Uniforms,
        agreement: Agreement,
    ) -> None:
        self._split_model = split_model
        self._make_values = values
        self._cache_tokens, self._most = cache_tokens, rows
        self._waiting: dict[LocalJob, deque[int]] = {}  # the job whose turn it is comes first
        self._joining: list[tuple[LocalJob, int]] = []
        self._kinds: dict[int, _Kind] = {}
        self._jobs: list[LocalJob] = []
        self._uniforms, self._agreement = uniforms, agreement
        self.values = values()
        self._rows = self._begin([])
        self._room = self.values.room()

    @property
    def jobs(self) -> Sequence[LocalJob]:
        """Unfinished jobs."""
        return self._jobs

    def add(self, job: LocalJob) -> None:
        self._jobs.append(job)
        self._waiting[job] = deque(job.order())

    def remove(self, job: LocalJob) -> None:
        self._jobs.remove(job)
        self._waiting.pop(job, None)
        self._keep(self._rows.job != job)

    def step(self) -> None:
        """Prefill new rows if there is room, and add one token to every sample."""
        with torch.no_grad():
            found = self._agreement.attempt(lambda: self._split_model.compute(self._step))
        if isinstance(found, Failure):  # reported by the jobs, to whoever waits for their samples
            self._give_up(found)
        for job in [job for job in self._jobs if job.error is not None]:
            self.remove(job)
        self._jobs = [job for job in self._jobs if not job.done]
        if len(self._kinds) > len(self._jobs) + SPARE_KINDS:
            used = set(self._rows.kind.tolist())
            self._kinds = {number: kind for number, kind in self._kinds.items() if number in used}

    def _step(self) -> None:
        self._joining = self._admit()
        tokens = len(self._rows) + sum(len(job.prompt_of(row)) for job, row in self._joining)
        with sampling_threads(self._split_model.device, tokens, self._split_model.facts.num_parameters):
            self._extend()

    def _extend(self) -> None:
        """Compute the joining rows' prompts and the next token of every row."""
        states = []
        if len(self._rows):
            states.append(self.values.decode(_policies(self._rows), self._rows.last, self._rows.length))
            self._rows.length += 1
        if self._joining:
            states.append(self._prefill())
        if states:
            self._draw(states[0] if len(states) == 1 else torch.cat(states))
            if len(states) > 1:
                order = neighbours(_policies(self._rows))
                if (order[1:] < order[:-1]).any():
                    self._rows = self._rows.select(order)
                    self.values.keep(order)

    def _give_up(self, failure: Failure) -> None:
        """Handle the failure of a step.

        If memory ran out, all samples restart from their prompts with half as many rows at a time; the random numbers
        are the same, and so are the samples, but for float rounding, which a streamed sample could show. Any other
        error, or a single sample that does not fit, ends all jobs.
        """
        started = [*zip(self._rows.job, self._rows.row.tolist(), strict=True), *self._joining]
        self._joining = []
        self.values, self._rows = self._make_values(), self._begin([])
        self._room = self.values.room()
        if failure.out_of_memory and len(started) > 1:
            self._most = len(started) // 2
            logger.warning(
                "out of memory with %d samples, going on with %d: %s", len(started), self._most, failure.error
            )
            for job, row in reversed(started):
                self._waiting.setdefault(job, deque()).appendleft(row)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return
        for job in self._jobs:
            job.error = failure.error
        self._waiting.clear()

    # ---- joining ----

    def _admit(self) -> list[tuple[LocalJob, int]]:
        """Choose the rows that join now: of each job in turn, as many as fit."""
        if not self._waiting or (len(self._rows) and not self.values.joins):
            return []
        admitted: list[tuple[LocalJob, int]] = []
        longest = 0
        prompts: set[tuple[Policy, tuple[int, ...]]] = set()
        while self._waiting:
            job, rows = next(iter(self._waiting.items()))
            row = rows[0]
            prompt = job.prompt_of(row)
            needs = _needs(job, row)
            prompts.add((job.policy, prompt))
            longest = max(longest, len(prompt))
            count = len(self._rows) + len(admitted) + 1
            if count > 1 and (count > self._most or self._room.with_row(*needs) > self._cache_tokens):
                break
            if admitted and len(prompts) * longest > PREFILL_TOKENS:
                break
            if not admitted and self.values.warm(job.policy, prompt):
                break
            admitted.append((job, rows.popleft()))
            del self._waiting[job]
            if rows:
                self._waiting[job] = rows
            self._room.add(*needs)
        return admitted

    def _prefill(self) -> Tensor:
        """Add the rows that join; returns their states, ``[R, H]``."""
        self._joining = [self._joining[place] for place in neighbours([job.policy for job, _ in self._joining])]
        new = self._begin(self._joining)
        numbers: dict[tuple[Policy, tuple[int, ...]], int] = {}
        spread = [numbers.setdefault((job.policy, job.prompt_of(row)), len(numbers)) for job, row in self._joining]
        policies, prompts = [policy for policy, _ in numbers], [prompt for _, prompt in numbers]
        states = self.values.prefill(policies, prompts, np.array(spread))
        if len(self._rows):
            room = max(self._rows.tokens.shape[1], new.tokens.shape[1])
            new = widened(self._rows, room).beside(widened(new, room))
        self._rows, self._joining = new, []
        return states

    def _begin(self, newcomers: list[tuple[LocalJob, int]]) -> Rows:
        jobs, rows = [job for job, _ in newcomers], [row for _, row in newcomers]
        count = len(rows)
        job_column, growing = np.empty(count, object), np.empty(count, object)
        job_column[:] = jobs
        growing[:] = [job.begin(row) for job, row in newcomers]
        kinds = {id(job): self._kind(job) for job in jobs}
        limits = np.array([job.limits[row] for job, row in newcomers], np.int64)
        seeds = np.array([job.params.seed % 2**64 for job in jobs], np.uint64)
        places = np.array([job.place_of(row) for job, row in newcomers], np.uint64)
        uniform = np.zeros((count, DRAWS))
        if count:
            first = min(DRAWS, -(-int(limits.max()) // 4) * 4)
            uniform[:, :first] = self._uniforms.numbers(seeds, places, 0, first)
        return Rows(
            job=job_column,
            row=np.array(rows, np.int64),
            kind=np.array([kinds[id(job)] for job in jobs], np.int64),
            growing=growing,
            length=np.array([len(job.prompt_of(row)) for job, row in newcomers], np.int64),
            count=np.zeros(count, np.int64),
            limit=limits,
            last=np.zeros(count, np.int64),
            seed=seeds,
            place=places,
            uniform=uniform,
            tokens=np.zeros((count, DRAWS), np.int32),
            logprobs=np.zeros((count, DRAWS), np.float32),
        )

    def _kind(self, job: LocalJob) -> int:
        """Number of a job's drawing parameters, shared by jobs with equal ones."""
        own_head = job.policy.output_head().adapter is not None
        head = job.policy.adapter if own_head else None
        key = (dataclasses.replace(job.params, **_NOT_OF_DRAWING), job.ends, head or "")
        for number, kind in self._kinds.items():
            if kind.key == key:
                return number
        ends = np.zeros(self._split_model.facts.vocab_size, np.bool_)
        ends[[token for token in job.ends if 0 <= token < len(ends)]] = True
        number = max(self._kinds, default=-1) + 1
        self._kinds[number] = _Kind(key, job.params, job.policy, ends)
        return number

    # ---- drawing ----

    def _draw(self, states: Tensor) -> None:
        """Draw the next token of every row, given their states, and remove rows that end."""
        rows = self._rows
        drawing = np.arange(len(rows))
        count = rows.count
        if count.max() >= rows.tokens.shape[1]:
            rows = self._rows = widened(rows, 2 * rows.tokens.shape[1])
        uniform = self._next_uniform(drawing)
        tokens, by_token = np.empty(len(drawing), np.int64), np.empty(len(drawing), np.bool_)
        tops: dict[int, TopTokens] = {}
        drawn: list[tuple[_Kind, IntArray]] = []
        found: list[Tensor] = []
        for number in np.unique(rows.kind).tolist():
            kind = self._kinds[number]
            of_kind = np.flatnonzero(rows.kind == number)
            part = states
            if len(of_kind) < len(drawing):
                part = states.index_select(0, sent(torch.from_numpy(of_kind), states.device))
            logits = token_logits(part, kind.policy.output_head(), temperature=kind.params.temperature or 1.0)
            choices = logits_to_choose_by(logits, kind.params, rows, of_kind)
            drawn.append((kind, of_kind))
            found += draw(logits, sent(torch.from_numpy(uniform[of_kind]), logits.device), kind.params, choices)
            if kind.params.top_logprobs:
                found += top_tokens(logits, kind.params.top_logprobs)
        copies = iter(host.fetched(found))
        for kind, of_kind in drawn:
            tokens[of_kind] = next(copies).numpy()
            by_token[of_kind] = kind.ends[tokens[of_kind]]
            logprobs = next(copies).float().numpy()
            rows.logprobs[of_kind, count[of_kind]] = logprobs
            for row in of_kind[np.isnan(logprobs)].tolist():
                rows.job[row].fail_non_finite(int(rows.row[row]))
            if kind.params.top_logprobs:
                ids, values = next(copies).int().numpy(), next(copies).float().numpy()
                tops.update(zip(of_kind.tolist(), zip(ids, values, strict=True), strict=True))
        rows.tokens[drawing, count] = tokens
        rows.last[:] = tokens
        count += 1
        self._end(by_token, count >= rows.limit, tops)

    def _next_uniform(self, drawing: IntArray) -> npt.NDArray[np.float64]:
        rows = self._rows
        count = rows.count[drawing]
        spent = drawing[(count > 0) & (count % DRAWS == 0)]
        for start in np.unique(rows.count[spent]):
            whose = spent[rows.count[spent] == start]
            rows.uniform[whose] = self._uniforms.numbers(rows.seed[whose], rows.place[whose], int(start), DRAWS)
        uniform: npt.NDArray[np.float64] = rows.uniform[drawing, count % DRAWS]
        return uniform

    def _end(self, by_token: BoolArray, at_limit: BoolArray, tops: Mapping[int, TopTokens]) -> None:
        """Hand new tokens to the samples that follow them, and finished samples to their jobs."""
        rows = self._rows
        texts: dict[int, str | None] = {}
        for row in [row for row in range(len(rows)) if rows.growing[row] is not None]:
            growing: GrowingSample = rows.growing[row]
            logprob = float(rows.logprobs[row, rows.count[row] - 1])
            text = growing.add(int(rows.last[row]), logprob, tops.get(row), ends=bool(by_token[row]))
            if text is not None:
                texts[row] = text
        over = by_token | at_limit
        over[list(texts)] = True
        if not over.any():
            return
        for row, ended in zip(np.flatnonzero(over).tolist(), by_token[over].tolist(), strict=True):
            count = rows.count[row]
            tokens, logprobs = rows.tokens[row, :count].copy(), rows.logprobs[row, :count].copy()
            top = rows.growing[row].top if rows.growing[row] is not None else None
            rows.job[row].end(int(rows.row[row]), tokens, logprobs, ended, texts.get(row), top)
        self._keep(~over)

    def _keep(self, kept: BoolArray) -> None:
        """Keep only these rows."""
        if kept.all():
            return
        order = np.flatnonzero(kept)
        self._rows = rows = self._rows.select(order)
        if len(order):
            self.values.keep(order)
        else:
            self.values.end()
        self._room = self.values.room()
        for job, row in zip(rows.job, rows.row.tolist(), strict=True):
            self._room.add(*_needs(job, row))


def _policies(rows: Rows) -> list[Policy]:
    """The policy of each row."""
    return [job.policy for job in rows.job]


def _needs(job: LocalJob, row: int) -> tuple[Hashable, int, int]:
    """What a row needs of the cache, as arguments of :class:`.key_values.Room`."""
    return (id(job), row // job.params.n), len(job.prompt_of(row)), int(job.limits[row])
