"""The link of one run to the server: opens the run, sends and resends operations, receives results.

One task keeps a stream of operations open and, after a broken connection, resends exactly the unacknowledged
operations. Two others receive the results and tell the server which it may delete (:class:`ResultStream`). Sender and
receiver back off after consecutive failures and give up after the transport's patience.

The kind of an error decides what ends. A transient error (the server is away or at fault, its disk or the run's queue
is full) ends nothing: the request is repeated. An error about one operation ends that operation. An error about the
right to write ends writing; acknowledged operations still get their results. Results that the server has deleted fail
the futures of those results. If no more results can arrive, because the run or the key is gone or the server stays
away, everything fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire import errors
from gradwire.errors import (
    ConnectionLostError,
    GradwireError,
    InternalServerError,
    InvalidArgumentError,
    LimitExceededError,
    ResultReleasedError,
    RewoundError,
    RunParkedError,
    SequenceGapError,
    ServerError,
    ServiceClosedError,
    StaleEpochError,
)
from gradwire.futures import Future
from gradwire.wire.entries import Entry, Request
from gradwire.wire.lease import Lease
from gradwire.wire.queue import Decode, OperationQueue
from gradwire.wire.streams import SubmitStream
from gradwire.wire.transport import Transport

logger = logging.getLogger("gradwire")


ACK_INTERVAL_S = 0.25
"""Seconds between two calls that let the server delete results; each costs as much as a short operation's messages."""
MAX_ACK_INTERVAL_S = 5.0
PATIENCE_S = 20.0
"""Seconds without a result after which the server is asked what the run waits for."""

PASSING = (ConnectionLostError, ServerError, LimitExceededError)
"""Errors that a stream may meet at one time and not at the next."""


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


FULL_INTERVAL_S = 0.5
CLOSE_PATIENCE_S = 10.0
OPERATION_TRIES = 3
SENT_TOGETHER = 64
MOST_CANCELS = 8

AWAY = (*errors.RETRYABLE, RunParkedError)
"""Errors of a server that cannot answer now; transient."""
WRITER = (errors.WriterError, errors.AccessError, errors.UnknownRunError)
"""Errors that refuse the writer: every later operation would meet them as well."""


