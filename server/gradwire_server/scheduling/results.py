"""Results of operations: store them, stream them to readers, and release them."""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.crash_points import crash_point
from gradwire_server.errors import ServiceError, parked_error
from gradwire_server.journal.history import history_point
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.rows import RunMarks, StoredResult, lost_result
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Buffer
from gradwire_server.journal.usage import Usage
from gradwire_server.observability.metrics import Metrics
from gradwire_server.scheduling.auto_checkpoint import AutoCheckpoint
from gradwire_server.scheduling.operation import (
    OperationState,
    PayloadMemory,
    QueuedOperation,
    apply_result,
    ended,
    is_recorded_with,
    is_replayed_with,
)
from gradwire_server.scheduling.run_queue import RunQueue

log = logging.getLogger(__name__)

STORE_AGAIN_S = 1.0
REMIND_S = 60.0
TOGETHER_S = 0.005
"""How long a result waits for those of the operations behind it that are in the engine, to be journaled with them."""


class _Waiting:
    """Results that could not be stored and are tried again; logged when that begins, once a minute, and when it ends.

    A full disk fails every result once a second, and a line for each would fill the disk that the log is on.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._told_s = 0.0

    def failed(self, stored: asyncio.Future[None], seq: int, run_id: str, error: BaseException) -> None:
        now_s = stored.get_loop().time()
        begins = not self._waiting
        self._waiting.add(stored)
        if begins:
            log.error(
                "the result of operation %d of %s is not stored yet, and is tried again every %g s: %s",
                seq, run_id, STORE_AGAIN_S, error,
            )  # fmt: skip
        elif now_s < self._told_s + REMIND_S:
            return
        else:
            log.error("%d results are not stored yet, and are tried again: %s", len(self._waiting), error)
        self._told_s = now_s

    def ended(self, stored: asyncio.Future[None]) -> None:
        if stored in self._waiting:
            self._waiting.remove(stored)
            if not self._waiting:
                log.warning("the results that waited for the disk are stored")


class Results:
    """Store of operations' results, which serves them to readers."""

    def __init__(
        self,
        journal: Journal,
        auto_checkpoint: AutoCheckpoint,
        memory: PayloadMemory,
        metrics: Metrics,
        feed: RunFeed,
        usage: Usage,
    ) -> None:
        self._usage = usage
        self._journal, self._auto_checkpoint, self._memory, self._metrics = journal, auto_checkpoint, memory, metrics
        self._feed = feed
        self._storing: set[asyncio.Future[None]] = set()
        self._waiting = _Waiting()

    def finish(
        self,
        queue: RunQueue,
        operation: QueuedOperation,
        result: pb.OperationResult,
        payload: Buffer = b"",
        *,
        within_s: float = 0.0,
    ) -> asyncio.Future[None]:
        """Apply a result to the queue now, and store it.

        The future resolves once the result is durable; readers see it from then on.

        Args:
            within_s: Seconds for which it may wait for another write to commit with.
        """
        saved = operation.row.gives_checkpoint and result.status == pb.STATUS_SUCCEEDED
        checkpoint = result.checkpoint if saved else None
        _address(result, operation, payload)
        marks = self._apply(queue, operation, result)
        run_id, rewound_epoch = queue.record.run_id, queue.record.rewound_epoch
        kept = _kept(queue.record, operation, result)
        point = history_point(run_id, operation.header.operation, result, marks.step)
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()
        self._storing.add(stored)

        def store() -> None:
            if queue.record.rewound_epoch != rewound_epoch:
                end()  # after a rewind, another operation may have this number
                return
            put = self._journal.put_result(
                run_id, result, [payload], marks, saved=saved, kept=kept, point=point, within_s=within_s
            )
            put.add_done_callback(durable)

        def durable(put: asyncio.Future[None]) -> None:
            error = put.exception()
            if error is not None:  # retry, so that no result is lost while the disk is full
                self._waiting.failed(stored, operation.seq, run_id, error)
                loop.call_later(STORE_AGAIN_S, store)
                return
            crash_point("result.after_commit")
            operation.trace.end(result)
            if queue.record.rewound_epoch == rewound_epoch:
                self._feed.measured(run_id, point)
                queue.stored(StoredResult(result, payload), checkpoint)
                if checkpoint is not None and not checkpoint.weights_only:
                    self._keep(self._saved(queue.record, checkpoint))
            end()

        def end() -> None:
            self._storing.discard(stored)
            self._waiting.ended(stored)
            stored.set_result(None)

        store()
        return stored

    async def answered(
        self, queue: RunQueue, operation: QueuedOperation, result: pb.OperationResult, payload: Buffer
    ) -> bool:
        """Give an operation that the engine has answered its result; False if it was removed meanwhile."""
        if operation.state is OperationState.EARLY and operation.appended is not None:
            together = operation.patient and queue.is_first(operation)
            if together and await self._finish_with_operation(queue, operation, result, payload):
                return True
            await ended(operation.appended)
        if operation.state is not OperationState.SENT:
            return False
        self.finish(queue, operation, result, payload, within_s=TOGETHER_S if len(queue.sent) > 1 else 0.0)
        return True

    async def _finish_with_operation(
        self, queue: RunQueue, operation: QueuedOperation, result: pb.OperationResult, payload: Buffer = b""
    ) -> bool:
        """Store a result together with its operation, which is being journaled, and apply it to the queue then.

        The operation must be the run's first one without a result.

        Returns:
            Whether the operation is finished. If not, it is journaled and :meth:`finish` stores its result, or it was
            not journaled and has none.
        """
        _address(result, operation, payload)
        run_id, kept = queue.record.run_id, _kept(queue.record, operation, result)
        marks = apply_result(copy.copy(queue.record), operation, result)
        point = history_point(run_id, operation.header.operation, result, marks.step)
        put = self._journal.put_result(run_id, result, [payload], marks, kept=kept, point=point, with_operation=True)
        await ended(put)
        if put.exception() is not None or operation.state is not OperationState.SENT:
            return False
        crash_point("result.after_commit")
        self._apply(queue, operation, result)
        operation.trace.end(result)
        self._feed.measured(run_id, point)
        queue.stored(StoredResult(result, payload), None)
        return True

    def _apply(self, queue: RunQueue, operation: QueuedOperation, result: pb.OperationResult) -> RunMarks:
        self._memory.let_go(operation)
        self._observe(queue.record, operation, result)
        queue.log.finished(operation, result)
        return queue.finish(operation, result)

    def _observe(self, record: RunRecord, operation: QueuedOperation, result: pb.OperationResult) -> None:
        operation.trace.phase("result")
        self._metrics.finished(record.run_id, operation.header.operation, result)
        self._usage.count(record.owner, record, result)
        if log.isEnabledFor(logging.INFO):
            about = {"run_id": record.run_id, "seq": operation.seq, "kind": operation.kind}
            times = {"queue_s": result.timings.queue_s, "engine_s": result.timings.engine_s}
            how = pb.ErrorCode.Name(result.error.code) if result.HasField("error") else "done"
            log.info("%s: %s", operation.kind, how.removeprefix("ERROR_CODE_").lower(), extra=about | times)

    async def _saved(self, record: RunRecord, checkpoint: pb.Checkpoint) -> None:
        try:
            await self._auto_checkpoint.saved(record, checkpoint)
        except Exception as error:  # the next checkpoint trims the journal again
            log.error("the journal of %s was not trimmed: %s", record.run_id, error)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def settle(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` seconds until every finished result is on disk."""
        if self._storing:
            await asyncio.wait(self._storing, timeout=grace_s)

    async def results(
        self,
        queue: RunQueue,
        from_seq: int,
        turn: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> AsyncGenerator[list[StoredResult]]:
        """Yield results in order of number as they become durable, without end; each list holds at least one.

        Args:
            from_seq: First number to yield; 0 for the first that is not released.
            turn: Waits for the reader's turn to read from the disk.

        Raises:
            ServiceError: RESULT_RELEASED; REWOUND, UNKNOWN_RUN, SHUTTING_DOWN or RUN_PARKED if the run is rewound,
                closed or parked while it is read.
        """
        record = queue.record
        seq, rewound_epoch = from_seq or record.released_seq + 1, record.rewound_epoch
        while True:
            changed = queue.changed
            if seq <= record.released_seq:
                raise ServiceError(
                    pb.ERROR_CODE_RESULT_RELEASED,
                    f"results up to {record.released_seq} were released; ask from {record.released_seq + 1}",
                    field="from_seq",
                )
            if record.rewound_epoch != rewound_epoch:
                raise queue.rewound()
            if seq <= record.applied_seq:
                stored = queue.recent(seq)
                if not stored:
                    async with turn():
                        stored = await self._journal.results(record.run_id, seq, record.applied_seq)
                if seq <= record.released_seq or record.rewound_epoch != rewound_epoch:
                    continue  # released or rewound during the read
                whole = list[StoredResult]()
                for result in stored or [lost_result(seq)]:
                    whole += [lost_result(missing) for missing in range(seq, result.header.seq)]
                    whole.append(result)
                    seq = result.header.seq + 1
                yield whole
                continue
            if queue.closed is not None:
                raise queue.closed
            if queue.parked is not None:
                raise parked_error(record.run_id, queue.parked.error)
            await changed.wait()

    async def release(self, queue: RunQueue, up_to_seq: int) -> None:
        """Delete results up to a number, at most those that are durable."""
        record = queue.record
        up_to_seq = min(up_to_seq, record.applied_seq)
        if up_to_seq > record.released_seq:
            queue.released(up_to_seq)
            await self._journal.release(record.run_id, up_to_seq)


def _kept(run: RunRecord, operation: QueuedOperation, result: pb.OperationResult) -> journal_pb2.Kept.ValueType:
    """Why an operation's batch and outcome are kept, if they are."""
    about = operation.header.operation, result.status
    if is_replayed_with(*about):
        return journal_pb2.KEPT_REPLAYED
    recorded = run.config.keep_journal and is_recorded_with(*about)
    return journal_pb2.KEPT_RECORDED if recorded else journal_pb2.KEPT_NOT


def _address(result: pb.OperationResult, operation: QueuedOperation, payload: Buffer) -> None:
    """Note in a result whose it is."""
    result.seq, result.epoch, result.payload_bytes = operation.seq, operation.header.epoch, len(payload)


KEPT_POINTS = 4096
KEPT_GONE = 1024


@dataclass(frozen=True)
class Changes:
    """Changes after a revision.

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
        """The changes after a revision; None if that is too long ago.

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
