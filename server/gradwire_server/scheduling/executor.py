"""Execution of one operation on the engine, including restoring its run there and handling engine crashes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Sequence

from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.crash_points import crash_point
from gradwire_server.engine_client.client import EngineAnswer, EngineDied
from gradwire_server.errors import ServiceError, parked_error
from gradwire_server.journal.checkpoint_records import CheckpointRecords
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.recorded_files import RecordedFiles
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Buffer, CorruptRecord
from gradwire_server.operation_kinds import loss_result, training_call
from gradwire_server.scheduling.auto_checkpoint import in_use
from gradwire_server.scheduling.checks import check_room
from gradwire_server.scheduling.operation import DEATHS, QueuedOperation, failed, operation_request
from gradwire_server.scheduling.replay import CannotRestore, Restorer
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.spread_samples import SpreadSamples
from gradwire_server.scheduling.who_is_next import Placement, Visit

log = logging.getLogger(__name__)

_OF_THE_START = (pb.ERROR_CODE_UNKNOWN_LOSS, pb.ERROR_CODE_UNKNOWN_MODEL)
"""Errors of an operation accepted at an earlier start that another start may mend: its models and losses differ."""
LEAST_S = 1e-6
"""Seconds that the engine is told to have left when the timeout is over: 0 means no timeout."""

FULL_PAUSE_S = 1.0
FULL_PATIENCE_S = 600.0
"""How long a save or an export that finds the disk full is tried again: as long as a client of the default settings
waits for a server that is away. An operation's own timeout ends it earlier."""

Outcome = tuple[pb.OperationResult, Buffer]


