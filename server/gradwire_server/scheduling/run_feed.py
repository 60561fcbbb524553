"""What has changed in which run since when: one sequence of revisions for every run, for readers that watch them all.

It is in memory. A reader whose place is too far back, or from before a start of the server, begins again with all runs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import ServiceError

KEPT_POINTS = 4096
KEPT_GONE = 1024


@dataclass(frozen=True)
class Changes:
    """What came after a revision.

    Attributes:
        revision: The newest revision among them.
        run_ids: Runs that changed, and are there.
        gone: Runs that are gone for somebody: id, and the names of the keys that could read them.
        points: New points, with the id of the run that they are of.
        job_owners: Names of the keys whose jobs changed.
    """

    revision: int
    run_ids: Collection[str]
    gone: Collection[tuple[str, Collection[str]]]
    points: Collection[tuple[str, pb.HistoryPoint]]
    job_owners: Collection[str]


class RunFeed:
    """The newest changes of all runs.

    Attributes:
        revision: Number of the newest change.
    """

    def __init__(self) -> None:
        self._life = secrets.token_hex(6)
        self.revision = self._floor = 0
        self._runs: OrderedDict[str, int] = OrderedDict()  # run id -> its newest change, oldest change first
        self._gone: deque[tuple[int, str, Collection[str]]] = deque()
        self._points: deque[tuple[int, str, pb.HistoryPoint]] = deque()
        self._job_owners: dict[str, int] = {}  # name of a key -> the newest change of a job of it
        self._changed = asyncio.Event()
        self._closed: ServiceError | None = None

    def touch(self, run_id: str) -> None:
        """Note that a run is not as it was."""
        self.revision += 1
        self._runs[run_id] = self.revision
        self._runs.move_to_end(run_id)
        self._notify()

    def measured(self, run_id: str, point: pb.HistoryPoint | None) -> None:
        """Note a point of a run's record."""
        if point is not None:
            self.revision += 1
            self._points.append((self.revision, run_id, point))
            if len(self._points) > KEPT_POINTS:
                self._floor = max(self._floor, self._points.popleft()[0])
            self._notify()

    def gone(self, run_id: str, names: Collection[str], *, deleted: bool) -> None:
        """Note that the keys with these names cannot read a run any more."""
        self.revision += 1
        self._gone.append((self.revision, run_id, names))
        if deleted:
            self._runs.pop(run_id, None)
        if len(self._gone) > KEPT_GONE:
            self._floor = max(self._floor, self._gone.popleft()[0])
        self._notify()

    def job_changed(self, owner: str) -> None:
        """Note that a job of a key is not as it was."""
        self.revision += 1
        self._job_owners[owner] = self.revision
        self._notify()

    def close(self, reason: ServiceError) -> None:
        """End every reader with this error."""
        self._closed = reason
        self._notify()

    def cursor(self, revision: int) -> str:
        """A place that a reader can come back to."""
        return f"{self._life}.{revision}"

    def revision_at(self, cursor: str) -> int | None:
        """The revision at a cursor; None if it is unknown, or too old to go on from."""
        life, _, number = cursor.partition(".")
        if life != self._life or not number.isdecimal() or not self._floor <= int(number) <= self.revision:
            return None
        return int(number)

    def since(self, revision: int) -> Changes | None:
        """What came after a revision; None if that is too long ago.

        Raises:
            ServiceError: The feed is closed.
        """
        if self._closed is not None:
            raise self._closed
        if revision < self._floor:
            return None
        run_ids = []
        for run_id, changed in reversed(self._runs.items()):
            if changed <= revision:
                break
            run_ids.append(run_id)
        gone = []
        for at, run_id, names in reversed(self._gone):
            if at <= revision:
                break
            gone.append((run_id, names))
        points = []
        for at, run_id, point in reversed(self._points):
            if at <= revision:
                break
            points.append((run_id, point))
        owners = [owner for owner, changed in self._job_owners.items() if changed > revision]
        return Changes(self.revision, run_ids[::-1], gone, points[::-1], owners)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Event set at the next change; take it before :meth:`since`, or you can miss a change."""
        return self._changed
