"""Checks that a restored run is the run that it was: computed with the same, and with the same results."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping

from google.protobuf import json_format
from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.database import Database
from gradwire_server.journal.rows import digest_of, outcome, outcome_of
from gradwire_server.journal.segments import Buffer
from gradwire_server.operation_kinds import has_loss, loss_call, loss_result, step_result

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Relative difference of losses and gradient norms that counts as rounding, where results are not exact: on a GPU, and
where an operation was cut into other micro-batches or computed together with other runs."""


MAX_CHANGES = 5
"""Most changes named in the error of a run that does not go on; its note has all of them once they are accepted."""
LOSS = "loss "
"""Prefix of the name of a loss's fact."""


class RunChanged(Exception):
    """A run would go on with something other than what it was computed with; the message says what."""


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Name what differs, in words; empty if nothing is known. A loss that is not there any more is told to whoever uses
    it, a new one to nobody."""
    return [
        f"{name} was {before.get(name, 'none')}, is {now.get(name, 'none')}"
        for name in sorted({*before, *now} if before else ())
        if before.get(name) != now.get(name) and not (name.startswith(LOSS) and not (name in before and name in now))
    ]


class RunFacts:
    """The facts that each run was computed with, by name: package versions, the device, losses and the like.

    Args:
        accept_changes: Whether runs go on with something other than what they were computed with.
    """

    def __init__(self, store: Database, accept_changes: bool) -> None:
        self._store, self._accept_changes = store, accept_changes
        self._consents: dict[str, str] = {}

    def consent(self, run_id: str, by: str) -> None:
        """Let a run go on with whatever changed, until it is restored the next time; ``by`` is the owner's name."""
        self._consents[run_id] = by or "its owner"

    def accepted_by(self, run_id: str) -> str:
        """The key or flag that lets a run go on with whatever changed; empty if none does."""
        return self._consents.get(run_id) or ("--accept-changes" if self._accept_changes else "")

    def restored(self, run_id: str) -> None:
        """End the consent of a run's owner: the run is restored."""
        self._consents.pop(run_id, None)

    async def of(self, run_id: str) -> list[tuple[int, float, dict[str, str], str]]:
        """The facts of a run, oldest first: from which operation on, since when, the facts, what changed."""
        query = "SELECT seq, at, facts, note FROM computed_with WHERE run_id = ? ORDER BY position"
        rows = await self._store.read(lambda connection: connection.execute(query, (run_id,)).fetchall())
        return [(seq, at, json.loads(facts), note) for seq, at, facts, note in rows]

    def note(self, run_id: str, seq: int, facts: Mapping[str, str], note: str = "") -> asyncio.Future[pb.RunChange]:
        """Store what a run is computed with after operation ``seq``; the future's result is the note's entry."""
        return self._store.write(lambda connection: note_facts(connection, run_id, seq, facts, note))

    def replace_outcome(
        self, run_id: str, seq: int, result: pb.OperationResult, payload: Buffer
    ) -> asyncio.Future[None]:
        """Store what an operation gave when it was repeated with an accepted change; later recoveries repeat that."""
        query = "UPDATE operations SET outcome = ? WHERE run_id = ? AND seq = ?"
        values = outcome_of(result, digest_of([payload])), run_id, seq
        return self._store.write(lambda connection: connection.execute(query, values).close())

    async def check(self, run_id: str, seq: int, facts: Mapping[str, str]) -> pb.RunChange | None:
        """Compare what a run was computed with with what it would be computed with now.

        Losses count that it used or has queued.

        Args:
            seq: The last operation of the state from which it would go on.

        Returns:
            An accepted change; None if nothing changed.

        Raises:
            RunChanged: They differ, and changes are not accepted.
        """
        before = await self.of(run_id)
        known = before[-1][2] if before else {}
        if before and not differences(known, facts):
            return None
        used = await self._store.read(lambda connection: _used_losses(connection, run_id))
        changes = differences(_without_losses(known, used), _without_losses(facts, used))
        by = self.accepted_by(run_id)
        if changes and not by:
            more = f"; and {len(changes) - MAX_CHANGES} more" if changes[MAX_CHANGES:] else ""
            told = "; ".join(changes[:MAX_CHANGES]) + more
            raise RunChanged(f"it would not go on as it was. {way_out(run_id)}. Changed: {told}")
        for change in changes:
            log.warning("run %s goes on after operation %d although its %s (%s)", run_id, seq, change, by)
        noted = await self.note(run_id, seq, facts, f"{'; '.join(changes)} (accepted by {by})" if changes else "")
        return noted if changes else None


