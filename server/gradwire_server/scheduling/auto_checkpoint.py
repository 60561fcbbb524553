"""Automatic checkpoints, which bound the work of a recovery and the size of the journal.

A run can always be restored from two points: its newest checkpoint and the one before it (at first, the state in which
it was created); the journal is kept from the older point on. Once both have been read back successfully, the journal is
trimmed up to the previous checkpoint, unless the run keeps it, and older automatic checkpoints are deleted.
A user's checkpoints stay until the user deletes them. The one from which alone a run could be restored is then kept as
an automatic checkpoint; one that a replayed operation would read is not deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.checkpoint_files import AUTOMATIC
from gradwire_server.crash_points import crash_point
from gradwire_server.engine_client.client import EngineDied
from gradwire_server.errors import ServiceError
from gradwire_server.journal.checkpoint_records import CheckpointRecords
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.scheduling.finished_operations import RecoveryCost
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.who_is_next import Placement
from gradwire_server.stores.store import CHECKPOINTS, StoreError, run_owner, saved_place

log = logging.getLogger(__name__)

SHARE = 0.1
"""The most of a run's engine time that goes to checkpoints which the time of a recovery makes due."""


class AutoCheckpoint:
    """Policy that saves runs when a checkpoint is due, and deletes the journal and checkpoints made unnecessary by it.

    Args:
        every_steps, every_bytes: A checkpoint is due when this many optimizer steps have been taken, or the journal
            has grown by this many bytes, since the newest one; 0 for never.
        replay_s: A checkpoint is also due when a recovery would spend this many seconds of the engine on replaying; 0
            for never. Where saving takes so long that this would cost more than :data:`SHARE` of the engine's time, a
            checkpoint waits until it does not.
    """

    def __init__(
        self,
        placement: Placement,
        journal: Journal,
        checkpoints: CheckpointRecords,
        every_steps: int,
        every_bytes: int,
        replay_s: float = 0.0,
    ) -> None:
        self._placement, self._journal, self._checkpoints = placement, journal, checkpoints
        self._every_steps, self._every_bytes, self._replay_s = every_steps, every_bytes, replay_s

    async def start(self, records: Sequence[RunRecord]) -> None:
        """Delete automatic checkpoints that a crash left in the store before they were recorded in the database."""

        folders = self._checkpoints.folders

        def remove(record: RunRecord) -> None:
            for name in folders.names(run_owner(record.run_id), CHECKPOINTS):
                if name.startswith(AUTOMATIC) and name not in record.checkpoints:
                    folders.delete(saved_place(record.run_id, CHECKPOINTS, name))

        try:
            await asyncio.gather(*(folders.in_thread(remove, record) for record in records))
        except StoreError as error:
            log.error("automatic checkpoints that a crash left are still in the store: %s", error)

    def due(self, queue: RunQueue) -> bool:
        """Whether to save a run as soon as none of its operations is in the engine."""
        since, work = queue.recovery_cost, queue.recovery_cost.since_attempt
        due = (
            0 < self._every_steps <= work.steps
            or 0 < self._every_bytes <= work.bytes
            or 0 < self._replay_s <= work.engine_s >= since.saving_s / SHARE
        )
        return due and queue.is_held

    async def take(self, queue: RunQueue, seq: int) -> None:
        """Save the run in its state after operation ``seq``, which must be the last one that the engine executed."""
        record, since = queue.record, queue.recovery_cost
        since.attempt()  # a failed attempt is repeated only after another interval
        save = pb.SaveCheckpoint(name=f"{AUTOMATIC}{seq}", note="automatic", overwrite=True)
        request = engine_pb2.EngineOperation(
            run_id=record.run_id, seq=seq, operation=pb.Operation(save_checkpoint=save)
        )
        try:
            engine = self._placement.of(record.run_id).engine
            reply, _ = await engine.request(engine_pb2.EngineRequest(operation=request))
            if reply.result.status != pb.STATUS_SUCCEEDED:
                raise ServiceError.of(reply.result.error)
            if not await queue.settled(seq):
                return
            crash_point("checkpoint.before_row")
            await self._checkpoints.add(record, reply.result.checkpoint)
            since.saved()
            await self.saved(record, reply.result.checkpoint)
            self._took(record, since, reply.result.timings.engine_s)  # without its wait for a turn
        except EngineDied:
            log.error("the engine died while it took checkpoint %s of %s", save.name, record.run_id)
        except Exception as error:  # a run can train without the checkpoint; a bad disk also fails its other writes
            log.error("checkpoint %s of %s was not taken: %s", save.name, record.run_id, error)

    def _took(self, record: RunRecord, since: RecoveryCost, seconds: float) -> None:
        if since.saving_s <= SHARE * self._replay_s < seconds and self._replay_s:
            log.warning(
                "a checkpoint of run %s takes %.0f s: it is taken every %.0f s of work, not every %.0f s"
                " (--max-recovery-seconds), so that saving costs no more than a tenth of the time",
                record.run_id, seconds, seconds / SHARE, self._replay_s,
            )  # fmt: skip
        since.saving_s = seconds

    async def saved(self, record: RunRecord, newest: pb.Checkpoint) -> None:
        """Read a new checkpoint back, then delete the journal and automatic checkpoints older than the previous one.

        The previous one is the newest of the others that can be read, too.
        """
        if not await self._readable(record, newest):
            return
        older = [saved for saved in record.complete_checkpoints if saved.seq < newest.seq]
        for saved in sorted(older, key=lambda saved: saved.seq, reverse=True):
            if await self._readable(record, saved):
                break
        else:
            return
        previous = saved.seq
        if not record.config.keep_journal:
            await self._journal.retention.trim(record.run_id, previous)
            record.trim(previous)
        for saved in list(record.checkpoints.values()):
            old = saved.name.startswith(AUTOMATIC) and saved.seq < previous
            if old and await self._checkpoints.user_of(record.run_id, saved.name) is None:
                await self._checkpoints.delete(record, saved.name)
        for name in record.read_back.keys() - record.checkpoints.keys():
            del record.read_back[name]

    async def _readable(self, record: RunRecord, checkpoint: pb.Checkpoint) -> bool:
        """Whether a checkpoint is there and was read back, now or earlier, byte by byte."""
        if record.read_back.get(checkpoint.name) == checkpoint:
            return True
        verify = engine_pb2.EngineVerifyCheckpoint(checkpoint=checkpoint.path)
        try:
            engine = self._placement.of(record.run_id).engine
            reply, _ = await engine.request(engine_pb2.EngineRequest(verify_checkpoint=verify))
        except EngineDied:
            return False
        except ServiceError as error:
            if self._checkpoints.holds(record, checkpoint):
                log.error("checkpoint %s cannot be read back; those before it are kept: %s", checkpoint.path, error)
            return False
        if reply.result.checkpoint.seq != checkpoint.seq:
            return False  # a later save with its name has replaced it, and is read back when it is recorded
        record.read_back[checkpoint.name] = checkpoint
        return self._checkpoints.holds(record, checkpoint)

    async def let_go(self, record: RunRecord, name: str) -> None:
        """Prepare the deletion of a checkpoint: keep its content as an automatic one if recoveries depend on it.

        Raises:
            ServiceError: UNSUPPORTED for an automatic checkpoint on which they depend, and for one that a replayed
                operation would read.
        """
        used = await self._checkpoints.user_of(record.run_id, name)
        if used is not None:
            raise in_use(*used)
        rest = [saved.seq for saved in record.complete_checkpoints if saved.name != name]
        saved = record.checkpoints.get(name)
        if saved is None or saved.weights_only or not record.trimmed_seq:
            return
        if max(rest, default=0) >= record.trimmed_seq:
            return
        if name.startswith(AUTOMATIC):
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                f"{record.run_id}/{name} is the only checkpoint from which the run could be restored after a crash;"
                " it goes once the run has saved two more, or is deleted",
                field="checkpoint",
            )
        await self._checkpoints.copy(record, saved, f"{AUTOMATIC}{saved.seq}")


def in_use(checkpoint: str, run_id: str, seq: int) -> ServiceError:
    """UNSUPPORTED for a checkpoint that operation ``seq`` of a run would read again in a recovery."""
    return ServiceError(
        pb.ERROR_CODE_UNSUPPORTED,
        f"{checkpoint} is still needed: a restored run {run_id} would repeat its operation {seq} with it; it can go"
        " once that run has saved two more checkpoints, or is deleted",
        field="checkpoint",
    )
