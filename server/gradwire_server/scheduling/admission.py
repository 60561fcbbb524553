"""Admission of operations: journal, acknowledge and queue them; cancel those that have not started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.crash_points import crash_point
from gradwire_server.errors import ServiceError, shutting_down, unknown_run
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.rows import JournalEntry, identity
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Buffer
from gradwire_server.observability.metrics import Metrics
from gradwire_server.observability.tracing import Tracing
from gradwire_server.scheduling.checks import Checks, pixels_of_batch
from gradwire_server.scheduling.dispatcher import Dispatcher
from gradwire_server.scheduling.operation import (
    JOURNALED,
    OperationState,
    PayloadMemory,
    QueuedOperation,
    cancelled,
    may_begin_early,
    retrieved,
)
from gradwire_server.scheduling.results import Results
from gradwire_server.scheduling.run_queue import RunQueue, reused

log = logging.getLogger(__name__)

TOGETHER_S = 0.05
"""How long an operation waits for its result to be journaled with, if nobody waits for its acknowledgement."""


class Admission:
    """Admission of operations to the queues of their runs.

    Args:
        queues: The queue of each run, by run id.

    Attributes:
        closed: Whether new operations are refused with SHUTTING_DOWN.
    """

    def __init__(
        self,
        queues: Mapping[str, RunQueue],
        journal: Journal,
        checks: Checks,
        dispatcher: Dispatcher,
        results: Results,
        memory: PayloadMemory,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        self._queues, self._journal, self._checks = queues, journal, checks
        self._dispatcher, self._results, self._memory = dispatcher, results, memory
        self._metrics, self._tracing = metrics, tracing
        self._repeating: set[asyncio.Task[None]] = set()
        self.closed = False

    async def load(self, queue: RunQueue) -> None:
        """Queue the operations of a run that the journal holds from before the server started."""
        record = queue.record
        if record.applied_seq >= record.accepted_seq:
            return
        for entry in await self._journal.entries(record.run_id, record.applied_seq, record.accepted_seq):
            if entry.status and not entry.damaged:
                queue.skip(entry.header.seq)
                continue
            operation = self._taken_up(record, entry)
            queue.load(operation)

    def _taken_up(self, record: RunRecord, entry: JournalEntry) -> QueuedOperation:
        header = entry.header
        ack: asyncio.Future[pb.SubmitAck] = asyncio.get_running_loop().create_future()
        ack.set_result(pb.SubmitAck(run_id=record.run_id, seq=header.seq))
        operation = QueuedOperation(
            header,
            entry.identity,
            None if header.payload_bytes else (),
            entry.accepted_at,
            ack,
            refusal=_damaged(header.seq) if entry.damaged else _refusal(header),
            location=entry.location,
            from_journal=True,
            retried=True,
            deaths=entry.deaths,
        )
        operation.trace = self._tracing.operation(header, entry.accepted_at)
        operation.trace.phase("queue")
        return operation

    def submit(
        self,
        header: pb.OperationHeader,
        payload: Sequence[Buffer],
        refusal: pb.Error | None = None,
        *,
        patient: bool = False,
    ) -> asyncio.Future[pb.SubmitAck]:
        """Accept an operation.

        The future resolves once the operation is durable. It fails with a ServiceError if the operation is not
        accepted; its number then stays free.

        Args:
            header: The operation, already checked.
            payload: Its payload, in any number of pieces.
            refusal: The error found by the checks. The operation is accepted all the same, and this becomes its result.
            patient: Whether nobody waits for the acknowledgement. An operation that the engine may begin early then
                waits a little for others to become durable with, such as its own result.
        """
        ack: asyncio.Future[pb.SubmitAck] = asyncio.get_running_loop().create_future()
        ack.add_done_callback(self._answered)
        try:
            if self.closed:
                raise shutting_down()
            if header.run_id not in self._queues:
                raise unknown_run(header.run_id)
            queue = self._queues[header.run_id]
            try:
                queue.check_epoch(header.epoch)
            except ServiceError as fenced:
                if fenced.code != pb.ERROR_CODE_STALE_EPOCH or not 0 < header.seq < queue.next_seq:
                    raise
                self._repeat(self._acknowledge_fenced(queue, header, ack, fenced.with_traceback(None)))
                return ack
            if header.seq < 1:
                raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "numbers begin at 1", field="seq", rule="seq >= 1")
            pixels = 0 if refusal is not None else sum(pixels_of_batch(header, payload))
            operation = QueuedOperation(
                header, identity(header), payload, time.time(), ack, refusal, pixels,
                may_be_early=self._may_be_early(header), patient=patient,
            )  # fmt: skip
            if header.seq < queue.next_seq and header.seq not in queue.pending:
                self._repeat(self._acknowledge_again(queue, operation))
                return ack
            known = queue.offer(operation)
        except ServiceError as error:
            ack.set_exception(error.with_traceback(None))  # which holds this frame, that is `ack`: a cycle
            return ack
        if known is not None:
            known.add_done_callback(lambda done: _copy_ack(done, ack))
            return ack
        if refusal is not None:
            operation.payload = ()
            header.refusal.CopyFrom(refusal)  # so that no later start judges it again
        for admitted in queue.admit():
            self._append(queue, admitted)
        return ack

    def _may_be_early(self, header: pb.OperationHeader) -> bool:
        return self._journal.keep_payloads and may_begin_early(header.operation)

    def _answered(self, ack: asyncio.Future[pb.SubmitAck]) -> None:
        retrieved(ack)
        error = None if ack.cancelled() else ack.exception()
        if isinstance(error, ServiceError):
            self._metrics.refused(error.error)

    def _repeat(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._repeating.add(task)
        task.add_done_callback(self._repeating.discard)

    async def _acknowledge_fenced(
        self, queue: RunQueue, header: pb.OperationHeader, ack: asyncio.Future[pb.SubmitAck], fenced: ServiceError
    ) -> None:
        """Answer an older writer that repeats a submission whose acknowledgement it missed: what was accepted from it
        before it was fenced is acknowledged."""
        pending = queue.pending.get(header.seq)
        if pending is not None and pending.appended is not None:
            await asyncio.wait([pending.appended])
        known = await self._journal.entries(queue.record.run_id, header.seq - 1, header.seq)
        if known and known[0].identity == identity(header) and known[0].header.epoch <= header.epoch:
            ack.set_result(pb.SubmitAck(run_id=header.run_id, seq=header.seq, duplicate=True))
        else:
            ack.set_exception(_trimmed(queue.record, fenced) if not known else fenced)

    async def _acknowledge_again(self, queue: RunQueue, operation: QueuedOperation) -> None:
        known = await self._journal.identity_of(queue.record.run_id, operation.seq)
        if known is None:
            message = f"operation {operation.seq} was carried out and its result released"
            operation.ack.set_exception(ServiceError(pb.ERROR_CODE_RESULT_RELEASED, message))
        elif known != operation.content:
            operation.ack.set_exception(reused(operation.seq))
        else:
            operation.ack.set_result(_ack(operation, duplicate=True))

    def _append(self, queue: RunQueue, operation: QueuedOperation) -> None:
        self._memory.hold(operation)
        queue.usage.incoming_bytes += operation.header.payload_bytes
        operation.trace = self._tracing.operation(operation.header, operation.accepted_at)
        operation.trace.phase("journal")
        operation.appended = appended = self._journal.append(
            operation.header, operation.accepted_at, operation.payload or (),
            within_s=TOGETHER_S if operation.patient and operation.may_be_early and operation.refusal is None else 0.0,
        )  # fmt: skip

        def durable(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            queue.usage.incoming_bytes -= operation.header.payload_bytes
            if error is not None:
                self._memory.let_go(operation)
                if not isinstance(error, ServiceError):
                    log.error("operation %d of %s was not journaled: %s", operation.seq, queue.record.run_id, error)
                    error = ServiceError(
                        pb.ERROR_CODE_STORAGE_FULL, f"operation {operation.seq} could not be journaled; submit it again"
                    )
                operation.trace.end(None)
                queue.refuse(operation, error)
                return
            if not queue.journaled(operation, done.result()):
                return
            crash_point("operation.before_ack")
            self._metrics.accepted(operation.header.operation)
            if queue.sent.get(operation.seq) is not operation:
                operation.trace.phase("queue")
            if operation.location is not None and self._memory.full:
                self._memory.let_go(operation)
            if operation.state is OperationState.CANCELLING:
                self._results.finish(queue, operation, cancelled(operation.seq))
            self._dispatcher.wake(queue)
            if not operation.ack.done():
                operation.ack.set_result(_ack(operation))

        appended.add_done_callback(durable)
        self._dispatcher.wake(queue)  # the engine may start while the operation is being written

    async def cancel(self, queue: RunQueue, seq: int, epoch: int) -> pb.CancelResponse:
        """Cancel an operation, also one that is executed if its kind can be stopped.

        The cancellation of a journaled operation is durable when this returns.

        Args:
            epoch: Epoch of the run's writer, who must still be it; 0 for a caller who is not its writer.

        Raises:
            ServiceError: UNKNOWN_OPERATION for a number that was not submitted, STALE_EPOCH.
        """
        if epoch:
            queue.check_epoch(epoch)
        operation = queue.find(seq)
        if operation is None and (seq < 1 or seq >= queue.next_seq):
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_OPERATION, f"operation {seq} was not submitted", field="seq")
        if operation is None:
            return pb.CancelResponse()
        result = cancelled(seq)
        if operation.is_cancelled:
            return pb.CancelResponse(cancelled=True, error=result.error)
        if not await self._withdrawn(queue, operation):
            self._dispatcher.wake(queue)
            stopped = await self._dispatcher.interrupt(operation) and await queue.settled(seq)
            return pb.CancelResponse(cancelled=stopped)
        stored = self._finish_or_cancel(queue, operation, result)
        self._dispatcher.wake(queue)
        if stored is not None:
            await asyncio.shield(stored)
        return pb.CancelResponse(cancelled=True, error=result.error)

    async def expire(self, queue: RunQueue, seq: int, epoch: int) -> pb.CancelResponse:
        """Fail a queued operation whose deadline has passed, unless the engine has begun it.

        It gets its result in its turn, as results are in order. That it will fail is certain from now on, also after a
        restart, as the engine begins nothing whose deadline has passed.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        queue.check_epoch(epoch)
        operation = queue.find(seq)
        if operation is None or operation.is_cancelled:
            return pb.CancelResponse()
        if operation.deadline > time.monotonic():
            return pb.CancelResponse()
        expires = await self._withdrawn(queue, operation) and not operation.is_cancelled
        error = queue.expire(operation) if expires else None
        self._dispatcher.wake(queue)
        return pb.CancelResponse(cancelled=expires, error=error)

    async def _withdrawn(self, queue: RunQueue, operation: QueuedOperation) -> bool:
        """Withdraw an operation; False if the engine has begun it, or it got its result meanwhile.

        Those behind it are withdrawn before it. They are sent again, knowing what became of it, or aborted.
        """
        with queue.held_back():
            await self._dispatcher.withdraw_behind(queue, operation.seq)
            return await self._dispatcher.withdraw(operation) and queue.find(operation.seq) is operation

    async def discard(self, queue: RunQueue, epoch: int) -> int:
        """Cancel every operation of a parked run that has no result, and let the run go on; return their number.

        The cancellations of journaled operations are durable when this returns.

        Raises:
            ServiceError: UNSUPPORTED for a run that is not parked, STALE_EPOCH.
        """
        queue.check_epoch(epoch)
        if queue.parked is None:
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                f"the run {queue.record.run_id} is not parked: its operations are executed; cancel them one by one",
            )
        with queue.held_back():
            withdrawn = [each for each in reversed(queue.unfinished) if await self._dispatcher.withdraw(each)]
        operations = [each for each in reversed(withdrawn) if queue.find(each.seq) is each]
        stored = [self._finish_or_cancel(queue, each, _discarded(each.seq)) for each in operations]
        self._dispatcher.parking.release(queue)
        await asyncio.gather(*(asyncio.shield(each) for each in stored if each is not None))
        log.warning("operations of the parked run %s that were discarded: %d", queue.record.run_id, len(operations))
        return len(operations)

    def _finish_or_cancel(
        self, queue: RunQueue, operation: QueuedOperation, result: pb.OperationResult
    ) -> asyncio.Future[None] | None:
        if operation.state in JOURNALED:
            return self._results.finish(queue, operation, result)
        if operation.state is not OperationState.CANCELLING:
            queue.cancel(operation)
        return None


