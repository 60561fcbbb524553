"""Restore of a run in an engine that does not hold it: load its newest valid checkpoint, then replay the journal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.checkpoint_files import read_manifest
from gradwire_server.engine_client.client import EngineClient, EngineDied
from gradwire_server.errors import ServiceError
from gradwire_server.journal.checkpoint_records import CheckpointRecords
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.provable import Record, tensor_files
from gradwire_server.journal.rows import JournalEntry, parse_outcome
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.same_state import RunChanged, compare, differences, way_out
from gradwire_server.journal.segments import CorruptRecord
from gradwire_server.observability.metrics import Metrics
from gradwire_server.operation_kinds import kind_of, loss_result
from gradwire_server.scheduling.operation import DEATHS, drops_accumulation, is_replayed_with, operation_request
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.who_is_next import Placement


class CannotRestore(Exception):
    """A run cannot be restored in the engine, and is to be parked.

    Attributes:
        error: The reason, for the run's owner.
        again: Whether to try again after a pause.
    """

    def __init__(self, error: pb.Error, *, again: bool = True) -> None:
        super().__init__(error.message)
        self.error, self.again = error, again


log = logging.getLogger(__name__)

_TRY_OLDER = (pb.ERROR_CODE_CHECKPOINT_CORRUPT, pb.ERROR_CODE_UNKNOWN_CHECKPOINT)


class ReplayDied(Exception):
    """The engine died while it replayed this operation."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"the engine died while it repeated operation {seq}")
        self.seq = seq


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    Attributes:
        entries: The journal entries with a result, and damaged ones, after the checkpoint from which it started.
        loading_s: Seconds until the engine held the state of that checkpoint.
        part_bytes: Bytes of parts of a batch in it.
    """

    entries: list[JournalEntry]
    loading_s: float
    part_bytes: int


class Restorer:
    """Brings runs back into the engines that they are placed on."""

    def __init__(
        self, placement: Placement, journal: Journal, checkpoints: CheckpointRecords, metrics: Metrics
    ) -> None:
        self._placement, self._journal, self._checkpoints, self._metrics = placement, journal, checkpoints, metrics

    async def restored(self, queue: RunQueue, seq: int) -> bool:
        """Restore the run in the engine to its state before operation ``seq``.

        Returns False if the run was closed or had to be rewound because lost operations cannot be replayed.

        Raises:
            CannotRestore: Whatever the reason, for example an unknown model, a damaged checkpoint or too little memory.
            EngineDied: The engine died.
        """
        try:
            return await self._restore(queue, seq)
        except (CannotRestore, EngineDied):
            raise
        except ServiceError as error:
            raise CannotRestore(error.error) from error
        except Exception as error:
            log.exception("run %s was not restored", queue.record.run_id)
            message = f"the server failed to restore the run ({type(error).__name__}); its log says why"
            raise CannotRestore(pb.Error(code=pb.ERROR_CODE_INTERNAL, message=message)) from error

    async def _restore(self, queue: RunQueue, seq: int) -> bool:
        if not await queue.settled(seq - 1):  # an operation without a result on disk would not be replayed
            return False
        if not self._journal.keep_payloads and await self.rewind_if_lossy(queue, queued_too=False):
            return False
        engine, began = self._placement.of(queue.record.run_id).engine, time.monotonic()
        holder = engine.holder
        try:
            fence = await self._checkpoints.fence(queue.record.run_id)
            done = await restore(engine, self._journal, queue.record, fence)
        except ReplayDied as error:
            queue.recovery_cost.replay_deaths[error.seq] += 1
            if queue.recovery_cost.replay_deaths[error.seq] >= DEATHS:
                message = (
                    f"the run cannot be restored: repeating its operation {error.seq} killed the engine"
                    f" {DEATHS} times; fork it from a checkpoint before that one"
                )
                quarantined = pb.Error(code=pb.ERROR_CODE_QUARANTINED, message=message)
                raise CannotRestore(quarantined, again=False) from error
            raise EngineDied(suspect=False) from error
        except ServiceError as error:
            if not holder.alive:
                raise EngineDied(suspect=False) from error  # it died between two requests; its successor lacks the run
            raise
        queue.restored(holder, done.part_bytes, done.entries)
        queue.recovery_cost.loading_s = done.loading_s
        count = sum(is_replayed_with(entry.header.operation, entry.status) for entry in done.entries)
        self._metrics.restored(count, time.monotonic() - began)
        return True

    async def rewind_if_lossy(self, queue: RunQueue, *, queued_too: bool) -> bool:
        """Rewind a run to its newest checkpoint if operations after it are lost; return whether it was rewound.

        With ``durability=checkpoint`` the journal keeps no payloads, so what the engine executed after that checkpoint
        is lost when the engine dies.

        Args:
            queued_too: Whether operations without a result count as lost; true at the start of the server.
        """
        record = queue.record
        newest = record.newest_checkpoint
        base, step = (newest.seq, newest.step) if newest else (0, 0)
        if record.accepted_seq <= base:
            return False
        entries = await behind(self._journal, record, base)
        if not any(
            is_replayed_with(entry.header.operation, entry.status) or (queued_too and not entry.status)
            for entry in entries
        ):
            return False
        await self._journal.rewind(record.run_id, base, step)
        queue.rewind(base, step)
        log.warning("run %s went back to operation %d: its journal keeps no payloads", record.run_id, base)
        return True


async def restore(engine: EngineClient, journal: Journal, record: RunRecord, fence: int) -> Restored:
    """Restore a run in the engine to its state after its last result.

    Args:
        fence: The number under which the engine writes its checkpoints (:meth:`.CheckpointRecords.fence`).

    Raises:
        EngineDied: The engine died, and no operation is suspected.
        ReplayDied: The engine died while it replayed an operation.
        ServiceError: The run cannot be restored.
        CannotRestore: It would not be the run that it was.
    """
    passed: list[ServiceError] = []
    try:
        return await _restore(engine, journal, record, fence, passed)
    except ServiceError as error:
        if not passed:
            raise
        raise ServiceError(passed[0].code, f"{passed[0]}; and without it, {error}") from error


async def _restore(
    engine: EngineClient, journal: Journal, record: RunRecord, fence: int, passed: list[ServiceError]
) -> Restored:
    began = time.monotonic()
    base, created = await _begin(engine, record, fence, passed)
    facts = created.computed_with
    loading_s = time.monotonic() - began
    change = None
    if facts:
        try:
            change = await journal.facts.check(record.run_id, base, facts)
        except RunChanged as error:
            raise changed(error) from error
        if change is not None:
            record.changes.append(change)
    divergences: list[str] = []
    count = dropped_step = 0
    exact = facts.get("device") == "cpu"
    entries = [entry for entry in await behind(journal, record, base) if entry.status or entry.damaged]
    for entry in entries:
        lost = entry.damaged and entry.header.seq <= record.applied_seq
        if lost or is_replayed_with(entry.header.operation, entry.status):
            exact = await _repeat(engine, journal, record, entry, dropped_step, exact, divergences)
            count += 1
        elif drops_accumulation(entry.header.operation, entry.status):
            dropped_step = entry.header.seq
    if divergences and change is None:
        by = journal.facts.accepted_by(record.run_id)
        note = f"{divergences[0]}, and {len(divergences) - 1} more operations differ (accepted by {by})"
        record.changes.append(await journal.facts.note(record.run_id, base, facts, note))
    journal.facts.restored(record.run_id)
    log.info("run %s is restored from operation %d by repeating %d", record.run_id, base, count)
    return Restored(entries, loading_s, created.part_bytes)


async def behind(journal: Journal, record: RunRecord, base: int) -> list[JournalEntry]:
    """The accepted operations with numbers above ``base``, in order.

    Raises:
        ServiceError: CHECKPOINT_CORRUPT if the first of them were already trimmed because a newer checkpoint contained
            them; PAYLOAD_CORRUPT if one in between is missing, as a damaged database can lose rows silently.
    """
    accepted = record.accepted_seq  # read once: more may be accepted during the await below
    entries = await journal.entries(record.run_id, base, accepted)
    if accepted > base and (not entries or entries[0].header.seq != base + 1):
        raise ServiceError(
            pb.ERROR_CODE_CHECKPOINT_CORRUPT,
            f"no checkpoint of the run {record.run_id} can be read that its journal goes on from",
        )
    there = {entry.header.seq for entry in entries}
    if missing := [seq for seq in range(base + 1, accepted + 1) if seq not in there]:
        raise ServiceError(
            pb.ERROR_CODE_PAYLOAD_CORRUPT,
            f"operation {missing[0]} of the run {record.run_id} cannot be repeated: it was lost on disk",
        )
    return entries


async def _begin(
    engine: EngineClient, record: RunRecord, fence: int, passed: list[ServiceError]
) -> tuple[int, engine_pb2.EngineRunCreated]:
    """Create the run in the engine from its newest readable checkpoint, or else from its origin.

    Args:
        passed: Takes the errors of the checkpoints that cannot be read.

    Returns:
        The number of the last operation that the state contains, 0 for the origin; the run.
    """
    for checkpoint in sorted(record.complete_checkpoints, key=lambda saved: saved.seq, reverse=True):
        create = engine_pb2.EngineCreateRun(
            run_id=record.run_id, config=record.config, checkpoint=checkpoint.path, fence=fence
        )
        try:
            reply, _ = await engine.request(engine_pb2.EngineRequest(create_run=create))
        except ServiceError as error:
            if error.code not in _TRY_OLDER:
                raise
            log.error("checkpoint %s is passed over: %s", checkpoint.path, error)
            passed.append(error)
        else:
            # Trust the number in the folder: a save that overwrote it may have crashed before its row was written.
            return reply.run_created.seq, reply.run_created
    request = engine_pb2.EngineRequest(create_run=record.origin)
    request.create_run.fence = fence
    reply, _ = await engine.request(request)
    return 0, reply.run_created


async def _repeat(
    engine: EngineClient,
    journal: Journal,
    record: RunRecord,
    entry: JournalEntry,
    dropped_step: int,
    exact: bool,
    divergences: list[str],
) -> bool:
    """Repeat an operation, within the memory limits of the first time, and compare its result with the stored one.

    Args:
        exact: Whether the bits must be the same; false once an operation before it was computed in other pieces.
        divergences: Takes, in words, an accepted difference.

    Returns:
        Whether the bits of those after it must be the same.
    """
    header = entry.header
    if header.payload_bytes and entry.location is None:
        raise ServiceError(
            pb.ERROR_CODE_CHECKPOINT_CORRUPT,
            f"operation {header.seq} of the run {record.run_id} cannot be repeated: its payload was collected",
        )
    before = parse_outcome(entry.outcome)
    request = operation_request(header, dropped_step)
    if before is not None and loss_result(before.result).HasField("limits"):
        request.operation.limits.CopyFrom(loss_result(before.result).limits)
    try:
        if entry.damaged:
            raise CorruptRecord("its row is damaged")
        payload = [await journal.payload(entry.location)] if entry.location else []
        reply, tensors = await engine.request(request, payload)
    except CorruptRecord as error:
        raise ServiceError(
            pb.ERROR_CODE_PAYLOAD_CORRUPT,
            f"operation {header.seq} of the run {record.run_id} cannot be repeated: it was damaged on disk",
        ) from error
    except EngineDied as error:
        raise (ReplayDied(header.seq) if error.suspect else error) from error
    if reply.result.status != pb.STATUS_SUCCEEDED:
        raise ServiceError(
            pb.ERROR_CODE_INTERNAL,
            f"operation {header.seq} of the run {record.run_id} succeeded once and failed when it was repeated:"
            f" {reply.result.error.message}",
        )
    if before is None:
        return exact
    reply.result.seq = header.seq
    exact, difference = compare(before, reply.result, tensors, exact=exact)
    if difference and not journal.facts.accepted_by(record.run_id):
        raise changed(
            RunChanged(
                f"it would not become what it was. {way_out(record.run_id)}. Its operation {header.seq} was"
                f" repeated, and {difference}"
            )
        )
    if difference:
        divergences.append(f"operation {header.seq} was repeated, and {difference}")
        log.warning("run %s goes on although operation %d was repeated and %s", record.run_id, header.seq, difference)
        await journal.facts.replace_outcome(record.run_id, header.seq, reply.result, tensors)
    return exact


def changed(error: RunChanged) -> CannotRestore:
    """The reason to park a run that would not go on as it was; neither time nor another attempt changes that."""
    return CannotRestore(pb.Error(code=pb.ERROR_CODE_RUN_PARKED, message=str(error)), again=False)


BASE = "base model"
"""The fact with the digest of the base model's files."""


