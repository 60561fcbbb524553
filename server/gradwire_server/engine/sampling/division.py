"""The division of samples among the ranks of an engine: each computes some of the rows of every request.

A row's draws are numbered within its request, so the tokens are the same whatever the number of ranks; the
log-probabilities to rounding, because other rows are computed beside it. A deterministic request goes to one rank as a
whole. After each step the ranks tell each other which samples have ended, and which requests have failed, so that a
request ends in all of them at once. Each has the keys and values of its own rows only, and memory that runs out on one
is no matter of the others.

Where models are divided among the ranks, each forward is one of all of them: before it they agree that there is one,
and a rank that has none left, or no rows, goes through the layers with a token that nobody reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from gradwire_proto.v1 import engine_pb2

from gradwire_server.engine.agreement import Agreement, Failure
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.sampling.jobs import LocalJob

T = TypeVar("T")


class Division:
    """The rows that this process computes of each request."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._divides = agreement, agreement.ranks > 1
        self._serial = itertools.count()

    @property
    def divides(self) -> bool:
        """Whether there are other ranks."""
        return self._divides

    def divide(self, job: LocalJob) -> None:
        """Leave some of a new request's rows to other ranks: whole prompts, where there are as many as ranks."""
        ranks, number = self._agreement.ranks, next(self._serial)
        if not self._divides:
            return
        count, prompts = len(job.limits), len(job.prompts)

        def place(row: int) -> int:
            if job.params.deterministic:
                return 0
            return row // job.params.n if prompts >= ranks else row * ranks // count

        # The number spreads requests of one sample.
        job.own = [row for row in range(count) if (place(row) + number) % ranks == self._agreement.rank]

    def attempt(self, model: SplitModel, step: Callable[[], T]) -> T | Failure:
        """See :meth:`.agreement.Agreement.attempt`; a failure concerns this process alone.

        Args:
            model: The copy of the model that the step computes with.
        """
        agreement = self._agreement
        if not (self._divides and agreement.lock_step):
            return agreement.attempt(lambda: model.compute(step), own=True)

        def with_all() -> T | Failure:
            with model.before_forwards(lambda: agreement.greatest(1)):
                result = agreement.attempt(step, own=True)
            while agreement.greatest(0, result.error if isinstance(result, Failure) else None):
                model.forward_idly()
            return result

        return model.compute(with_all)

    def exchange(self, jobs: Sequence[LocalJob]) -> None:
        """Tell the other ranks what a step has brought to requests, and learn it from them.

        Args:
            jobs: The same requests in every rank.
        """
        if not self._divides:
            return
        told = engine_pb2.EngineSampled()
        for place, job in enumerate(jobs):
            news = job.news(deltas=self._agreement.rank > 0)  # rank 0 answers
            if news is not None:
                news.place = place
                told.jobs.append(news)
        for rank, theirs in enumerate(self._agreement.gathered(told.SerializeToString())):
            for news in engine_pb2.EngineSampled.FromString(theirs).jobs:
                jobs[news.place].learn(news, own=rank == self._agreement.rank)