def _trimmed(record: RunRecord, fenced: ServiceError) -> ServiceError:
    """The error for an older writer that repeats a submission of which the journal knows nothing any more."""
    return ServiceError(
        fenced.code,
        f"{fenced}. Whether this operation was accepted from here cannot be told any more: a checkpoint contains the"
        f" operations up to {record.trimmed_seq}, and the other writer fetched their results. Compare what you"
        " submitted with the run's info().step and history() before you submit anything again",
    )


def _discarded(seq: int) -> pb.OperationResult:
    result = cancelled(seq)
    result.error.message = f"operation {seq} was discarded by the run's owner while the run was parked"
    return result


def _ack(operation: QueuedOperation, duplicate: bool = False) -> pb.SubmitAck:
    return pb.SubmitAck(run_id=operation.header.run_id, seq=operation.seq, duplicate=duplicate)


def _refusal(header: pb.OperationHeader) -> pb.Error | None:
    return header.refusal if header.HasField("refusal") else None


def _damaged(seq: int) -> pb.Error:
    message = f"operation {seq} was damaged on the server's disk before it was carried out; submit it again"
    return pb.Error(code=pb.ERROR_CODE_PAYLOAD_CORRUPT, message=message)


def _copy_ack(done: asyncio.Future[pb.SubmitAck], ack: asyncio.Future[pb.SubmitAck]) -> None:
    if ack.done():
        return
    error = done.exception()
    if error is not None:
        ack.set_exception(error)
        return
    again = pb.SubmitAck(duplicate=True)
    again.MergeFrom(done.result())
    again.duplicate = True
    ack.set_result(again)