class Executor:
    """Executor of single operations on the engine."""

    def __init__(
        self,
        placement: Placement,
        journal: Journal,
        checkpoints: CheckpointRecords,
        restorer: Restorer,
        recorded: RecordedBatches,
    ) -> None:
        self._placement, self._journal, self._checkpoints = placement, journal, checkpoints
        self._restorer, self._recorded = restorer, recorded

    async def create(
        self, queue: RunQueue, share_percent: int = 100, held_bytes: int = 0
    ) -> engine_pb2.EngineRunCreated:
        """Create a new run in the engine.

        Args:
            share_percent: Part of the memory that the owner's runs may take.
            held_bytes: Memory that the owner's other runs take.

        Raises:
            ServiceError: The engine's own error; ENGINE_UNAVAILABLE if it died :data:`DEATHS` times on the way.
        """
        request = engine_pb2.EngineRequest(create_run=queue.record.origin)
        request.create_run.held_bytes, request.create_run.share_percent = held_bytes, share_percent
        request.create_run.fence = await self._checkpoints.fence(queue.record.run_id)
        await self._placement.ready(queue)
        began = time.monotonic()
        reply = await self.ask(queue, request, "made the run")
        queue.held_by(self._placement.of(queue.record.run_id).engine.holder)
        queue.recovery_cost.loading_s = time.monotonic() - began
        return reply.run_created

    async def ask(
        self, item: RunQueue | Visit, request: engine_pb2.EngineRequest, doing: str
    ) -> engine_pb2.EngineReply:
        """Send a request that is no operation, again if the engine dies.

        Args:
            item: The run or visit that it is for, which decides on the engine.
            doing: The engine's work, in words for the error.

        Raises:
            ServiceError: The engine's own error; ENGINE_UNAVAILABLE if it died :data:`DEATHS` times on the way.
        """
        for _ in range(DEATHS):
            there = await self._placement.ready(item)
            try:
                reply, _payload = await there.engine.request(request)
            except EngineDied:
                continue
            return reply
        raise ServiceError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, f"the engine died twice while it {doing}")

    async def drop(self, run_id: str) -> None:
        """Remove a run from the engine, if the engine holds it."""
        request = engine_pb2.EngineRequest(drop_run=engine_pb2.EngineDropRun(run_id=run_id))
        try:
            await self._placement.of(run_id).engine.request(request)
        except (EngineDied, ServiceError) as error:
            log.info("run %s was not in the engine: %s", run_id, error)

    async def hold(self, queue: RunQueue) -> None:
        """Wait until the engine holds a run for reading, and restore it there if no operation of it will.

        Raises:
            ServiceError: The run is parked, closed, or cannot be restored; ENGINE_UNAVAILABLE if the engine died
                :data:`DEATHS` times on the way.
        """
        deaths = 0
        while not self.holds(queue):
            if queue.closed is not None:
                raise queue.closed
            if queue.parked is not None:
                raise parked_error(queue.record.run_id, queue.parked.error)
            changed = queue.changed
            if queue.pending or queue.is_held_back:  # the first of them restores the run
                await changed.wait()
                continue
            await self._placement.ready(queue)
            try:
                async with queue.handing:
                    if not (queue.pending or queue.is_held_back or self.holds(queue)):
                        await self._restorer.restored(queue, queue.record.applied_seq + 1)
            except CannotRestore as error:
                raise ServiceError.of(error.error) from error
            except EngineDied as error:
                deaths += 1
                if deaths >= DEATHS:
                    message = "the engine died while the run was restored"
                    raise ServiceError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, message) from error

    def holds(self, queue: RunQueue) -> bool:
        """Whether an engine holds a run that is neither parked nor about to move."""
        return queue.is_held and not queue.is_held_back and queue.parked is None and queue.closed is None

    async def carry_out(self, queue: RunQueue, operation: QueuedOperation, spread: SpreadSamples) -> Outcome | None:
        """Execute an operation and return its result and payload.

        Returns None if the operation must be sent again later, or if a rewind, deletion or cancellation removed it.

        Raises:
            CannotRestore: The run must be parked.
        """
        try:
            outcome = await self._attempt(queue, operation, spread)
            return None if outcome is not None and _waits_for_room(queue, operation, outcome[0]) else outcome
        except EngineDied as error:
            return await self._after_death(queue, operation, error)
        except CannotRestore:
            raise
        except Exception:  # a bug in the server must not stop the dispatcher or block the run
            log.exception("operation %d of %s", operation.seq, queue.record.run_id)
            message = f"the server failed to carry operation {operation.seq} out; its log says why"
            return failed(operation.seq, pb.ERROR_CODE_INTERNAL, message), b""

    async def _attempt(self, queue: RunQueue, operation: QueuedOperation, spread: SpreadSamples) -> Outcome | None:
        await self._placement.ready(queue)
        try:
            async with queue.handing:
                answer = await self._hand_over(queue, operation, spread)
                if answer is None:
                    return None
                queue.handed(operation, answer)
            reply, data = await answer
        except ServiceError as error:
            return pb.OperationResult(seq=operation.seq, status=pb.STATUS_FAILED, error=error.error), b""
        if reply.HasField("not_started"):
            return None
        result, taken = reply.result, time.time() - operation.accepted_at
        if operation.from_journal and result.error.code in _OF_THE_START:
            raise CannotRestore(result.error)
        if operation.batch is not None:
            data = self._recorded.take(queue.record, operation.header, operation.batch, result, data)
            operation.batch = None
        result.timings.queue_s = max(taken - result.timings.engine_s, 0.0)
        return result, data

    async def _hand_over(
        self, queue: RunQueue, operation: QueuedOperation, spread: SpreadSamples
    ) -> asyncio.Future[EngineAnswer] | None:
        """Send an operation to the engine; None if its turn has not come or it no longer exists.

        Raises:
            ServiceError: The operation cannot be executed. Raised only for a run's first operation without a result,
                except for a checkpoint that may not be written.
            EngineDied: The engine died while the run was restored.
            CannotRestore: The run cannot be restored.
        """
        if not queue.is_next(operation):
            return None
        if not queue.is_held and not (
            queue.is_first(operation) and await self._restorer.restored(queue, operation.seq)
        ):
            return None
        if operation.row.gives_checkpoint and not await self._may_save(queue, operation):
            return None
        crash_point("operation.before_engine")
        payload = operation.payload
        if payload is None:
            try:
                payload = [await self._payload(operation)]
            except CorruptRecord as error:
                if not queue.is_first(operation):
                    return None
                message = f"the payload of operation {operation.seq} was damaged on the server's disk; submit it again"
                raise ServiceError(pb.ERROR_CODE_PAYLOAD_CORRUPT, message) from error
        if not queue.is_held or not queue.is_next(operation):
            return None  # the engine died or the operation was cancelled meanwhile
        operation.spread = spread.in_run(queue, operation, payload) if operation.may_spread else None
        if operation.spread is not None:
            return operation.spread.answer
        request = self._request(queue, operation)
        if self._recorded.wants(queue.record, operation.header):
            operation.batch = payload
            self._recorded.ask(queue.record, request.operation)
        return self._placement.of(queue.record.run_id).engine.request(request, payload)

    async def _payload(self, operation: QueuedOperation) -> Buffer:
        if operation.location is None:
            raise CorruptRecord("the journal has no payload of it")
        return await self._journal.payload(operation.location)

    async def _may_save(self, queue: RunQueue, operation: QueuedOperation) -> bool:
        """Wait until a checkpoint may be written; False if the run was closed or rewound meanwhile.

        Every operation that a checkpoint contains needs a durable result before the checkpoint's folder exists;
        otherwise a recovery from that folder would execute the operation a second time.

        Raises:
            ServiceError: Another run's recovery needs the checkpoint of this name, or the run's limit of checkpoints
                is reached.
        """
        save = operation.header.operation.save_checkpoint
        used = await self._checkpoints.user_of(queue.record.run_id, save.name) if save.overwrite else None
        if used is not None and used[1] != queue.record.run_id:
            raise in_use(*used)
        if not await queue.settled(operation.seq - 1):
            return False
        full = check_room(save, queue.record.checkpoints, queue.limits)
        if full is not None:
            raise ServiceError.of(full)
        return True

    def _request(self, queue: RunQueue, operation: QueuedOperation) -> engine_pb2.EngineRequest:
        request = operation_request(operation.header, queue.dropped_step(operation.seq))
        request.owner = queue.record.owner
        request.operation.traceparent = operation.trace.traceparent
        if operation.deadline < math.inf:
            request.operation.deadline = max(operation.deadline - time.monotonic(), LEAST_S)
        before = next(iter(queue.sent), operation.seq)
        request.operation.unless_failed = before if before < operation.seq else 0
        if operation.retried and operation.row.gives_checkpoint:
            save = request.operation.operation.save_checkpoint
            if save.name not in queue.record.checkpoints:  # the first attempt may have left a folder without a row
                save.overwrite = True
        return request

    async def _after_death(self, queue: RunQueue, operation: QueuedOperation, error: EngineDied) -> Outcome | None:
        """Return None to try an operation again whose engine died, or its quarantine after :data:`DEATHS` crashes."""
        queue.died(operation, error.suspect)
        if error.suspect:
            try:
                await self._journal.count_death(queue.record.run_id, operation.seq)
            except ServiceError as full:  # counted in memory: only a restart of the server would forget it
                log.warning("the engine's death at operation %d is not on disk: %s", operation.seq, full)
        if operation.deaths < DEATHS:
            await self._placement.ready(queue)
            return None
        message = f"operation {operation.seq} ({operation.kind}) killed the engine {operation.deaths} times"
        return failed(operation.seq, pb.ERROR_CODE_QUARANTINED, message + " and is not tried again"), b""


