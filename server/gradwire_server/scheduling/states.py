"""The states of an operation and the transitions between them; the parked state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gradwire_proto.v1 import training_pb2 as pb


class OperationState(Enum):
    """State of one submitted operation. Only its :class:`.run_queue.RunQueue` changes it.

    docs/architecture.md draws the states, and says what moves an operation from one to another.

    Attributes:
        NEW: Not accepted by a queue.
        WAITING: In memory and unacknowledged until the numbers before it have arrived.
        WRITING: Being written to the journal.
        EARLY: Being written to the journal, and sent to the engine or about to be.
        CANCELLING: Cancelled, and to be written to the journal before its result.
        QUEUED: In the journal, and waiting for its turn.
        SENT: In the journal, and sent to the engine or about to be.
        FINISHED: Has its result, which is being stored or is stored.
        DROPPED: Removed without a result; its number is free again, or its run is gone.
    """

    NEW = "new"
    WAITING = "waiting"
    WRITING = "writing"
    EARLY = "early"
    CANCELLING = "cancelling"
    QUEUED = "queued"
    SENT = "sent"
    FINISHED = "finished"
    DROPPED = "dropped"
    __hash__ = object.__hash__  # Enum's own is a function in Python


_S = OperationState
TRANSITIONS: Mapping[OperationState, frozenset[OperationState]] = {
    _S.NEW: frozenset({_S.WAITING, _S.QUEUED}),
    _S.WAITING: frozenset({_S.WRITING, _S.CANCELLING, _S.DROPPED}),
    _S.WRITING: frozenset({_S.QUEUED, _S.EARLY, _S.CANCELLING, _S.DROPPED}),
    _S.EARLY: frozenset({_S.SENT, _S.WRITING, _S.CANCELLING, _S.DROPPED}),
    _S.CANCELLING: frozenset({_S.FINISHED, _S.DROPPED}),
    _S.QUEUED: frozenset({_S.SENT, _S.FINISHED, _S.DROPPED}),
    _S.SENT: frozenset({_S.QUEUED, _S.FINISHED, _S.DROPPED}),
    _S.FINISHED: frozenset(),
    _S.DROPPED: frozenset(),
}
"""The states that may follow each state, as drawn in :class:`OperationState`."""

UNSENT = (_S.WRITING, _S.QUEUED)
"""The states of an operation that may be sent to the engine."""

JOURNALED = (_S.QUEUED, _S.SENT)
"""The states of an operation that is in the journal and may still be executed."""


class IllegalTransitionError(RuntimeError):
    """A fault of the server: an operation was moved to a state that may not follow its present one."""


@dataclass(eq=False)
class Parked:
    """The parked state of a run.

    Attributes:
        error: The reason.
        since: Unix time in seconds.
        attempts: Number of failures in a row.
        trying: Whether the run is being tried again.
    """

    error: pb.Error
    since: float
    attempts: int = 1
    trying: bool = False
