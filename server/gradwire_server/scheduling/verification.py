"""Execution of a run's record once more, and the comparison of what each operation gives with what it gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.checkpoint_files import read_manifest
from gradwire_server.engine_client.client import EngineClient
from gradwire_server.journal.provable import Record, tensor_files
from gradwire_server.journal.rows import digest_of, outcome
from gradwire_server.journal.same_state import differences, divergence, is_comparable
from gradwire_server.operation_kinds import kind_of, loss_result
from gradwire_server.scheduling.operation import drops_accumulation
from gradwire_server.scheduling.replay import operation_request

BASE = "base model"
"""The fact with the digest of the base model's files."""


class OtherBase(Exception):
    """The base model here is not that of the record."""


@dataclass
class Verdict:
    """What executing a record again has shown.

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
            now = outcome(reply.result, digest_of([tensors]))
            if verdict.inexact_after is None and not is_comparable(recorded.outcome, now):
                verdict.inexact_after = header.seq - 1
            difference = divergence(recorded.outcome, now, exact=verdict.inexact_after is None)
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
