"""The agreement of an engine's processes on facts that are found while they execute a decision.

A decision (:mod:`.operations.decisions`) holds everything that can be known before its execution. What cannot goes
through one object, which is handed to whoever executes: whether an operation was cancelled or is late, how much memory
is free, how long work takes, and whether a piece of work failed or ran out of memory. In an engine of one process, each
is what this process sees.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from gradwire_proto.v1 import engine_pb2, training_pb2
from torch import Tensor

from gradwire_server.engine import machine
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal, is_out_of_memory
from gradwire_server.engine_link.crash_marks import CrashMarks

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An error that all processes agree on. ``out_of_memory``: a smaller attempt may succeed."""

    error: Exception
    out_of_memory: bool


class Agreement:
    """The agreement of an engine of one process, and the base of those of several.

    Args:
        marks: The page on which the front withdraws and stops requests; None without a front.

    Attributes:
        lock_step: Whether models are divided among the processes: each forward and backward is one of all of them at
            the same time, though of other rows.
    """

    rank, ranks = 0, 1
    lock_step = False

    def __init__(self, marks: CrashMarks | None = None) -> None:
        self._marks = marks

    def begin(self, request_ids: Sequence[int]) -> list[bool]:
        """Mark requests as begun, for a decision: the first, and the others as far as there is room for marks.

        Returns:
            For each request that the decision may hold, whether it begins; False if the front has withdrawn it.
        """
        return [True] * len(request_ids) if self._marks is None else self._marks.begin(request_ids)

    def ended(self, request: engine_pb2.EngineRequest) -> OperationError | None:
        """For a decision: the error that a begun request ends with, if it is not to be executed further.

        Returns:
            CANCELLED if the front has asked to stop it, DEADLINE_EXCEEDED, or None.
        """
        asked = request.operation
        if self._marks is not None and self._marks.stops(request.id):
            return OperationError(
                training_pb2.ERROR_CODE_CANCELLED,
                f"operation {asked.seq} was cancelled while it was executed; the run is as it was before it",
            )
        if 0 < asked.deadline < time.monotonic():
            return OperationError(
                training_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
                f"operation {asked.seq} was not done when its timeout was over; the run is as it was before it",
                field="timeout",
            )
        return None

    def check(self, request: engine_pb2.EngineRequest) -> None:
        """Check that a begun request is to be executed further; called between micro-batches and between tokens.

        Raises:
            OperationError: As of :meth:`ended`.
        """
        error = self.ended(request)
        if error is not None:
            raise error

    def free_memory(self, device: torch.device) -> int:
        """Bytes that each process may allocate at present."""
        return machine.free_memory(device)

    def seconds_on(self, device: torch.device, work: Callable[[], object]) -> float:
        """Seconds of work on a GPU, measured to choose by."""
        return machine.seconds_on(device, work)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Execute the body in every process: what one of them raises, all raise at its end.

        The body changes nothing that an error does not undo, because it may succeed in one process and fail in another.

        Args:
            what: Names the body; processes that are in different ones are out of step.
        """
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        """Execute the body, of other requests, in the middle of a piece of work."""
        return nullcontext()

    def once(self, work: Callable[[], T]) -> T | None:
        """Do work in one process only, because it changes what all share, such as files; None in the others."""
        return work()

    def confirm(self, answer: engine_pb2.EngineReply) -> None:
        """Confirm that every process has come to the same answer, before it is sent."""

    def alike(self, what: str, digest: Callable[[], int]) -> None:
        """Confirm that every process has the same digest of what each keeps a copy of."""

    def attempt(self, work: Callable[[], T], *, own: bool = False) -> T | Failure:
        """Do work in every process, which may fail; where memory ran out, what the work held is freed.

        Args:
            own: The work is another in each process, and may fail in some of them only.

        Raises:
            Exception: The error, if the process cannot continue after it.
        """
        result: list[T] = []
        failure: Failure | None = None
        try:
            result.append(work())
            if (late := self._deferred()) is not None:
                failure = Failure(late, is_out_of_memory(late))
        except Exception as error:
            if is_fatal(error):
                raise
            failure = Failure(error, is_out_of_memory(error))
        if not own:
            self._confirm_failure(failure)
        if failure is None:
            return result[0]
        if failure.out_of_memory:  # outside the handler, because the traceback keeps the computed tensors alive
            failure.error.__traceback__ = None
            result.clear()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return failure

    def unless_out_of_memory(self, work: Callable[[], T], *, alone: bool = False) -> T | None:
        """Return the work's result, or None if memory ran out in any process; then what the work held is freed.

        Args:
            alone: The work cannot be made smaller, so running out of memory raises.
        """
        result = self.attempt(work)
        if not isinstance(result, Failure):
            return result
        if alone or not result.out_of_memory:
            raise result.error
        return None

    def _confirm_failure(self, failure: Failure | None) -> None:
        """Confirm that an attempt has ended alike in every process."""

    def _deferred(self) -> Exception | None:
        """An error of the work that has ended, after which it went on with the collectives that it owed the others."""
        return None

    def greatest(self, own: int, after: Exception | None = None) -> int:
        """The greatest of all processes' numbers.

        Args:
            after: The error that this process has met since, if it has: in lock step, the others that still wait for it
                elsewhere are not waited for.
        """
        return own

    def gathered(self, own: bytes) -> list[bytes]:
        """Every process's bytes, by rank."""
        return [own]

    def exchanged(self, peer: int, own: Tensor, theirs: Tensor, longest: int) -> Tensor:
        """Exchange flat tensors on the host with another process, while all others do so, too.

        Args:
            theirs: Is filled with the other's, and returned.
            longest: Numbers of the longest tensor that any process gives.
        """
        raise NotImplementedError
