"""Parking of runs that cannot go on for now.

A parked run executes nothing and accepts nothing. Its accepted operations keep their numbers, get no results and are
not checked again. A run is parked if it cannot be restored in the engine, for example because the server was started
without its model, because memory is short or because a checkpoint is damaged. It is tried again after a pause, and goes
on by itself once the cause is gone; at the latest the next start of the server tries it.

To park a run for a reason of your own:
  * While it is restored, raise :class:`CannotRestore` from :func:`.replay.restore` or from what that calls, before the
    first operation is repeated if the run must not be computed at all. Any other error of a restore parks the run too.
  * At any other time, call :meth:`Parking.park`, and :meth:`Parking.release` once the reason is gone.
With ``again=False`` the run is not tried again until :meth:`Parking.release` or the next start of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.scheduling.operation import QueuedOperation
from gradwire_server.scheduling.run_queue import RunQueue

T = TypeVar("T")

log = logging.getLogger(__name__)

PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Seconds until a parked run is tried again: after the first failure, the second, and so on."""


class CannotRestore(Exception):
    """A run cannot be restored in the engine, and is to be parked.

    Attributes:
        error: The reason, for the run's owner.
        again: Whether to try again after a pause.
    """

    def __init__(self, error: pb.Error, *, again: bool = True) -> None:
        super().__init__(error.message)
        self.error, self.again = error, again


class Parking:
    """Parks runs, tries them again, and lets them go on.

    Args:
        wake: Continues a queue that may go on.
        changed: Called whenever a run is parked or goes on.
    """

    def __init__(self, wake: Callable[[RunQueue], None], changed: Callable[[], object]) -> None:
        self._wake, self._changed = wake, changed

    def park(self, queue: RunQueue, error: pb.Error, *, again: bool = True) -> None:
        """Park a run, which then executes nothing; operations that the engine has begun are executed again later.

        Args:
            error: The reason, for the run's owner: what is wrong, and what to do.
            again: Whether to try again after a pause.
        """
        before, record = queue.parked, queue.record
        queue.park(error)
        if before is None or before.error.message != error.message:
            code = pb.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
            log.warning(
                "run %s is parked (operations waiting: %d): %s (%s)", record.run_id, len(queue.pending),
                error.message, code, extra={"run_id": record.run_id},
            )  # fmt: skip
        self._changed()
        if again and queue.parked is not None:
            pause = PAUSES_S[min(queue.parked.attempts, len(PAUSES_S)) - 1]
            asyncio.get_running_loop().call_later(pause, self._try_again, queue, queue.parked)

    def release(self, queue: RunQueue) -> None:
        """Let a parked run go on; it is parked again if it still cannot be restored."""
        if queue.parked is not None:
            queue.go_on()
            self._changed()
            self._wake(queue)

    def executed(self, queue: RunQueue, operation: QueuedOperation, outcome: T) -> T | None:
        """Take note of the outcome of an operation of a parked run.

        If the run was being tried again, whatever parked it is gone, and the run goes on. Otherwise the operation was
        sent before the run was parked: its outcome is dropped, and it is executed again later.
        """
        if queue.parked is None or not queue.parked.trying:
            queue.died(operation, suspect=False)
            return None
        log.warning("run %s goes on", queue.record.run_id, extra={"run_id": queue.record.run_id})
        queue.go_on()
        self._changed()
        return outcome

    def _try_again(self, queue: RunQueue, parked: object) -> None:
        if queue.parked is not parked or queue.closed is not None:
            return
        if not queue.pending:  # all of it was cancelled: the next operation finds out whether the cause is gone
            self.release(queue)
            return
        queue.try_again()
        self._wake(queue)
