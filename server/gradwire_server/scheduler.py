"""From accepted operations to stored results: order within a run, turns between runs, one engine.

Everything here runs on the front's event loop, in tasks of the server: an operation does not end with the RPC
that brought it. The engine carries out one request at a time; a second one waits in its pipe, so that reading it
overlaps with computing. The two are of different runs, because whether an operation may run depends on the one
before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.carrier import Carrier
from gradwire_server.checks import check
from gradwire_server.config import Limits
from gradwire_server.engine_process import Engine
from gradwire_server.errors import RpcError, shutting_down, unknown_run
from gradwire_server.journal import Journal, StoredResult, identity
from gradwire_server.run_queue import Pending, RunQueue, reused
from gradwire_server.runs import RunRecord, Runs
from gradwire_server.segments import Buffer

log = logging.getLogger(__name__)

PIPE = 2
STORE_AGAIN_S = 1.0
COLLECT_EVERY_S = 30.0


class Scheduler:
    """Takes operations in, has them carried out, and hands their results out."""

    def __init__(
        self, engine: Engine, journal: Journal, runs: Runs, limits: Limits, payload_memory_bytes: int = 256 << 20
    ) -> None:
        self._journal, self._runs, self._limits = journal, runs, limits
        self._carrier = Carrier(engine, journal)
        self._payload_memory, self._held_bytes = payload_memory_bytes, 0
        self._queues: dict[str, RunQueue] = {}
        self._turns: deque[RunQueue] = deque()
        self._work = asyncio.Event()
        self._slots = asyncio.Semaphore(PIPE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._carrying: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._draining = False
        self._garbage = False

    async def start(self, records: Sequence[RunRecord]) -> None:
        """Takes the runs of the state folder up where they were left, and begins to work."""
        for record in records:
            queue = self._queues[record.run_id] = RunQueue(record, self._limits)
            if not self._journal.keep_payloads:
                await self._carrier.rewind_if_lossy(queue, queued_too=True)
            await self._load_pending(queue)
        self._loops = [asyncio.create_task(self._dispatch()), asyncio.create_task(self._collect())]
        for queue in self._queues.values():
            self._wake(queue)

    async def _load_pending(self, queue: RunQueue) -> None:
        record = queue.record
        for entry in await self._journal.entries(record.run_id, record.applied_seq, record.accepted_seq):
            if entry.status:
                queue.skip(entry.header.seq)
                continue
            ack: asyncio.Future[pb.SubmitAck] = asyncio.get_running_loop().create_future()
            ack.set_result(pb.SubmitAck(run_id=record.run_id, seq=entry.header.seq))
            queue.pending[entry.header.seq] = Pending(
                entry.header, entry.identity, None if entry.header.payload_bytes else (), entry.accepted_at, ack,
                refusal=check(entry.header, self._limits), location=entry.location, durable=True, retried=True,
                deaths=entry.deaths,
            )  # fmt: skip
            queue.queued_bytes += entry.header.payload_bytes

    async def drain(self, grace_s: float) -> int:
        """Accepts no more, lets what is being carried out finish; gives how many operations are left queued."""
        self._draining = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=grace_s)
        for task in self._carrying:
            task.cancel()
        left = sum(len(queue.pending) for queue in self._queues.values())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for queue in self._queues.values():
            queue.close(shutting_down())
        return left

    # ---- runs ----

    async def create(self, record: RunRecord) -> None:
        """Makes a run in the engine; durable before it returns.

        Raises:
            RpcError: what the engine has against it. Nothing is left of the run.
        """
        queue = RunQueue(record, self._limits)
        try:
            await self._runs.insert(record)
            created = await self._carrier.create(queue)
            await self._runs.finish(record, created.num_trainable_parameters, created.step)
        except BaseException:
            await self._runs.delete(record)
            raise
        self._queues[record.run_id] = queue

    async def delete(self, record: RunRecord) -> None:
        queue = self._queues.pop(record.run_id)
        queue.close(unknown_run(record.run_id))
        for operation in queue.pending.values():
            self._let_go(operation)
        await self._runs.delete(record)
        self._garbage = True
        await self._carrier.drop(record.run_id)

    async def open(self, record: RunRecord, takeover: bool, writer: str) -> int:
        epoch = await self._runs.open(record, takeover, writer)
        self._queue(record.run_id).fence()
        return epoch

    async def delete_checkpoint(self, record: RunRecord, name: str) -> None:
        await self._runs.delete_checkpoint(record, name)
        self._trim(record)

    def _queue(self, run_id: str) -> RunQueue:
        if run_id not in self._queues:
            raise unknown_run(run_id)
        return self._queues[run_id]

    # ---- coming in ----

    def submit(
        self, header: pb.OperationHeader, payload: Sequence[Buffer], refusal: pb.Error | None = None
    ) -> asyncio.Future[pb.SubmitAck]:
        """Takes an operation over. The future is done once it is durable, or refused without using its number up.

        Args:
            header: checked already; `refusal` is what is wrong with the operation itself, which becomes its result.
        """
        loop = asyncio.get_running_loop()
        ack: asyncio.Future[pb.SubmitAck] = loop.create_future()
        ack.add_done_callback(_retrieved)
        try:
            if self._draining:
                raise shutting_down()
            queue = self._queue(header.run_id)
            queue.check_epoch(header.epoch)
            if header.seq < 1:
                raise RpcError(pb.ERROR_CODE_INVALID_ARGUMENT, "numbers begin at 1", field="seq", rule="seq >= 1")
            operation = Pending(header, identity(header), payload, time.time(), ack, refusal)
            if header.seq < queue.next_seq and header.seq not in queue.pending:
                self._keep(self._acknowledge_again(queue, operation))
                return ack
            known = queue.offer(operation)
        except RpcError as error:
            ack.set_exception(error)
            return ack
        if known is not None:
            known.add_done_callback(lambda done: _copy_ack(done, ack))
            return ack
        if refusal is not None:
            operation.payload = ()
        for admitted in queue.admit():
            self._append(queue, admitted)
        return ack

    async def _acknowledge_again(self, queue: RunQueue, operation: Pending) -> None:
        known = await self._journal.identity_of(queue.record.run_id, operation.seq)
        if known is None:
            operation.ack.set_exception(
                RpcError(
                    pb.ERROR_CODE_RESULT_RELEASED, f"operation {operation.seq} was carried out and its result released"
                )
            )
        elif known != operation.content:
            operation.ack.set_exception(reused(operation.seq))
        else:
            operation.ack.set_result(_ack(operation, duplicate=True))

    def _append(self, queue: RunQueue, operation: Pending) -> None:
        self._held_bytes += operation.header.payload_bytes
        future = self._journal.append(
            operation.header, operation.content, operation.accepted_at, operation.payload or ()
        )

        def durable(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                self._held_bytes -= operation.header.payload_bytes
                if not isinstance(error, RpcError):
                    log.error("operation %d of %s was not journaled: %s", operation.seq, queue.record.run_id, error)
                    error = RpcError(
                        pb.ERROR_CODE_STORAGE_FULL, f"operation {operation.seq} could not be journaled; submit it again"
                    )
                queue.refuse(operation, error)
                return
            if queue.pending.get(operation.seq) is not operation:
                return  # a rewind, or a deletion of the run, was quicker
            operation.location, operation.durable = done.result(), True
            queue.record.accepted_seq = max(queue.record.accepted_seq, operation.seq)
            if operation.location is not None and self._held_bytes > self._payload_memory:
                self._let_go(operation)
            if not operation.ack.done():
                operation.ack.set_result(_ack(operation))
            if operation.cancelled:
                self._finish(queue, operation, _cancelled(operation.seq))
            self._wake(queue)

        future.add_done_callback(durable)

    def _let_go(self, operation: Pending) -> None:
        """Drops a payload from memory; it is read from the journal when it is needed."""
        if operation.payload is not None and operation.header.payload_bytes:
            self._held_bytes -= operation.header.payload_bytes
            operation.payload = None

    async def cancel(self, record: RunRecord, seq: int, epoch: int) -> bool:
        """Cancels an operation that has not started; durable before it returns.

        Raises:
            RpcError: UNKNOWN_OPERATION for a number that was not submitted, STALE_EPOCH.
        """
        queue = self._queue(record.run_id)
        queue.check_epoch(epoch)
        waiting = queue.window.get(seq)
        if waiting is not None:
            waiting.cancelled = True
            return True
        if seq < 1 or seq >= queue.next_seq:
            raise RpcError(pb.ERROR_CODE_UNKNOWN_OPERATION, f"operation {seq} was not submitted", field="seq")
        operation = queue.pending.get(seq)
        if operation is None or operation is queue.running or operation.cancelled:
            return operation is not None and operation.cancelled
        operation.cancelled = True
        if operation.durable:
            stored = self._finish(queue, operation, _cancelled(seq))
            self._wake(queue)
            await asyncio.shield(stored)
        return True

    # ---- carrying out ----

    def _wake(self, queue: RunQueue) -> None:
        """Gives the run a turn if it has something for the engine, after what needs no engine."""
        while (head := queue.head) is not None:
            verdict = queue.verdict(head)
            if verdict is None:
                if queue not in self._turns:
                    self._turns.append(queue)
                    self._work.set()
                return
            self._finish(queue, head, verdict)

    async def _dispatch(self) -> None:
        while True:
            await self._slots.acquire()
            while not self._turns:
                self._work.clear()
                await self._work.wait()
            queue = self._turns.popleft()
            head = queue.head
            if head is None or queue.closed is not None:
                self._slots.release()
                continue
            queue.running = head
            task = asyncio.create_task(self._carry_out(queue, head))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry_out(self, queue: RunQueue, operation: Pending) -> None:
        try:
            outcome = await self._carrier.carry_out(queue, operation)
        finally:
            queue.running = None
            self._slots.release()
        if outcome is not None and operation.seq in queue.pending and queue.record.run_id in self._queues:
            result, payload = outcome
            self._finish(queue, operation, result, payload)
        self._wake(queue)

    # ---- going out ----

    def _finish(
        self, queue: RunQueue, operation: Pending, result: pb.OperationResult, payload: Buffer = b""
    ) -> asyncio.Task[None]:
        """Takes a result into account at once; it is seen by others once it is durable."""
        if operation.payload is not None:
            self._held_bytes -= operation.header.payload_bytes
        checkpoint = None
        if operation.kind == "save_checkpoint" and result.status == pb.STATUS_SUCCEEDED:
            checkpoint = result.checkpoint
        result.seq, result.payload_bytes = operation.seq, len(payload)
        marks = queue.finish(operation, result)
        run_id, rewound_epoch = queue.record.run_id, queue.record.rewound_epoch
        future = self._journal.put_result(run_id, result, [payload], marks, checkpoint)

        async def store() -> None:
            stored = future
            while True:
                try:
                    await stored
                    break
                except Exception as error:  # a result must not be lost to a disk that is full for a while
                    log.error("the result of operation %d of %s is not stored yet: %s", operation.seq, run_id, error)
                    await asyncio.sleep(STORE_AGAIN_S)
                stored = self._journal.put_result(run_id, result, [payload], marks, checkpoint)
            if queue.record.rewound_epoch != rewound_epoch:
                return
            if checkpoint is not None:
                queue.record.checkpoints[checkpoint.name] = checkpoint
                self._trim(queue.record)
            queue.stored(StoredResult(result, payload))

        return self._keep(store())

    async def results(self, record: RunRecord, from_seq: int) -> AsyncIterator[StoredResult]:
        """Results in order of number, as they come, without end.

        Raises:
            RpcError: RESULT_RELEASED; REWOUND, UNKNOWN_RUN or SHUTTING_DOWN when the run ends under the reader.
        """
        queue = self._queue(record.run_id)
        seq, rewound_epoch = from_seq or record.released_seq + 1, record.rewound_epoch
        while True:
            changed = queue.changed
            if seq <= record.released_seq:
                raise RpcError(
                    pb.ERROR_CODE_RESULT_RELEASED,
                    f"results up to {record.released_seq} were released; ask from {record.released_seq + 1}",
                    field="from_seq",
                )
            if record.rewound_epoch != rewound_epoch:
                raise queue.rewound()
            if seq <= record.applied_seq:
                recent = queue.recent(seq)
                found = [recent] if recent else await self._journal.results(record.run_id, seq, record.applied_seq)
                for result in found:
                    yield result
                    seq = result.header.seq + 1
                if found:
                    continue
            if queue.closed is not None:
                raise queue.closed
            await changed.wait()

    async def release(self, record: RunRecord, up_to_seq: int) -> None:
        """Forgets results; numbers without one are left alone."""
        up_to_seq = min(up_to_seq, record.applied_seq)
        if up_to_seq > record.released_seq:
            self._queue(record.run_id).released(up_to_seq)
            await self._journal.release(record.run_id, up_to_seq)
            self._garbage = True

    # ---- growing and shrinking ----

    def _trim(self, record: RunRecord) -> None:
        if record.checkpoints:
            self._keep(self._trim_now(record.run_id, min(saved.seq for saved in record.checkpoints.values())))

    async def _trim_now(self, run_id: str, up_to_seq: int) -> None:
        try:
            await self._journal.trim(run_id, up_to_seq)
            self._garbage = True
        except Exception as error:  # collecting is for later, if not for now
            log.error("the journal of %s was not trimmed: %s", run_id, error)

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            if self._garbage:
                self._garbage = False
                try:
                    await self._journal.collect()
                except Exception as error:  # as above
                    log.error("old segments were not deleted: %s", error)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _ack(operation: Pending, duplicate: bool = False) -> pb.SubmitAck:
    return pb.SubmitAck(run_id=operation.header.run_id, seq=operation.seq, duplicate=duplicate)


def _cancelled(seq: int) -> pb.OperationResult:
    error = pb.Error(code=pb.ERROR_CODE_CANCELLED, message=f"operation {seq} was cancelled before it started")
    return pb.OperationResult(seq=seq, status=pb.STATUS_CANCELLED, error=error)


def _retrieved(ack: asyncio.Future[Any]) -> None:
    """Whoever waited may be gone: an error that nobody fetches is no fault."""
    if not ack.cancelled():
        ack.exception()


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