class RunLink:
    """Connects a queue of operations, which it makes, with the server.

    Args:
        run_id: The run.
        loop: The event loop that receives results.
        transport: The channel.
        takeover: Whether opening the run fences another writer.
        window: How far beyond the oldest operation that is still being built others are sent.
        max_in_flight: Number of operations sent before the server has answered the first of them.
        max_payload_bytes: Larger operations are refused on the client; None asks the server for its limit.

    Attributes:
        queue: The run's operations.
    """

    def __init__(
        self,
        run_id: str,
        loop: asyncio.AbstractEventLoop,
        transport: Transport,
        *,
        takeover: bool = True,
        window: int = 256,
        max_in_flight: int = 1024,
        max_payload_bytes: int | None = None,
    ) -> None:
        self.queue = OperationQueue(run_id, loop, self, max_payload_bytes=max_payload_bytes)
        self._transport = transport
        self._window = window
        self._max_in_flight = max_in_flight
        self._lease = Lease(self.queue, transport, takeover)
        self.results_of = ResultStream(self.queue, transport, self._lease, self._wake_sender, self._broken)
        self._opening: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self._may_reopen = False
        self._fence: GradwireError | None = None
        self._send_work = asyncio.Event()
        self._out_of_turn: list[Entry] = []
        self._cancels = asyncio.Semaphore(MOST_CANCELS)

    async def open(self) -> None:
        """Acquire the run, if this has not happened yet."""
        if self.queue.dead is not None:
            raise self.queue.dead
        if self._opening is None:
            self._opening = asyncio.create_task(self._lease.open())
        try:
            await asyncio.shield(self._opening)
        except GradwireError as error:
            self._die(error)
            raise
        except asyncio.CancelledError:
            if self._opening.cancelled() and self.queue.dead is not None:
                raise self.queue.dead from None
            raise

    async def adopt(self, decode_result: Decode[Any]) -> dict[int, Future[Any]]:
        """Return futures for operations that were pending, with unacknowledged results, when the run was opened.

        Raises:
            InvalidArgumentError: This client has already sent operations; their results released the earlier ones.
        """
        await self.open()
        if self._started:
            raise InvalidArgumentError(
                "call earlier_operations() before the first operation: each result received releases the earlier ones"
            )
        released = self._lease.released
        self.results_of.next_index = released - self.queue.base + 1
        first, last = released + 1, self.queue.base
        futures = {seq: self.queue.adopt(seq, decode_result) for seq in range(first, last + 1)}
        if futures:
            self.submitted()
        return futures

    async def discard(self) -> int:
        """Cancel every operation of the parked run that has no result; return their number."""
        await self.open()
        request = pb.DiscardPendingRequest(run_id=self.queue.run_id, epoch=self._lease.epoch)
        answer = await self._transport.unary(lambda stub: stub.DiscardPending, request)
        return int(answer.num_discarded)

    async def close(self, error: GradwireError) -> None:
        """Wait, for a limited time, until submitted operations are acknowledged; fail those without a result."""
        if self._started and self.queue.dead is None:
            try:
                async with asyncio.timeout(CLOSE_PATIENCE_S):
                    for entry in self.queue.unsent:
                        await entry.acknowledged.wait()
            except TimeoutError:
                self._say_lost(f"the server did not answer within {CLOSE_PATIENCE_S:g} s")
        self._die(error)
        tasks = [task for task in (*self._tasks, self._opening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- called by the queue, on the event loop

    def submitted(self) -> None:
        self._wake_sender()
        self.results_of.expect()
        if not self._started and self.queue.dead is None:
            self._started = True
            self._spawn(self._guarded(self._send, self._writes_no_more))
            self._spawn(self._guarded(self.results_of.receive, self._die))
            self._spawn(self._guarded(self.results_of.acknowledge, self._die))
            self._spawn(self._guarded(self.results_of.watch, self._die))

    def filled(self, entry: Entry) -> None:
        self._out_of_turn.append(entry)
        self._send_work.set()

    def cancel(self, entry: Entry) -> None:
        async def cancel() -> None:
            await entry.acknowledged.wait()
            await self._ask_to_cancel(entry)

        self._spawn(cancel())

    def watch_deadline(self, entry: Entry, at: float) -> None:
        """Ask the server, once an operation's deadline has passed, whether it is still to be executed."""

        def passed() -> None:
            if self.queue.waits(entry):
                self._spawn(self._ask_to_cancel(entry, if_expired=True))

        self.queue.loop.call_at(at, passed)

    async def _ask_to_cancel(self, entry: Entry, *, if_expired: bool = False) -> None:
        request = pb.CancelRequest(
            run_id=self.queue.run_id,
            seq=self.queue.base + entry.index,
            epoch=self._lease.epoch,
            if_expired=if_expired,
        )
        with contextlib.suppress(GradwireError):  # Too late, or deleted: the operation's own result reports it.
            async with self._cancels:
                answer = await self._transport.unary(lambda stub: stub.Cancel, request)
            if answer.HasField("error"):
                self.queue.decide(entry, errors.from_wire(answer.error))

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[[], Awaitable[None]], give_up: Callable[[GradwireError], None]) -> None:
        """Run one of the tasks and apply its end to the operations."""
        try:
            await self.open()
            await work()
        except GradwireError as error:
            if isinstance(error, ConnectionLostError):
                error.add_note(f"once the server is back, continue with get_training_client({self.queue.run_id!r})")
            give_up(error)
        except asyncio.CancelledError:
            self._say_lost(
                "the event loop ended first: use `async with gradwire.connect(...)`, or `await service.close()`"
            )
            self._die(ServiceClosedError("the service was closed before the result came"))
            raise
        except Exception as error:  # A bug in the link must fail the waiting operations, not leave them waiting.
            logger.exception("the link of %s stopped", self.queue.run_id)
            self._die(InternalServerError(f"the client's link of {self.queue.run_id} stopped: {error!r}"))

    def _say_lost(self, reason: str) -> None:
        lost = len(self.queue.unsent)
        if lost:
            logger.warning(
                "%s: %d submitted operations may not have reached the server, because %s",
                self.queue.run_id, lost, reason,
            )  # fmt: skip

    def _writes_no_more(self, error: GradwireError) -> None:
        if isinstance(error, RewoundError):  # acknowledged operations were discarded by a restore
            self._die(error)
        else:
            self.queue.fence(error)

    def _die(self, error: GradwireError) -> None:
        self.queue.die(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    # ---- operations

    def _wake_sender(self) -> None:
        self._send_work.set()

    async def _send(self) -> None:
        backoff = self._transport.backoff()
        while True:
            while self.queue.first_unacknowledged is None:
                self._send_work.clear()
                await self._send_work.wait()
            try:
                await self._send_session(backoff.progress)
            except StaleEpochError as stale:
                if not self._may_reopen:
                    raise
                self._may_reopen = False
                await self._lease.reopen(stale)
            except LimitExceededError as error:  # the run's queue on the server is full; it drains as the server works
                logger.debug("%s: %s", self.queue.run_id, error)
                await asyncio.sleep(FULL_INTERVAL_S)
            except (*PASSING, SequenceGapError) as error:
                await self._broken(error, bool(self.queue.unsent), backoff.pause)

    async def _broken(
        self, error: GradwireError, waiting: bool, pause: Callable[[GradwireError], Awaitable[None]]
    ) -> None:
        self._may_reopen = True
        if waiting:
            logger.debug("%s: %s", self.queue.run_id, error)
            self._transport.check_alive()
            await pause(error)

    async def _send_session(self, progress: Callable[[], None]) -> None:
        """Run one stream until it breaks: write unacknowledged and new operations, read acknowledgements."""
        self._fence = None
        stream = self._transport.submit()
        reading = asyncio.create_task(self._read_acknowledgements(stream, progress))
        writing = asyncio.create_task(self._write(stream))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            # The writer noticed the end first; the reader learns the reason and which numbers are accepted.
            if not reading.done():
                await asyncio.wait((reading,), timeout=1.0 if self._fence is None else self._transport.patience_s)
            for task in (reading, writing):
                if task.done():
                    task.result()
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
            stream.cancel()

    async def _write(self, stream: SubmitStream) -> None:
        """Write operations in order, skipping a number whose content is not ready; it is written once it is."""
        self._out_of_turn.clear()
        index = self.queue.first_unacknowledged or self.queue.last_index + 1
        missing: set[int] = set()
        while self._fence is None:
            self._send_work.clear()
            ready: list[tuple[pb.OperationHeader, bytes]] = []
            while self._out_of_turn:
                entry = self._out_of_turn.pop(0)
                missing.discard(entry.index)
                if entry.index < index:
                    self._add_ready(entry, ready)
            while len(ready) < SENT_TOGETHER and index <= min(
                self.queue.last_index,
                min(missing, default=index) + self._window,
                self.results_of.next_index + self._max_in_flight - 1,
            ):
                pending = self.queue.unacknowledged(index)
                if pending is not None and not self._add_ready(pending, ready):
                    missing.add(index)
                index += 1
            if ready:
                await stream.send(ready)
            elif not self._out_of_turn:
                await self._send_work.wait()
        await stream.end()

    def _add_ready(self, entry: Entry, ready: list[tuple[pb.OperationHeader, bytes]]) -> bool:
        request = entry.request
        if request is None:
            return False
        ready.append((self.queue.header(entry, request, self._lease.epoch), request.payload))
        return True

    async def _read_acknowledgements(self, stream: SubmitStream, progress: Callable[[], None]) -> None:
        """Read until the stream ends.

        A fenced writer keeps reading: operations accepted earlier are still acknowledged. If the connection breaks
        meanwhile, they are asked for again on the next stream.
        """
        async with contextlib.aclosing(stream.acknowledgements()) as acknowledgements:
            async for ack in acknowledgements:
                entry = self.queue.unacknowledged(ack.seq - self.queue.base)
                if ack.HasField("error"):
                    self._refused(entry, errors.from_wire(ack.error))
                    continue
                progress()
                if not ack.duplicate:  # a fenced writer is told, too, of what was accepted from it
                    self._may_reopen = False
                if entry is not None:
                    self.queue.acknowledge(entry)
        raise self._fence or ConnectionLostError(f"{self._transport.address} ended the stream of operations")

    def _refused(self, entry: Entry | None, error: GradwireError) -> None:
        """Handle an operation that the server refused without taking its number."""
        if isinstance(error, ResultReleasedError):  # but the server accepted this one on an earlier stream
            if entry is not None:
                self.queue.acknowledge(entry)
        elif isinstance(error, (*AWAY, LimitExceededError, SequenceGapError)):
            raise error
        elif isinstance(error, WRITER):
            self._stop_writing(error)
        elif entry is None:  # it was acknowledged on an earlier stream; its result tells the outcome
            logger.debug("%s: %s", self.queue.run_id, error)
        # the placeholder of a failed operation was refused as well, and later operations wait for its number
        elif entry.cause is not None:
            self._stop_writing(error)
        else:
            entry.tries += 1
            if isinstance(error, ServerError) and entry.tries < OPERATION_TRIES:
                raise error
            # Later operations wait for this number: an operation that fails takes it, and they fail with it.
            entry.cause = error
            entry.request = Request.abandoned(0, f"refused: {error}")
            self.filled(entry)

    def _stop_writing(self, error: GradwireError) -> None:
        self._fence = self._fence or error
        self._send_work.set()