def _waits_for_room(queue: RunQueue, operation: QueuedOperation, result: pb.OperationResult) -> bool:
    """Whether to try an operation again, after a pause, that found the disk full: it has changed nothing."""
    if result.error.code != pb.ERROR_CODE_STORAGE_FULL or not operation.row.writes_files:
        return False
    now = time.monotonic()
    if operation.full_since is None:
        operation.full_since = now
        log.warning(
            "run %s: %s %d waits for room on the disk, for %.0f s at most: %s", queue.record.run_id, operation.kind,
            operation.seq, FULL_PATIENCE_S, result.error.message,
        )  # fmt: skip
    operation.not_before = now + FULL_PAUSE_S
    return now - operation.full_since < FULL_PATIENCE_S


SEEN = ("logprobs", "advantages")


class RecordedBatches:
    """Records batches with their results for people to look at, in tasks of its own.

    The engine is asked for the log-probabilities and the advantages that the loss saw beside what the caller asked for;
    the caller's result is without them. They are a by-product of the loss, so the gradient is the same with and
    without.
    """

    def __init__(self, files: RecordedFiles) -> None:
        self._files = files
        self._first: dict[str, int] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def wants(self, record: RunRecord, header: pb.OperationHeader) -> bool:
        """Whether a run's setting picks this operation: always its first batch, of the others a share drawn by number.

        The first batch may come behind samples and saves.
        """
        share = record.config.record_batches
        call = training_call(header.operation) if share > 0 else None
        if call is None or call.accumulate:
            return False
        if record.step:
            self._first.pop(record.run_id, None)
        elif self._first.setdefault(record.run_id, header.seq) == header.seq:
            return True
        drawn = hashlib.blake2b(f"{record.run_id}/{header.seq}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little") < share * 2**64

    def ask(self, record: RunRecord, request: engine_pb2.EngineOperation) -> None:
        """Let the engine return the log-probabilities and advantages of an operation's batch.

        A run with a reward or classification head has no output head whose log-probabilities its losses see.
        """
        call = training_call(request.operation)
        if call is not None and record.config.head in ("", "value"):
            call.outputs.extend(name for name in SEEN if name not in call.outputs)

    def take(
        self,
        record: RunRecord,
        header: pb.OperationHeader,
        batch: Sequence[Buffer],
        result: pb.OperationResult,
        data: Buffer,
    ) -> Buffer:
        """Record a batch with its result, and return the result's tensors without those that only the recording has."""
        call = training_call(header.operation)
        if call is None or result.status != pb.STATUS_SUCCEEDED:
            return data
        columns = codec.decode(result.tensors, data)
        seen = {name: columns[name] for name in SEEN if name in columns}
        if extra := seen.keys() - set(call.outputs):
            for name in extra:
                del columns[name]
            specs, buffers = codec.encode(columns)
            result.ClearField("tensors")
            result.tensors.extend(specs)
            data = b"".join(buffers)
        outputs, parts = codec.encode(seen)
        loss = loss_result(result)
        recording = pb.Recording(
            kind="batch", number=header.seq, step=record.step, time=time.time(),
            operation=header.operation.WhichOneof("kind") or "", loss_fn=call.loss_fn,
            loss_kwargs_json=call.loss_kwargs_json, loss=loss.loss if loss.HasField("loss") else None,
            rows=loss.num_sequences, tokens=loss.num_tokens, tensors=header.tensors, outputs=outputs,
        )  # fmt: skip
        task = asyncio.create_task(self._write(record.run_id, recording, [*batch, *parts]))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return data

    async def _write(self, run_id: str, recording: pb.Recording, content: Sequence[Buffer]) -> None:
        try:
            if not await asyncio.to_thread(self._files.write, run_id, recording, content):
                log.warning("batch %d of %s is larger than max_recorded_bytes", recording.number, run_id)
        except OSError as error:  # a recording is for people; the training goes on without it
            log.warning("batch %d of %s was not recorded: %s", recording.number, run_id, error)

    async def settle(self) -> None:
        """Wait until everything taken so far is written."""
        await asyncio.gather(*self._writing)
