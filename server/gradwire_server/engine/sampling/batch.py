"""Continuous batching of one policy's samples.

A prompt shared by several rows of one prefill goes through the model once. Rows join between two tokens; when rows end,
the last rows take their places. A token is drawn by inverting the cumulative distribution at one uniform number. These
numbers belong to the sample, so batching with other samples changes only float rounding.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradwire_server.engine.failures import is_fatal, is_out_of_memory
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.draw import Uniforms, draw
from gradwire_server.engine.sampling.jobs import LocalJob, StopSearch
from gradwire_server.engine.sampling.key_values import IntArray, KeyValues, Slots, Together
from gradwire_server.engine.sampling.sampler import SamplingParams
from gradwire_server.engine.scoring.token_scores import token_logits

logger = logging.getLogger(__name__)

BoolArray = npt.NDArray[np.bool_]

DRAWS = 64
"""Uniform numbers generated per row at a time."""
PREFILL_TOKENS = 1 << 14
"""Maximum prompt tokens in one forward, padding included; a longer prompt goes alone."""


@dataclass
class _Rows:
    """The samples in progress as columns of ``[R]`` entries."""

    job: npt.NDArray[np.object_]
    row: IntArray
    kind: IntArray  # index of the job's drawing parameters
    search: npt.NDArray[np.object_]  # StopSearch or None
    length: IntArray  # tokens in the cache
    count: IntArray  # tokens sampled
    limit: IntArray
    last: IntArray  # newest token, not in the cache yet
    seed: npt.NDArray[np.uint64]
    place: npt.NDArray[np.uint64]
    uniform: npt.NDArray[np.float64]  # [R, DRAWS]
    tokens: npt.NDArray[np.int32]  # [R, room]
    logprobs: npt.NDArray[np.float32]  # [R, room]

    def __len__(self) -> int:
        return len(self.row)

    def select(self, rows: IntArray) -> _Rows:
        return _Rows(**{name: column[rows] for name, column in vars(self).items()})

    def beside(self, other: _Rows) -> _Rows:
        mine, theirs = vars(self), vars(other)
        return _Rows(**{name: np.concatenate([mine[name], theirs[name]]) for name in mine})


class Batch:
    """The samples of one policy.

    Args:
        policy: The policy.
        slots: Whether the model's keys and values fit in slots, so that rows can join at any time.
        cache_tokens: Maximum tokens of key-value cache, including room for tokens to come.
        rows: Maximum rows at a time.
        uniforms: Source of random numbers.
    """

    def __init__(self, policy: Policy, slots: bool, cache_tokens: int, rows: int, uniforms: Uniforms) -> None:
        self.policy = policy
        self._slots = slots
        self._cache_tokens, self._most = cache_tokens, rows
        self._waiting: dict[LocalJob, deque[int]] = {}  # the job whose turn it is comes first
        self._joining: list[tuple[LocalJob, int]] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._kinds: list[tuple[SamplingParams, BoolArray]] = []
        self._searching = False
        self._jobs: list[LocalJob] = []
        self._uniforms = uniforms
        self._empty()

    def _empty(self) -> None:
        self._values: KeyValues = Slots() if self._slots else Together()
        self._rows = self._begin([])
        self._width = 0

    @property
    def jobs(self) -> Sequence[LocalJob]:
        """Unfinished jobs."""
        return self._jobs

    def add(self, job: LocalJob) -> None:
        self._jobs.append(job)
        self._searching = self._searching or bool(job.params.stop)
        self._waiting[job] = deque(job.order())

    def remove(self, job: LocalJob) -> None:
        self._jobs.remove(job)
        self._waiting.pop(job, None)
        self._keep(self._rows.job != job)

    def step(self) -> None:
        """Prefill new rows if there is room, and add one token to every sample."""
        failure = None
        try:
            with torch.no_grad():
                self.policy.compute(self._step)
        except Exception as error:  # reported by the jobs, to whoever waits for their samples
            if is_fatal(error):
                raise
            failure = error
            if is_out_of_memory(error):
                error.__traceback__ = None  # it keeps the computed tensors alive
        if failure is not None:
            self._give_up(failure)
        self._jobs = [job for job in self._jobs if not job.done]

    def _step(self) -> None:
        self.policy.activate()
        self._joining = self._admit()
        if self._joining:
            self._prefill()
        if len(self._rows):
            self._values.longest = self._width
            states = self._values.decode(self.policy, self._rows.last, self._rows.length)
            self._rows.length += 1
            self._draw(states, 0)

    def _give_up(self, failure: Exception) -> None:
        """Handle the failure of a step.

        If memory ran out, all samples restart from their prompts with half as many rows at a time; the random numbers
        are the same, and so are the samples. Any other error, or a single sample that does not fit, ends all jobs.
        """
        started = [*zip(self._rows.job, self._rows.row.tolist(), strict=True), *self._joining]
        self._joining = []
        self._empty()
        if is_out_of_memory(failure) and len(started) > 1:
            self._most = len(started) // 2
            logger.warning("out of memory with %d samples, going on with %d: %s", len(started), self._most, failure)
            for job, row in reversed(started):
                self._waiting.setdefault(job, deque()).appendleft(row)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return
        for job in self._jobs:
            job.error = failure
        self._waiting.clear()

    # ---- joining ----

    def _admit(self) -> list[tuple[LocalJob, int]]:
        """Choose the rows that join now: of each job in turn, as many as fit."""
        if not self._waiting or (len(self._rows) and not self._values.joins):
            return []
        admitted: list[tuple[LocalJob, int]] = []
        width, longest = self._width, 0
        prompts: set[tuple[int, ...]] = set()
        while self._waiting:
            job, rows = next(iter(self._waiting.items()))
            row = rows[0]
            prompt = job.prompt_of(row)
            width = max(width, len(prompt) + int(job.limits[row]))
            prompts.add(prompt)
            longest = max(longest, len(prompt))
            count = len(self._rows) + len(admitted) + 1
            if count > 1 and (count > self._most or count * width > self._cache_tokens):
                break
            if admitted and len(prompts) * longest > PREFILL_TOKENS:
                break
            admitted.append((job, rows.popleft()))
            del self._waiting[job]
            if rows:
                self._waiting[job] = rows
            self._width = width
        return admitted

    def _prefill(self) -> None:
        new = self._begin(self._joining)
        numbers: dict[tuple[int, ...], int] = {}
        spread = [numbers.setdefault(job.prompt_of(row), len(numbers)) for job, row in self._joining]
        self._values.longest = self._width
        states = self._values.prefill(self.policy, list(numbers), np.array(spread))
        start = len(self._rows)
        if start:
            room = max(self._rows.tokens.shape[1], new.tokens.shape[1])
            new = _widened(self._rows, room).beside(_widened(new, room))
        self._rows, self._joining = new, []
        self._draw(states, start)

    def _begin(self, newcomers: list[tuple[LocalJob, int]]) -> _Rows:
        jobs, rows = [job for job, _ in newcomers], [row for _, row in newcomers]
        count = len(rows)
        job_column, search = np.empty(count, object), np.empty(count, object)
        job_column[:] = jobs
        search[:] = [job.search() for job in jobs]
        kinds = {id(job): self._kind(job) for job in jobs}
        limits = np.array([job.limits[row] for job, row in newcomers], np.int64)
        seeds = np.array([job.params.seed % 2**64 for job in jobs], np.uint64)
        places = np.array([job.place_of(row) for job, row in newcomers], np.uint64)
        uniform = np.zeros((count, DRAWS))
        if count:
            first = min(DRAWS, -(-int(limits.max()) // 4) * 4)
            uniform[:, :first] = self._uniforms.numbers(seeds, places, 0, first)
        return _Rows(
            job=job_column,
            row=np.array(rows, np.int64),
            kind=np.array([kinds[id(job)] for job in jobs], np.int64),
            search=search,
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
        """Index of a job's drawing parameters, shared by jobs with equal ones."""
        params = job.params
        key = (params.temperature, params.top_k, params.top_p, job.ends)
        if key not in self._numbers:
            self._numbers[key] = len(self._kinds)
            ends = np.zeros(self.policy.facts.vocab_size, np.bool_)
            ends[[token for token in job.ends if 0 <= token < len(ends)]] = True
            self._kinds.append((params, ends))
        return self._numbers[key]

    # ---- drawing ----

    def _draw(self, states: Tensor, start: int) -> None:
        """Draw the next token of the rows from ``start`` on, given their states, and remove rows that end."""
        rows = self._rows
        drawing = np.arange(start, len(rows))
        count = rows.count[start:]
        if count.max() >= rows.tokens.shape[1]:
            rows = self._rows = _widened(rows, 2 * rows.tokens.shape[1])
        uniform = self._next_uniform(drawing)
        tokens, by_token = np.empty(len(drawing), np.int64), np.empty(len(drawing), np.bool_)
        head = self.policy.output_head()
        for kind in np.unique(rows.kind[start:]) if len(self._kinds) > 1 else (0,):
            params, ends = self._kinds[kind]
            of_kind = np.flatnonzero(rows.kind[start:] == kind)
            part = states
            if len(of_kind) < len(drawing):
                part = states[torch.from_numpy(of_kind).to(states.device)]
            logits = token_logits(part, head, temperature=params.temperature or 1.0)
            drawn, logprobs = draw(logits, torch.from_numpy(uniform[of_kind]).to(logits.device), params)
            tokens[of_kind] = drawn.cpu().numpy()
            by_token[of_kind] = ends[tokens[of_kind]]
            rows.logprobs[drawing[of_kind], count[of_kind]] = logprobs.float().cpu().numpy()
        rows.tokens[drawing, count] = tokens
        rows.last[start:] = tokens
        count += 1
        self._end(drawing, by_token, count >= rows.limit[start:])

    def _next_uniform(self, drawing: IntArray) -> npt.NDArray[np.float64]:
        rows = self._rows
        count = rows.count[drawing]
        spent = drawing[(count > 0) & (count % DRAWS == 0)]
        for start in np.unique(rows.count[spent]):
            whose = spent[rows.count[spent] == start]
            rows.uniform[whose] = self._uniforms.numbers(rows.seed[whose], rows.place[whose], int(start), DRAWS)
        uniform: npt.NDArray[np.float64] = rows.uniform[drawing, count % DRAWS]
        return uniform

    def _end(self, drawing: IntArray, by_token: BoolArray, at_limit: BoolArray) -> None:
        """Hand finished samples to their jobs."""
        rows = self._rows
        texts: dict[int, str | None] = {}
        if self._searching:
            for row, ended in zip(drawing.tolist(), by_token.tolist(), strict=True):
                search: StopSearch | None = rows.search[row]
                if search is not None and not ended and (text := search.find(int(rows.last[row]))) is not None:
                    texts[row] = text
        over = by_token | at_limit
        over[[row - int(drawing[0]) for row in texts]] = True
        if not over.any():
            return
        for row, ended in zip(drawing[over].tolist(), by_token[over].tolist(), strict=True):
            count = rows.count[row]
            tokens, logprobs = rows.tokens[row, :count].copy(), rows.logprobs[row, :count].copy()
            rows.job[row].end(int(rows.row[row]), tokens, logprobs, ended, texts.get(row))
        kept = np.ones(len(rows), np.bool_)
        kept[drawing[over]] = False
        self._keep(kept)

    def _keep(self, kept: BoolArray) -> None:
        """Keep only these rows; the last of them move to the places of removed ones."""
        stay = int(kept.sum())
        if stay == len(kept):
            return
        order = np.arange(stay)
        order[~kept[:stay]] = np.flatnonzero(kept[stay:]) + stay
        self._rows = rows = self._rows.select(order)
        if stay:
            self._values.keep(order)
            self._width = int((rows.length + rows.limit - rows.count).max()) + 1
        else:
            self._empty()


def _widened(rows: _Rows, room: int) -> _Rows:
    missing = ((0, 0), (0, room - rows.tokens.shape[1]))
    return dataclasses.replace(rows, tokens=np.pad(rows.tokens, missing), logprobs=np.pad(rows.logprobs, missing))
