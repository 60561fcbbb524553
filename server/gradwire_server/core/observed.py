"""Views of runs for people, beside results: recordings, the newest operations, usage, and who waits."""

from __future__ import annotations

import asyncio
import time

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import ANYONE, Caller
from gradwire_server.durable_files import is_full
from gradwire_server.errors import ServiceError, limit_exceeded
from gradwire_server.journal.recorded_files import RecordedFiles
from gradwire_server.journal.storage import Storage
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.scheduler import Scheduler

OPERATIONS = 100


class Observed:
    """Views of the runs of a server.

    Args:
        most_bytes: Maximum bytes of a run's recordings.
    """

    def __init__(self, scheduler: Scheduler, storage: Storage, files: RecordedFiles, most_bytes: int) -> None:
        self._scheduler, self._records, self._files, self._most_bytes = scheduler, storage.records, files, most_bytes
        self._usage = storage.usage

    async def recordings(self, caller: Caller, run_id: str) -> list[pb.Recording]:
        """List the recordings of a run, oldest first.

        Raises:
            ServiceError: UNKNOWN_RUN.
        """
        self._records.get(run_id, caller)
        await self._scheduler.recorded.settle()
        return await asyncio.to_thread(self._files.list, run_id)

    async def recording(self, caller: Caller, request: pb.ReadRecordingRequest) -> tuple[pb.Recording, bytes]:
        """A recording and its content.

        Raises:
            ServiceError: UNKNOWN_RUN; UNKNOWN_FILE if it is not there.
        """
        self._records.get(request.run_id, caller)
        return await asyncio.to_thread(self._files.read, request.run_id, request.kind, request.number)

    async def record_rollouts(self, caller: Caller, request: pb.RecordRolloutsRequest) -> pb.Recording:
        """Record the rollouts of an iteration, in place of those that it has.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, LIMIT_EXCEEDED, STORAGE_FULL.
        """
        run = self._records.get(request.run_id, caller, write=True)
        recording = pb.Recording(
            kind="rollouts", number=request.iteration, step=run.step, time=time.time(), rows=request.rows
        )
        content = request.rollouts_json
        try:
            written = await asyncio.to_thread(self._files.write, run.run_id, recording, [content])
        except OSError as error:
            if not is_full(error):
                raise
            message = "the server's disk is full: the rollouts were not recorded"
            raise ServiceError(pb.ERROR_CODE_STORAGE_FULL, message) from error
        if not written:
            raise limit_exceeded("rollouts", "max_recorded_bytes", self._most_bytes, "rollouts_json")
        return recording

    def operations(self, caller: Caller, run_id: str, limit: int) -> pb.ListOperationsResponse:
        """The newest operations of a run, newest first, and what a recovery of it would cost.

        Raises:
            ServiceError: UNKNOWN_RUN.
        """
        queue = self._scheduler.queue(self._records.get(run_id, caller))
        return pb.ListOperationsResponse(
            operations=queue.log.newest(queue.unfinished, limit or OPERATIONS),
            recoveries=queue.log.recoveries,
            loading_s=queue.recovery_cost.loading_s,
            replay_s=queue.recovery_cost.work.engine_s,
        )

    def queues(self, caller: Caller) -> list[pb.QueuedRun]:
        """The runs that have operations without a result; nameless where the caller may not read them."""
        return [self._queued(queue, caller) for queue in self._scheduler.busy()]

    async def usage(self, caller: Caller, request: pb.GetUsageRequest) -> list[pb.UsageEntry]:
        """Return the usage of the caller's key; for a key that sees all, of all keys.

        Raises:
            ServiceError: INVALID_ARGUMENT, LIMIT_EXCEEDED.
        """
        owner = None if caller.sees_all else caller.name
        return await self._usage.between(request.start, request.end or time.time(), request.by, owner)

    def _queued(self, queue: RunQueue, caller: Caller) -> pb.QueuedRun:
        pending = list(queue.pending.values())
        record = queue.record
        queued = pb.QueuedRun(
            engine=self._scheduler.placement.of(record.run_id).engine.number,
            executing=len(queue.sent),
            waiting=len(pending) - sum(operation.seq in queue.sent for operation in pending),
            oldest_s=max(time.time() - pending[0].accepted_at, 0.0),
            operation=pending[0].kind,
            bytes=sum(operation.header.payload_bytes for operation in pending),
            parked=queue.parked is not None,
        )
        if record.readable(caller) or caller == ANYONE:
            queued.run_id, queued.name, queued.owner = record.run_id, record.config.name, record.owner
        return queued
