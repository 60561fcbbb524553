"""Two operations of which the second is built from the first one's result, as one call of the user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import DeadlineExceededError, OperationCancelledError
from gradwire.results import Columns
from gradwire.wire.entries import Entry, Request, Sender


class Queue(Protocol):
    """The members of a queue that a pair uses. A protocol, as :mod:`.queue` imports this module.

    Attributes:
        base: Number of the run's last operation when the client opened it.
        loop: The event loop that receives results.
        computing: The tasks that build second halves; they end with the queue.
        sender: Sends a second half that has its request, and cancels.
    """

    base: int
    loop: asyncio.AbstractEventLoop
    computing: set[asyncio.Task[None]]
    sender: Sender

    def waits(self, entry: Entry) -> bool: ...


class Pair:
    """The second half's way from the first one's result to its request, on the event loop.

    Args:
        queue: The queue that holds both.
        second: The second half, whose number is reserved and whose request is missing.
        compute: Builds its request from the first result, in a worker thread. Its exception is raised to the user, and
            the second half is abandoned.

    Attributes:
        first: The first half.
    """

    first: Entry

    def __init__(self, queue: Queue, second: Entry, compute: Callable[[pb.OperationResult, Columns], Request]) -> None:
        self._queue, self._second, self._compute = queue, second, compute
        self._filled = False

    def start(self, result: pb.OperationResult, columns: Columns) -> None:
        """Build the second half from the first one's result."""
        queue, deadline = self._queue, self.first.deadline
        task = queue.loop.create_task(self._work(result, columns))
        queue.computing.add(task)
        task.add_done_callback(queue.computing.discard)
        if deadline is not None:
            timer = queue.loop.call_at(deadline, self._too_slow)
            task.add_done_callback(lambda _: timer.cancel())

    def give_up(self, cause: BaseException) -> None:
        """Abandon the second half."""
        if not self._filled:
            self._second.cause = cause
            first_seq = self._queue.base + self.first.index
            self._fill(Request.abandoned(first_seq, f"{type(cause).__name__}: {cause}"))
        if isinstance(cause, (DeadlineExceededError, OperationCancelledError)):
            self._second.on_error(cause)  # nothing of the pair is executed any more

    def cancel(self) -> None:
        """Cancel the half whose turn it is."""
        if self._queue.waits(self.first):
            self._queue.sender.cancel(self.first)
        elif self._filled:
            self._queue.sender.cancel(self._second)
        else:
            label = self._second.label
            self.give_up(OperationCancelledError(f"{label} was cancelled before its gradients were sent"))

    async def _work(self, result: pb.OperationResult, columns: Columns) -> None:
        try:
            self._fill(await asyncio.to_thread(self._compute, result, columns))
        except Exception as error:  # the user's own code: its exception is raised to the user
            self.give_up(error)

    def _fill(self, request: Request) -> None:
        if self._filled:
            return
        self._filled, self._second.request = True, request
        if self.first.deadline is not None:
            self._second.timeout_s = max(self.first.deadline - self._queue.loop.time(), 1e-3)
        self._queue.sender.filled(self._second)

    def _too_slow(self) -> None:
        self.give_up(DeadlineExceededError(f"{self._second.label} was not done when its timeout was over"))
