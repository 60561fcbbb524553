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
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.carrier import Carrier
from gradwire_server.checks import check
from gradwire_server.config import ServerConfig
from gradwire_server.crash import crash_point
from gradwire_server.engine_process import Engine
from gradwire_server.errors import RpcError, shutting_down, unknown_run
from gradwire_server.journal import Journal, StoredResult, identity, lost_result
from gradwire_server.keeper import Keeper, in_use
from gradwire_server.keys import Quota
from gradwire_server.observability import logs
from gradwire_server.observability.metrics import Backlog, Metrics
from gradwire_server.observability.tracing import Tracing
from gradwire_server.quotas import Usage, check_runs
from gradwire_server.run_queue import Pending, RunQueue, repeated, reused
from gradwire_server.runs import RunRecord, Runs
from gradwire_server.segments import Buffer
from gradwire_server.turns import Turns

log = logging.getLogger(__name__)

STORE_AGAIN_S = 1.0
COLLECT_EVERY_S = 30.0


class Scheduler:
    """Takes operations in, has them carried out, and hands their results out."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        runs: Runs,
        config: ServerConfig,
        quota_of: Callable[[str], Quota] = lambda _: Quota(),
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._metrics, self._tracing = metrics or Metrics(), tracing or Tracing()
        self._engine, self._quota_of = engine, quota_of
        self._journal, self._runs, self._limits = journal, runs, config.limits
        self._carrier = Carrier(engine, journal, self._metrics)
        self._keeper = Keeper(engine, journal, runs, config.checkpoint_every_steps, config.checkpoint_every_bytes)
        self._payload_memory, self._held_bytes = config.payload_memory_bytes, 0
        self._result_retention_s = config.result_retention_s
        self._queues: dict[str, RunQueue] = {}
        self._turns: Turns[RunQueue | asyncio.Future[None]] = Turns()
        self._at_engine = 0
        self._usages: dict[str, Usage] = {}
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._carrying: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._draining = False

    async def start(self, records: Sequence[RunRecord]) -> None:
        """Takes the runs of the state folder up where they were left, and begins to work."""
        await self._keeper.start(records)
        for record in records:
            queue = self._queues[record.run_id] = self._new_queue(record)
            if not self._journal.keep_payloads:
                await self._carrier.rewind_if_lossy(queue, queued_too=True)
            await self._load_pending(queue)
        self._loops = [asyncio.create_task(self._dispatch()), asyncio.create_task(self._collect())]
        for queue in self._queues.values():
            self._wake(queue)

    async def _load_pending(self, queue: RunQueue) -> None:
        record = queue.record
        for entry in await self._journal.entries(record.run_id, record.applied_seq, record.accepted_seq):
            if entry.status and not entry.damaged:
                queue.skip(entry.header.seq)
                continue
            ack: asyncio.Future[pb.SubmitAck] = asyncio.get_running_loop().create_future()
            ack.set_result(pb.SubmitAck(run_id=record.run_id, seq=entry.header.seq))
            refusal = _damaged(entry.header.seq) if entry.damaged else self.refusal(record, entry.header)
            queue.pending[entry.header.seq] = Pending(
                entry.header, entry.identity, None if entry.header.payload_bytes else (), entry.accepted_at, ack,
                refusal=refusal, location=entry.location, durable=True, retried=True,
                deaths=entry.deaths,
            )  # fmt: skip
            operation = queue.pending[entry.header.seq]
            operation.trace = self._tracing.operation(entry.header, entry.accepted_at)
            operation.trace.phase("queue")
            queue.hold(operation)

    async def drain(self, grace_s: float) -> dict[str, int]:
        """Accepts no more, lets what is being carried out finish; gives how many operations each run has left."""
        self._draining = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        while self._turns:
            waiting = self._turns.pop()
            if isinstance(waiting, asyncio.Future) and not waiting.done():
                waiting.set_exception(shutting_down())
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=grace_s)
        for task in self._carrying:
            task.cancel()
        left = {run_id: len(queue.pending) for run_id, queue in self._queues.items() if queue.pending}
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
        queue = self._new_queue(record)
        try:
            check_runs(self._runs.owned(record.owner), self._quota_of(record.owner), self._limits)
            await self._runs.insert(record)
            await self._turn(record.owner)
            try:
                created = await self._carrier.create(queue)
            finally:
                self._give_back()
            await self._runs.finish(record, created.num_trainable_parameters, created.step)
        except BaseException:
            await self._runs.delete(record)
            raise
        self._queues[record.run_id] = queue

    async def delete(self, record: RunRecord) -> None:
        """
        Raises:
            RpcError: UNSUPPORTED when another run could not be restored without a checkpoint of this one.
        """
        used = await self._journal.user_of(record.run_id)
        if used is not None:
            raise in_use(*used)
        queue = self._queues.pop(record.run_id, None)
        if queue is None:
            raise unknown_run(record.run_id)  # another call was quicker
        queue.close(unknown_run(record.run_id))
        for operation in queue.pending.values():
            self._let_go(operation)
        queue.empty()
        await self._runs.delete(record)
        self._metrics.forget(record.run_id)
        await self._carrier.drop(record.run_id)

    async def open(self, record: RunRecord, takeover: bool, writer: str) -> int:
        epoch = await self._runs.open(record, takeover, writer)
        self._queue(record.run_id).fence()
        return epoch

    async def delete_checkpoint(self, record: RunRecord, name: str) -> None:
        await self._keeper.check_deletable(record, name)
        await self._runs.delete_checkpoint(record, name)

    def refusal(self, record: RunRecord, header: pb.OperationHeader) -> pb.Error | None:
        """What is wrong with an operation, as far as it can be seen before any model sees it."""
        return check(header, self._limits) or self._runs.check_uses(record, header.operation)

    def usage(self, owner: str) -> Usage:
        """What a key's runs hold."""
        return self._usages.setdefault(owner, Usage(owner, self._limits, self._quota_of))

    def _new_queue(self, record: RunRecord) -> RunQueue:
        return RunQueue(record, self._limits, self.usage(record.owner))

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
        ack.add_done_callback(self._answered)
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

    def _answered(self, ack: asyncio.Future[pb.SubmitAck]) -> None:
        _retrieved(ack)
        error = None if ack.cancelled() else ack.exception()
        if isinstance(error, RpcError):
            self._metrics.refused(error.error)

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
        operation.trace = self._tracing.operation(operation.header, operation.accepted_at)
        operation.trace.phase("journal")
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
                operation.trace.end(None)
                queue.refuse(operation, error)
                return
            if queue.pending.get(operation.seq) is not operation:
                return  # a rewind, or a deletion of the run, was quicker
            crash_point("operation.before_ack")
            operation.location, operation.durable = done.result(), True
            self._metrics.accepted(operation.header.operation)
            operation.trace.phase("queue")
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
                    self._turns.put(queue.record.owner, queue)
                    self._work.set()
                return
            self._finish(queue, head, verdict)

    async def _dispatch(self) -> None:
        while True:
            while not self._turns or self._at_engine >= self._turns.pipe:
                self._work.clear()
                await self._work.wait()
            queue = self._turns.pop()
            if isinstance(queue, asyncio.Future):
                if not queue.done():
                    self._at_engine += 1
                    queue.set_result(None)
                continue
            head = queue.head
            if head is None or queue.closed is not None:
                continue
            self._at_engine += 1
            queue.running = head
            task = asyncio.create_task(self._carry_out(queue, head))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry_out(self, queue: RunQueue, operation: Pending) -> None:
        operation.trace.phase("engine")
        try:
            with logs.about(queue.record.run_id, operation.seq):
                outcome = await self._carrier.carry_out(queue, operation)
            if outcome is not None and operation.seq in queue.pending and queue.record.run_id in self._queues:
                result, payload = outcome
                self._finish(queue, operation, result, payload)
                if self._keeper.due(queue, operation):
                    await self._keeper.take(queue, operation.seq)
        finally:
            queue.running = None
            self._give_back()
        self._wake(queue)

    async def _turn(self, owner: str) -> None:
        """Waits for a place at the engine, which is to be given back.

        Raises:
            RpcError: SHUTTING_DOWN.
        """
        if self._draining:
            raise shutting_down()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.put(owner, turn)
        self._work.set()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self._give_back()
            raise

    def _give_back(self) -> None:
        self._at_engine -= 1
        self._work.set()

    async def sample(self, asked: pb.SampleRequest, owner: str) -> tuple[engine_pb2.EngineReply, Buffer]:
        """Samples outside any run's queue, when it is the owner's turn.

        Raises:
            RpcError: LIMIT_EXCEEDED, or what the engine has against it.
            EngineDied: while it sampled.
        """
        usage = self.usage(owner)
        prompts = max(len(asked.prompt_ids), len(asked.call.prompts))
        tokens = sum(len(prompt.ids) for prompt in asked.prompt_ids)
        usage.check(0, tokens + prompts * (asked.call.n or 1) * asked.call.max_tokens)
        usage.operations += 1
        try:
            await self._turn(owner)
            working = asyncio.ensure_future(self._engine.request(engine_pb2.EngineRequest(sample=asked)))
            working.add_done_callback(_retrieved)
            working.add_done_callback(lambda _: self._give_back())  # also when its caller has left by then
            reply, payload = await asyncio.shield(working)
            self._metrics.finished("", pb.Operation(sample=asked.call), reply.result)
            return reply, payload
        finally:
            usage.operations -= 1

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
        self._observe(queue.record, operation, result)
        marks = queue.finish(operation, result)
        run_id, rewound_epoch = queue.record.run_id, queue.record.rewound_epoch
        kept = repeated(operation.header.operation, result.status)
        future = self._journal.put_result(run_id, result, [payload], marks, checkpoint, kept)

        async def store() -> None:
            stored = future
            while True:
                try:
                    await stored
                    break
                except Exception as error:  # a result must not be lost to a disk that is full for a while
                    log.error("the result of operation %d of %s is not stored yet: %s", operation.seq, run_id, error)
                    await asyncio.sleep(STORE_AGAIN_S)
                if queue.record.rewound_epoch != rewound_epoch:
                    return  # its number may be another's by now
                stored = self._journal.put_result(run_id, result, [payload], marks, checkpoint, kept)
            crash_point("result.after_commit")
            operation.trace.end(result)
            if queue.record.rewound_epoch != rewound_epoch:
                return
            if checkpoint is not None:
                queue.record.checkpoints[checkpoint.name] = checkpoint
                self._keep(self._saved(queue.record, checkpoint))
            queue.stored(StoredResult(result, payload))

        return self._keep(store())

    def _observe(self, record: RunRecord, operation: Pending, result: pb.OperationResult) -> None:
        operation.trace.phase("result")
        self._metrics.finished(record.run_id, operation.header.operation, result)
        record.num_tokens += result.loss.num_tokens + result.sample.num_prompt_tokens + result.sample.num_sampled_tokens
        if log.isEnabledFor(logging.INFO):
            about = {"run_id": record.run_id, "seq": operation.seq, "kind": operation.kind}
            times = {"queue_s": result.timings.queue_s, "engine_s": result.timings.engine_s}
            how = pb.ErrorCode.Name(result.error.code) if result.HasField("error") else "done"
            log.info("%s: %s", operation.kind, how.removeprefix("ERROR_CODE_").lower(), extra=about | times)

    def backlog(self) -> Backlog:
        """What waits here at this moment."""
        queues = self._queues.values()
        now = time.time()
        oldest = (next(iter(queue.pending.values())).accepted_at for queue in queues if queue.pending)
        return Backlog(
            runs=len(queues),
            operations=sum(len(queue.pending) for queue in queues),
            bytes=sum(queue.queued_bytes for queue in queues),
            early=sum(len(queue.window) for queue in queues),
            oldest_s=max(now - min(oldest, default=now), 0.0),
        )

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
                if seq <= record.released_seq or record.rewound_epoch != rewound_epoch:
                    continue  # while they were read
                for result in found or [lost_result(seq)]:
                    for missing in range(seq, result.header.seq):
                        yield lost_result(missing)
                    yield result
                    seq = result.header.seq + 1
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

    # ---- growing and shrinking ----

    async def _saved(self, record: RunRecord, checkpoint: pb.Checkpoint) -> None:
        try:
            await self._keeper.saved(record, checkpoint)
        except Exception as error:  # collecting is for later, if not for now
            log.error("the journal of %s was not trimmed: %s", record.run_id, error)

    async def _collect(self) -> None:
        """Forgets results that nobody fetched in time, and deletes segments that nothing refers to."""
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            try:
                for run_id, seq in (await self._journal.expired(time.time() - self._result_retention_s)).items():
                    if run_id in self._queues:
                        await self.release(self._queues[run_id].record, seq)
                await self._journal.collect()
            except Exception as error:  # as above
                log.error("old results and segments were not deleted: %s", error)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _ack(operation: Pending, duplicate: bool = False) -> pb.SubmitAck:
    return pb.SubmitAck(run_id=operation.header.run_id, seq=operation.seq, duplicate=duplicate)


def _damaged(seq: int) -> pb.Error:
    message = f"operation {seq} was damaged on the server's disk before it was carried out; submit it again"
    return pb.Error(code=pb.ERROR_CODE_PAYLOAD_CORRUPT, message=message)


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
