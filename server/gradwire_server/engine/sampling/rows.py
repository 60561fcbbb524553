"""The samples in progress as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradwire_server.engine.sampling.admission import Waiting
from gradwire_server.engine.sampling.drawing.draw import Uniforms
from gradwire_server.engine.sampling.growing.drafts import Drafts
from gradwire_server.engine.sampling.growing.growing_sample import GrowingSample
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pages.key_values import IntArray

BoolArray = npt.NDArray[np.bool_]

DRAWS = 64
"""Uniform numbers generated per row at a time."""


@dataclass
class Rows:
    """The samples in progress as columns of ``[R]`` entries."""

    job: npt.NDArray[np.object_]
    row: IntArray
    waited: npt.NDArray[np.object_]  # its place among those that waited, a Waiting
    since: IntArray  # step at which it joined
    kind: IntArray  # number of the job's drawing parameters
    growing: npt.NDArray[np.object_]  # GrowingSample or None
    drafts: npt.NDArray[np.object_]  # Drafts or None
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

    def select(self, rows: IntArray) -> Rows:
        return Rows(**{name: column[rows] for name, column in vars(self).items()})

    def beside(self, other: Rows) -> Rows:
        mine, theirs = vars(self), vars(other)
        return Rows(**{name: np.concatenate([mine[name], theirs[name]]) for name in mine})


def widened(rows: Rows, room: int) -> Rows:
    """Rows with room for so many tokens."""
    missing = ((0, 0), (0, room - rows.tokens.shape[1]))
    return dataclasses.replace(rows, tokens=np.pad(rows.tokens, missing), logprobs=np.pad(rows.logprobs, missing))


@dataclass(frozen=True)
class Left:
    """The state of a row that left the batch and continues later.

    Attributes:
        tokens: ``[T]`` its tokens.
        logprobs: ``[T]`` their log-probabilities.
        growing: Its text and grammar so far.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    growing: GrowingSample | None
    drafts: Drafts | None


def begun(
    joining: Sequence[Waiting],
    left: Mapping[tuple[LocalJob, int], Left],
    kind: Callable[[LocalJob], int],
    uniforms: Uniforms,
    step: int,
    *,
    speculates: bool,
) -> Rows:
    """The columns of rows that join.

    Args:
        left: The state of rows that left before.
        kind: Returns the number of a job's drawing parameters.
        step: The step at which they join.
        speculates: Whether their next tokens are drafted.
    """
    count = len(joining)
    jobs, before = [each.job for each in joining], [left.get((each.job, each.row)) for each in joining]
    job_column, growing, drafts, waited = (np.empty(count, object) for _ in range(4))
    for place, each in enumerate(joining):
        had = before[place]
        job_column[place], waited[place] = each.job, each
        growing[place] = each.job.begin(each.row) if had is None else had.growing
        if speculates:
            drafts[place] = each.job.drafts(each.row) if had is None else had.drafts
    kinds = {id(job): kind(job) for job in jobs}
    limits = np.array([each.job.limits[each.row] for each in joining], np.int64)
    counts = np.array([0 if had is None else len(had.tokens) for had in before], np.int64)
    seeds = np.array([job.params.seed % 2**64 for job in jobs], np.uint64)
    places = np.array([each.job.place_of(each.row) for each in joining], np.uint64)
    uniform = np.zeros((count, DRAWS))
    starts = counts // DRAWS * DRAWS
    for start in np.unique(starts).tolist():
        own = starts == start
        first = min(DRAWS, -(-int((limits[own] - start).max()) // 4) * 4)
        uniform[own, :first] = uniforms.numbers(seeds[own], places[own], start, first)
    width = DRAWS << (int(counts.max(initial=0)) // DRAWS).bit_length()
    tokens, logprobs = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    for place, had in enumerate(before):
        if had is not None:
            tokens[place, : counts[place]], logprobs[place, : counts[place]] = had.tokens, had.logprobs
    return Rows(
        job=job_column,
        row=np.array([each.row for each in joining], np.int64),
        waited=waited,
        since=np.full(count, step, np.int64),
        kind=np.array([kinds[id(job)] for job in jobs], np.int64),
        growing=growing,
        drafts=drafts,
        length=np.array([len(each.job.prompt_of(each.row)) for each in joining], np.int64) + counts,
        count=counts,
        limit=limits,
        last=np.zeros(count, np.int64),
        seed=seeds,
        place=places,
        uniform=uniform,
        tokens=tokens,
        logprobs=logprobs,
    )