def _used_losses(connection: sqlite3.Connection, run_id: str) -> set[str]:
    """Names of the losses that a run's operations call: those in its record, and those whose rows are there."""
    headers = connection.execute("SELECT header FROM operations WHERE run_id = ?", (run_id,))
    calls = (loss_call(pb.OperationHeader.FromString(header).operation) for (header,) in headers)
    points = connection.execute("SELECT point FROM history WHERE run_id = ?", (run_id,))
    recorded = {pb.HistoryPoint.FromString(point).loss_fn for (point,) in points}
    return recorded | {call.loss_fn for call in calls if call is not None}


def _without_losses(facts: Mapping[str, str], used: Collection[str]) -> dict[str, str]:
    """Facts without those of losses but these."""
    return {
        name: value for name, value in facts.items() if not name.startswith(LOSS) or name.removeprefix(LOSS) in used
    }


def note_facts(
    connection: sqlite3.Connection, run_id: str, seq: int, facts: Mapping[str, str], note: str = ""
) -> pb.RunChange:
    """Store what a run is computed with after operation ``seq``; see :meth:`RunFacts.note`."""
    at = time.time()
    query = "INSERT INTO computed_with (run_id, seq, at, facts, note) VALUES (?, ?, ?, ?, ?)"
    connection.execute(query, (run_id, seq, at, json.dumps(dict(facts), sort_keys=True), note))
    return pb.RunChange(seq=seq, time=at, note=note)


def way_out(run_id: str) -> str:
    """Say what to do about a run that would not go on as it was, in a sentence."""
    return (
        f"Put back what changed; or let the run go on with it: its owner by `gradwire runs accept {run_id}` or"
        " accept_changes(), or a start of the server with --accept-changes for all runs"
    )


def compare(
    before: journal_pb2.Outcome, result: pb.OperationResult, payload: Buffer, *, exact: bool
) -> tuple[bool, str]:
    """Compare what repeating an operation gave with what it had given.

    Args:
        exact: Whether bits are compared, if both were computed in the same pieces.

    Returns:
        Whether bits were compared; how the two differ, in words, empty if they are the same.
    """
    now = outcome(result, digest_of([payload]))
    exact = exact and is_comparable(before, now)
    return exact, divergence(before, now, exact=exact)


def is_comparable(before: journal_pb2.Outcome, now: journal_pb2.Outcome) -> bool:
    """Whether both were computed in the same pieces, so that a CPU gives the same bits."""
    one, two = loss_result(before.result), loss_result(now.result)
    pieces = one.num_microbatches == two.num_microbatches and one.recomputed == two.recomputed
    if one.activations:  # an earlier version did not say, and kept them
        pieces = pieces and dict(one.activations) == dict(two.activations)
    return pieces and max(one.grouped_runs, two.grouped_runs) <= 1


def divergence(before: journal_pb2.Outcome, now: journal_pb2.Outcome, *, exact: bool) -> str:
    """How two outcomes of an operation differ, in words; empty if they are the same.

    Args:
        exact: Whether bits are compared, and not losses and gradient norms within :data:`TOLERANCE`.
    """
    one, two = before.result, now.result
    for name, was, is_now in (
        ("loss", loss_result(one).loss, loss_result(two).loss),
        ("gradient norm", step_result(one).grad_norm, step_result(two).grad_norm),
    ):
        both_nan = math.isnan(was) and math.isnan(is_now)
        if not both_nan and not (was == is_now if exact else math.isclose(was, is_now, rel_tol=TOLERANCE)):
            return f"its {name} {_apart(was, is_now)}"
    if not exact:
        return ""
    if _computed(one).SerializeToString(deterministic=True) != _computed(two).SerializeToString(deterministic=True):
        was_said, says = (dict(_leaves(json_format.MessageToDict(_computed(each)))) for each in (one, two))
        name = next(name for name in {**was_said, **says} if was_said.get(name) != says.get(name))
        return f"its {name} {_apart(was_said.get(name, 'nothing'), says.get(name, 'nothing'))}"
    return "" if before.payload_digest == now.payload_digest else "its tensors are others"


def _apart(was: object, is_now: object) -> str:
    """Two values, and the difference of numbers."""
    numbers = isinstance(was, float) and isinstance(is_now, float) and math.isfinite(was) and math.isfinite(is_now)
    by = f" ({is_now - was:+.3g})" if numbers else ""  # type: ignore[operator]
    return f"was {was!s:.100} and is {is_now!s:.100}{by}"


def _leaves(content: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The values of a message as JSON, by name."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(content, list):
        for place, value in enumerate(content):
            yield from _leaves(value, f"{name}[{place}]")
    else:
        yield name, content


def _computed(result: pb.OperationResult) -> pb.OperationResult:
    """The computed part of a result, without how it was computed."""
    kept = pb.OperationResult()
    kept.CopyFrom(result)
    if has_loss(kept):
        for name in ("activations", "limits"):
            loss_result(kept).ClearField(name)
    if kept.HasField("checkpoint"):
        kept.checkpoint.ClearField("created_at")
    return kept