class OtherBase(Exception):
    """The base model here is not that of the record."""


@dataclass
class Verdict:
    """Result of executing a record again.

    Attributes:
        compared: Number of operations whose results were compared.
        checkpoints: Names of the checkpoints whose tensors were compared.
        inexact_after: The operation after which only losses and gradient norms were compared, up to rounding; None if
            every bit was.
        difference: The first operation that differs and by how much; empty if none does.
    """

    compared: int
    checkpoints: list[str]
    inexact_after: int | None
    difference: str


async def execute_again(record: Record, engine: EngineClient, runs: Path, say: Callable[[str], object]) -> Verdict:
    """Execute a record's operations in an engine, up to the first whose result differs.

    Args:
        engine: An engine that has started, with the base model.
        runs: Folder of the runs' checkpoints of that engine; it has the record's own.
        say: Called with each sentence about what differs here from where the run was computed.

    Raises:
        OtherBase: The base model's files are others.
        BadRecord: An operation is missing or damaged.
        ServiceError: The engine refuses the run's beginning.
        EngineDied: It died.
    """
    reply, _ = await engine.request(engine_pb2.EngineRequest(create_run=record.create))
    facts = dict(reply.run_created.computed_with)
    if record.facts and record.facts.get(BASE) != facts.get(BASE):
        raise OtherBase(f"its base model has the digest {record.facts.get(BASE)}, and the one here {facts.get(BASE)}")
    for difference in differences(record.facts, facts):
        say(difference)
    exact = facts["device"] == record.facts.get("device") == "cpu"
    verdict = Verdict(0, [], None if exact else record.after_seq, "")
    dropped_step = 0
    for recorded, payload in record.operations():
        header, succeeded = recorded.operation, recorded.status == pb.STATUS_SUCCEEDED
        if drops_accumulation(header.operation, recorded.status):
            dropped_step = header.seq
        saves = succeeded and kind_of(header.operation).gives_checkpoint
        if not (saves or (succeeded and recorded.HasField("outcome"))):
            continue
        request = operation_request(header, dropped_step)
        if loss_result(recorded.outcome.result).HasField("limits"):
            request.operation.limits.CopyFrom(loss_result(recorded.outcome.result).limits)
        if saves:
            request.operation.operation.save_checkpoint.overwrite = True
        kind = header.operation.WhichOneof("kind")
        reply, tensors = await engine.request(request, [payload] if payload else [])
        if reply.result.status != pb.STATUS_SUCCEEDED:
            verdict.difference = (
                f"operation {header.seq} ({kind}) succeeded then and fails now: {reply.result.error.message}"
            )
            return verdict
        if saves:
            difference = _saved_otherwise(record, runs, reply.result.checkpoint, verdict)
        else:
            reply.result.seq = header.seq
            exact, difference = compare(recorded.outcome, reply.result, tensors, exact=verdict.inexact_after is None)
            if verdict.inexact_after is None and not exact:
                verdict.inexact_after = header.seq - 1
            verdict.compared += 1
        if difference:
            verdict.difference = f"operation {header.seq} ({kind}) differs: {difference}"
            return verdict
    return verdict


def _saved_otherwise(record: Record, runs: Path, saved: pb.Checkpoint, verdict: Verdict) -> str:
    """How the tensors of a checkpoint differ from the recorded ones; empty if they do not, or are not recorded."""
    seq, files = record.checkpoints.get(saved.name, (0, {}))
    if seq != saved.seq or verdict.inexact_after is not None:
        return ""
    now = tensor_files(read_manifest(runs / record.run_id / "checkpoints" / saved.name).files)
    verdict.checkpoints.append(saved.name)
    changed = sorted(name for name in {**files, **now} if files.get(name) != now.get(name))
    return f"{changed[0]} of the checkpoint {saved.name} has other tensors" if changed else ""
