"""The results of one run, as the server streams them: received in order, and acknowledged so that the server deletes
them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import (
    ConnectionLostError,
    GradwireError,
    InternalServerError,
    LimitExceededError,
    ResultReleasedError,
    ServerError,
)
from gradwire.wire.lease import Lease
from gradwire.wire.queue import OperationQueue
from gradwire.wire.transport import Transport

ACK_INTERVAL_S = 0.25
"""Seconds between two calls that let the server delete results; each costs as much as a short operation's messages."""
MAX_ACK_INTERVAL_S = 5.0
PATIENCE_S = 20.0
"""Seconds without a result after which the server is asked what the run waits for."""

PASSING = (ConnectionLostError, ServerError, LimitExceededError)
"""Errors that a stream may meet at one time and not at the next."""

logger = logging.getLogger("gradwire")

Broken = Callable[[GradwireError, bool, Callable[[GradwireError], Awaitable[None]]], Awaitable[None]]
"""Called when the stream broke with the error, whether an operation waits, and the pause before the next attempt."""


class ResultStream:
    """Receives the results of one run and resumes by number when the stream breaks.

    Args:
        queue: The operations that wait for results.
        lease: The right to acknowledge them.
        on_progress: Called after each result.
        broken: See :data:`Broken`.

    Attributes:
        next_index: Index of the next result; see :class:`.entries.Entry`.
    """

    def __init__(
        self,
        queue: OperationQueue,
        transport: Transport,
        lease: Lease,
        on_progress: Callable[[], None],
        broken: Broken,
    ) -> None:
        self._queue, self._transport, self._lease = queue, transport, lease
        self._on_progress, self._broken = on_progress, broken
        self._outstanding = asyncio.Event()
        self._to_acknowledge = asyncio.Event()
        self.next_index = 1

    def expect(self) -> None:
        """Receive: an operation waits for its result."""
        self._outstanding.set()

    async def receive(self) -> None:
        backoff = self._transport.backoff()
        while True:
            while not self._queue.unfinished:
                self._outstanding.clear()
                await self._outstanding.wait()
            try:
                await self._read(backoff.progress)
            except PASSING as error:
                await self._broken(error, self._queue.unfinished, backoff.pause)

    async def _read(self, progress: Callable[[], None]) -> None:
        """Read one stream until it breaks or reaches results that were released."""
        from_seq = self._queue.base + self.next_index
        try:
            async with contextlib.aclosing(self._transport.results(self._queue.run_id, from_seq)) as results:
                async for result, payload in results:
                    progress()
                    self.next_index = max(self.next_index, result.seq - self._queue.base + 1)
                    self._queue.deliver(result, payload)
                    self._to_acknowledge.set()
                    self._on_progress()
        except ResultReleasedError as error:
            run = await self._transport.unary(lambda stub: stub.GetRun, pb.GetRunRequest(run_id=self._queue.run_id))
            if run.released_seq < self._queue.base + self.next_index:
                raise InternalServerError(
                    f"the server reports released results that were not acknowledged: {error}"
                ) from error
            self._queue.released(run.released_seq)
            self.next_index = run.released_seq - self._queue.base + 1
            self._on_progress()
            return
        raise ConnectionLostError(f"{self._transport.address} ended the stream of results")

    async def watch(self) -> None:
        """Say what keeps a run, besides its turn, whenever that becomes something else."""
        said = ""
        while True:
            await self._outstanding.wait()
            before = self.next_index
            await asyncio.sleep(PATIENCE_S)
            if self.next_index > before or not self._queue.unfinished:
                continue
            request = pb.GetRunRequest(run_id=self._queue.run_id)
            try:
                run = await self._transport.unary(lambda stub: stub.GetRun, request, patience_s=0.0)
            except GradwireError as error:  # those who wait for the result are told
                logger.debug("%s: %s", self._queue.run_id, error)
                continue
            if run.waits_for not in ("", said):
                logger.warning("%s waits for %s", self._queue.run_id, run.waits_for)
            said = run.waits_for

    async def acknowledge(self) -> None:
        """Let the server delete received results. Nothing waits for this call, so its errors end nothing."""
        interval_s = ACK_INTERVAL_S
        while True:
            await self._to_acknowledge.wait()
            await asyncio.sleep(interval_s)
            self._to_acknowledge.clear()
            up_to = self._queue.base + self.next_index - 1
            request = pb.AckResultsRequest(run_id=self._queue.run_id, up_to_seq=up_to, epoch=self._lease.epoch)
            try:
                await self._transport.unary(lambda stub: stub.AckResults, request, patience_s=0.0)
                interval_s = ACK_INTERVAL_S
            except PASSING as error:
                logger.debug("%s: %s", self._queue.run_id, error)
                interval_s = min(2 * interval_s, MAX_ACK_INTERVAL_S)
                self._to_acknowledge.set()
            except GradwireError as error:  # Fenced (another client acknowledges now), or the run is gone.
                logger.debug("%s: %s", self._queue.run_id, error)
