"""Choice of the rows that join a batch next, and that leave it when its key-value cache is full.

Room is taken as tokens come, so a batch may run out of it. Rows then leave and are computed again later, with the same
tokens, because their random numbers belong to them (Kwon et al. 2023, arXiv:2309.06180, "recomputation").

API keys come first: the next row is one of the key that holds the least of the cache, and a key that holds more than an
equal part of it gives way to one that would hold no more than that. Within a key, the row with the earliest deadline is
next: the step at which its request arrived plus the tokens that the request may take up to the end of this row. Short
requests so pass long ones, and no row waits for ever, because later requests have later deadlines. The same holds
between keys while there is no room for the row that is next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from gradwire_server.engine.sampling.jobs import LocalJob

QUANTUM = 64
"""Steps after which a row may have to give way to a request of the same key that has no row in progress."""


class Waiting(NamedTuple):
    """A row that waits, ordered by its deadline."""

    deadline: int
    number: int
    job: LocalJob
    row: int


class WaitingRows:
    """The rows that wait to join a batch, by key."""

    def __init__(self) -> None:
        self._of_owner: dict[str, list[Waiting]] = {}
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._of_owner)

    def add(self, job: LocalJob, step: int) -> None:
        """Add all rows of a job that arrives at this step."""
        deadline = step
        for row in job.order():
            deadline += len(job.prompt_of(row)) + int(job.limits[row])
            self._number += 1
            self.put(Waiting(deadline, self._number, job, row))

    def put(self, waiting: Waiting) -> None:
        """Add a row; one that left the batch comes back as it was."""
        heapq.heappush(self._of_owner.setdefault(waiting.job.owner, []), waiting)

    def next(self, held: Callable[[str], float], before: Waiting | None) -> Waiting | None:
        """The next row, given what each key holds of the cache.

        Args:
            before: A row for which there is no room: only those with an earlier deadline may pass it.
        """
        first = [rows[0] for rows in self._of_owner.values() if before is None or rows[0] < before]
        return min(first, key=lambda each: (held(each.job.owner), each), default=None)

    def pop(self, waiting: Waiting) -> None:
        """Remove the row that :meth:`next` has returned."""
        rows = self._of_owner[waiting.job.owner]
        heapq.heappop(rows)
        if not rows:
            del self._of_owner[waiting.job.owner]

    def jobs(self, owner: str | None = None) -> set[LocalJob]:
        """The jobs with rows that wait, of one key or of all."""
        of = self._of_owner.values() if owner is None else [self._of_owner.get(owner, [])]
        return {waiting.job for rows in of for waiting in rows}

    def remove(self, job: LocalJob) -> None:
        """Remove all rows of a job."""
        rows = [waiting for waiting in self._of_owner.pop(job.owner, []) if waiting.job is not job]
        if rows:
            heapq.heapify(rows)
            self._of_owner[job.owner] = rows

    def clear(self) -> None:
        """Remove all rows."""
        self._of_owner.clear()


class Held:
    """The cache that the rows in progress hold.

    Args:
        rows: ``[R]`` the rows.
        tokens: ``[R]`` tokens of cache that each would give back.
        steps: ``[R]`` steps that each has been in progress.
    """

    def __init__(self, rows: Sequence[Waiting], tokens: Sequence[float], steps: Sequence[int]) -> None:
        self._rows, self._tokens, self._steps = rows, tokens, steps
        self._owners = self._sums(_owner)

    def of(self, owner: str) -> float:
        """Tokens of cache that a key holds."""
        return self._owners.get(owner, 0.0)

    def add(self, owner: str, tokens: float) -> None:
        """Count a row of a key that is about to join."""
        self._owners[owner] = self.of(owner) + tokens

    def to_leave(self, missing: float) -> list[int]:
        """Rows to leave, so that the missing tokens of cache become free; one stays, however much it holds.

        They are those of the key that holds most, latest deadline first.
        """
        chosen, _ = self._latest(missing, _owner, above=0.0, count=len(self._rows) - 1)
        return chosen

    def to_give_way(
        self, first: Waiting, needs: float, missing: float, capacity: float, jobs: set[LocalJob]
    ) -> list[int]:
        """Rows that give way to the next row, for which tokens of cache are missing; empty if none have to.

        Args:
            needs: Tokens of cache that the row needs.
            capacity: Tokens of cache.
            jobs: The jobs of its key with rows that wait.
        """
        owner = first.job.owner
        share = capacity / len(self._owners.keys() | {owner})
        if not self.of(owner) or self.of(owner) + needs <= share:
            chosen, enough = self._latest(missing, lambda row: row.job.owner != owner and row.job.owner, above=share)
            if enough:
                return chosen
        own = {row.job for row in self._rows if row.job.owner == owner}
        share /= len(own | jobs)
        if first.job in own or needs > share:
            return []
        chosen, enough = self._latest(
            missing, lambda row: row.job.owner == owner and row.job, above=share, steps=QUANTUM
        )
        return chosen if enough else []

    def _sums(self, group: Callable[[Waiting], Hashable]) -> dict[Hashable, float]:
        sums: dict[Hashable, float] = {}
        for row, tokens in zip(self._rows, self._tokens, strict=True):
            sums[group(row)] = sums.get(group(row), 0.0) + tokens
        return sums

    def _latest(
        self,
        missing: float,
        group: Callable[[Waiting], Hashable],
        *,
        above: float,
        steps: int = 0,
        count: int = 1 << 62,
    ) -> tuple[list[int], bool]:
        """Rows of the groups that hold most, latest deadline first, and whether they give back what is missing.

        Args:
            group: The group of a row; False for a row that stays.
            above: Groups that hold no more than this keep their rows.
            steps: Rows that have been in progress for fewer steps stay.
            count: Maximum rows.
        """
        sums = self._sums(group)
        rows: dict[Hashable, list[int]] = {}
        for place in sorted(range(len(self._rows)), key=lambda place: self._rows[place]):
            of = group(self._rows[place])
            if of is not False and self._steps[place] >= steps:
                rows.setdefault(of, []).append(place)
        chosen: list[int] = []
        while missing > 0 and len(chosen) < count:
            of = max(rows, key=lambda each: sums[each], default=None)
            if of is None or sums[of] <= above:
                break
            place = rows[of].pop()
            if not rows[of]:
                del rows[of]
            chosen.append(place)
            sums[of] -= self._tokens[place]
            missing -= self._tokens[place]
        return chosen, missing <= 0


def _owner(row: Waiting) -> str:
    return row.job.owner
