"""The operations of one run in program order: numbered at the call, from any thread, and kept until they have results.

A failure counts as *seen* once it was raised to the user. An operation that was submitted before the failure of an
earlier one was seen fails as well, up to and including the next ``optim_step`` or ``train_step``. The server decides
this for operations that reached it; :class:`OperationQueue` decides it for operations that the client refused before
they had a number. A deadline that passes in the queue is raised before the operation's turn; having seen it says
nothing about the operations before it.

:class:`gradwire.wire.link.RunLink` is the sender of the operations.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from gradwire_proto.codec import CodecError, decode
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import errors, tracing
from gradwire.errors import (
    AbortedPredecessorError,
    DeadlineExceededError,
    GradwireError,
    InternalServerError,
    LimitExceededError,
    OperationCancelledError,
    ResultReleasedError,
    ServiceClosedError,
)
from gradwire.futures import Future, failed, running_loop
from gradwire.results import Columns
from gradwire.wire.entries import Entry, LocalFailure, Request, Sender, check_timeout
from gradwire.wire.processes import check_not_forked


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


T = TypeVar("T")
Decode = Callable[[pb.OperationResult, Columns], T]

KEPT_FAILURES = 256
STEPS = ("optim_step", "train_step")
"""Labels of the operations that end an accumulation and, where they are aborted, a failure."""


class OperationQueue:
    """Queue of one run's operations.

    Args:
        run_id: The run.
        loop: The event loop that receives results.
        sender: Sends the operations.
        max_payload_bytes: Larger operations are refused on the client; None asks the server for its limit.
    """

    def __init__(
        self, run_id: str, loop: asyncio.AbstractEventLoop, sender: Sender, *, max_payload_bytes: int | None = None
    ) -> None:
        self.run_id = run_id
        self.loop = loop
        self.sender = sender
        self.base = 0
        self.last_index = 0
        self.dead: GradwireError | None = None
        self._max_payload_bytes = max_payload_bytes
        self._lock = threading.Lock()
        self._unfinished: dict[int, Entry] = {}
        self._unacknowledged: dict[int, Entry] = {}
        self._local_failure: LocalFailure | None = None
        self._failure_seen = 0
        self._expired_seen: set[int] = set()
        self._failures: dict[int, BaseException] = {}
        self._early: dict[int, Callable[[Entry], None]] = {}
        self._epochs: set[int] = set()
        self.computing: set[asyncio.Task[None]] = set()

    # ---- calls, from any thread

    def submit(
        self, label: str, build: Callable[[], Request], decode_result: Decode[T], timeout: float | None = None
    ) -> Future[T]:
        """Append an operation. If ``build`` raises, the future fails and no number is taken.

        Args:
            label: The kind of operation; those in :data:`STEPS` end an accumulation.
            build: Builds the request.
            decode_result: Converts the result to the future's value.
            timeout: Seconds after its acceptance from which on the operation fails; None for never.
        """
        built = self._build(build, timeout)
        with self._lock:
            request = self._admit(label, built)
            if isinstance(request, Future):
                future = request
                if label in STEPS and self.last_index and self.dead is None:
                    self._end_accumulation()
            else:
                entry, future = self._entry(label, self.last_index + 1, request, decode_result)
                entry.timeout_s = timeout or 0.0
                self._append(entry)
        self._on_loop(self.sender.submitted)
        return future

    def _end_accumulation(self) -> None:
        """Append a ``zero_grad`` in place of a step that the client refused, because a step always ends its
        accumulation."""
        request = Request.of(pb.Operation(zero_grad=pb.ZeroGrad()))
        index, seen = self.last_index + 1, self._failure_seen
        nobody = Entry(index, "zero_grad", request, seen, lambda *_: None, lambda error: None)
        nobody.expired_seen = tuple(sorted(self._expired_seen))
        self._append(nobody)

    def submit_pair(
        self,
        label: str,
        build: Callable[[], Request],
        compute: Callable[[pb.OperationResult, Columns], Request],
        decode_result: Decode[T],
        timeout: float | None = None,
    ) -> Future[T]:
        """Append an operation and reserve the next number for a second one that is built from its result.

        Args:
            label: The operation's name, for messages.
            build: Builds the first request.
            compute: Builds the second request from the first result, in a worker thread. Its exception is raised to the
                user, and the second operation is abandoned.
            decode_result: Converts the second result to the future's value.
            timeout: Seconds after the acceptance of the first from which on the pair fails; None for never.
        """
        built = self._build(build, timeout)
        with self._lock:
            request = self._admit(label, built)
            if isinstance(request, Future):
                return request
            index = self.last_index + 1
            second, future = self._entry(label, index + 1, None, decode_result, halves=2)
            pair = Pair(self, second, compute)
            pair.first = Entry(
                index, label, request, self._failure_seen, pair.start, pair.give_up, traceparent=second.traceparent,
                timeout_s=timeout or 0.0, expired_seen=second.expired_seen,
            )  # fmt: skip
            future._on_cancel = partial(self._on_loop, pair.cancel)
            self._append(pair.first)
            self._append(second)
        self._on_loop(self.sender.submitted)
        return future

    def adopt(self, seq: int, decode_result: Decode[T]) -> Future[T]:
        """Return a future of an operation that another client submitted before this one opened the run."""
        with self._lock:
            entry, future = self._entry(f"operation {seq}", seq - self.base, None, decode_result)
            self._unfinished[entry.index] = entry
        entry.acknowledged.set()
        return future

    def _build(self, build: Callable[[], Request], timeout: float | None) -> Request | GradwireError:
        check_not_forked()
        try:
            check_timeout(timeout)
            request = build()
        except GradwireError as error:
            return error
        except CodecError as error:
            return errors.InvalidBatchError(str(error), field=error.field, rule=error.rule)
        limit = self._max_payload_bytes
        if limit is not None and len(request.payload) > limit:
            return LimitExceededError(
                f"the batch takes {len(request.payload)} bytes, but an operation may take at most {limit} (the "
                "server's limit max_payload_bytes); split the batch over several forward_backward and call optim_step "
                "once, which gives the same update",
                rule=f"<= {limit} bytes",
            )
        return request

    def _admit(self, label: str, built: Request | GradwireError) -> Request | Future[Any]:
        """Return the request, or the future of an operation that fails before it has a number."""
        if self.dead is not None:
            return failed(label, self.dead)
        if self._local_failure is not None and self._local_failure.seen:
            self._local_failure = None
        cause = self._local_failure
        if cause is not None:
            if label in STEPS:
                self._local_failure = None
            aborted = AbortedPredecessorError(f"not run: an operation before it failed first: {cause.error}")
            aborted.__cause__ = cause.error
            return failed(label, aborted, cause.mark_seen)
        if isinstance(built, GradwireError):
            self._local_failure = LocalFailure(built)
            return failed(label, built, self._local_failure.mark_seen)
        return built

    def _entry(
        self, label: str, index: int, request: Request | None, decode_result: Decode[T], halves: int = 1
    ) -> tuple[Entry, Future[T]]:
        def raised() -> None:
            seq = self.base + index
            with self._lock:
                if index in self._unfinished:  # decided before its turn
                    self._expired_seen.update(range(seq - halves + 1, seq + 1))
                else:
                    self._failure_seen = max(self._failure_seen, seq)

        future: Future[T] = Future(f"{label} of {self.run_id}", self.loop, on_raised=raised)
        span = tracing.start(label, self.run_id)

        def on_result(result: pb.OperationResult, columns: Columns) -> None:
            span.end()
            try:
                future._resolve(decode_result(result, columns))
            except Exception as error:  # an unreadable result must not block the results behind it
                future._fail(InternalServerError(f"the server's result of {label} cannot be read: {error!r}"))

        def on_error(error: BaseException) -> None:
            span.end(error)
            future._fail(error)

        entry = Entry(
            index, label, request, self._failure_seen, on_result, on_error, traceparent=span.traceparent,
            expired_seen=tuple(sorted(self._expired_seen)),
        )  # fmt: skip
        future._on_cancel = partial(self._on_loop, lambda: self.sender.cancel(entry))
        return entry, future

    def _append(self, entry: Entry) -> None:
        self._unfinished[entry.index] = self._unacknowledged[entry.index] = entry
        self.last_index = entry.index

    def _on_loop(self, function: Callable[[], None]) -> None:
        if running_loop() is self.loop:
            function()
            return
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop was closed before the service
            self.die(ServiceClosedError("the event loop of this service is closed"))

    # ---- calls from the link, on the event loop

    @property
    def unfinished(self) -> bool:
        """Whether an operation is waiting for its result."""
        return bool(self._unfinished)

    @property
    def first_unacknowledged(self) -> int | None:
        with self._lock:
            return next(iter(self._unacknowledged), None)

    @property
    def unsent(self) -> list[Entry]:
        """Yield the operations that are ready and not acknowledged."""
        with self._lock:
            return [entry for entry in self._unacknowledged.values() if entry.request is not None]

    def unacknowledged(self, index: int) -> Entry | None:
        return self._unacknowledged.get(index)

    def acknowledge(self, entry: Entry) -> None:
        """Mark an operation as stored by the server and drop its payload."""
        with self._lock:
            self._unacknowledged.pop(entry.index, None)
        entry.request = None
        if entry.timeout_s and entry.deadline is None:
            entry.deadline = self.loop.time() + entry.timeout_s
            self.sender.watch_deadline(entry, entry.deadline)
        entry.acknowledged.set()
        outcome = self._early.pop(entry.index, None)
        if outcome is not None:
            self._settle(entry.index, outcome)

    def header(self, entry: Entry, request: Request, epoch: int) -> pb.OperationHeader:
        self._epochs.add(epoch)
        return pb.OperationHeader(
            run_id=self.run_id,
            epoch=epoch,
            seq=self.base + entry.index,
            operation=request.operation,
            tensors=request.specs,
            payload_bytes=len(request.payload),
            payload_digest=request.digest,
            # Failures before this client opened the run were raised to an earlier writer.
            failure_seen=max(self.base, entry.failure_seen),
            traceparent=entry.traceparent,
            timeout_s=entry.timeout_s,
            expired_seen=entry.expired_seen,
        )

    def deliver(self, result: pb.OperationResult, payload: bytes) -> None:
        """Resolve the operation that a result belongs to. The result of an operation of this client acknowledges it."""
        index = result.seq - self.base
        own = result.epoch and result.epoch in self._epochs
        entry = self._unacknowledged.get(index) if own else None
        if entry is not None:
            self.acknowledge(entry)
        self._settle(index, lambda entry: self._resolve(entry, result, payload))

    def released(self, up_to_seq: int) -> None:
        """Fail the operations that wait for results up to this number, which the server has deleted."""
        with self._lock:
            waiting = [index for index in self._unfinished if self.base + index <= up_to_seq]
        for index in sorted(waiting):
            self._settle(index, self._too_late)

    def _settle(self, index: int, outcome: Callable[[Entry], None]) -> None:
        """Resolve an entry once its number is known to be its own.

        After a takeover, the operation with this number may be another client's.
        """
        with self._lock:
            entry = self._unfinished.get(index)
            if entry is None:
                return
            if not entry.acknowledged.is_set():
                self._early[index] = outcome
                return
            del self._unfinished[index]
        outcome(entry)

    def _too_late(self, entry: Entry) -> None:
        seq = self.base + entry.index
        error = ResultReleasedError(
            f"operation {seq} of {self.run_id} was executed; its result was fetched by an earlier client, or expired "
            "on the server. Do not submit it again"
        )
        error.seq = seq
        entry.on_error(error)

    def waits(self, entry: Entry) -> bool:
        """Whether an operation has no result yet."""
        return entry.index in self._unfinished

    def decide(self, entry: Entry, error: GradwireError) -> None:
        """Fail the future of an operation that will not be executed; its result still follows in its turn."""
        if self.waits(entry):
            error.seq = self.base + entry.index
            entry.on_error(error)

    def _resolve(self, entry: Entry, result: pb.OperationResult, payload: bytes) -> None:
        with self._lock:
            if result.seq in self._expired_seen:
                self._expired_seen.discard(result.seq)
                if result.error.code == pb.ERROR_CODE_DEADLINE_EXCEEDED:  # and not what failed before it
                    self._failure_seen = max(self._failure_seen, result.seq)
        if result.status != pb.STATUS_SUCCEEDED:
            entry.on_error(self._error(entry, result))
            return
        try:
            columns = decode(result.tensors, payload)
        except CodecError as error:
            entry.on_error(InternalServerError(f"the server's result of {entry.label} cannot be read: {error}"))
            return
        entry.on_result(result, columns)

    def _error(self, entry: Entry, result: pb.OperationResult) -> BaseException:
        if entry.cause is not None:
            error = entry.cause
        elif result.status == pb.STATUS_CANCELLED and not result.HasField("error"):
            error = OperationCancelledError(f"{entry.label} was cancelled before it started")
        else:
            error = errors.from_wire(result.error)
        if isinstance(error, AbortedPredecessorError):
            if error.cause_seq is not None and error.__cause__ is None:
                error.__cause__ = self._failures.get(error.cause_seq) or self._cause_of(error.cause_seq)
        else:
            self._failures[result.seq] = error
            if len(self._failures) > KEPT_FAILURES:
                del self._failures[next(iter(self._failures))]
        if isinstance(error, GradwireError):
            error.seq = result.seq
        return error

    def _cause_of(self, seq: int) -> BaseException | None:
        """The client's reason for a failure whose result came before its acknowledgement: it was sent out of turn."""
        entry = self._unfinished.get(seq - self.base)
        return entry.cause if entry is not None else None

    def fence(self, error: GradwireError) -> None:
        """Fail every unacknowledged operation, and every later one, with this error.

        Acknowledged operations are still executed and wait for their results.
        """
        with self._lock:
            self.dead = self.dead or error
            entries, self._unacknowledged = list(self._unacknowledged.values()), {}
            for entry in entries:
                del self._unfinished[entry.index]
            self._early.clear()
        self._fail(entries, error)

    def die(self, error: GradwireError) -> None:
        """Fail every operation without a result, and every later one, with this error."""
        with self._lock:
            self.dead = self.dead or error
            entries, self._unfinished, self._unacknowledged = list(self._unfinished.values()), {}, {}
            self._early.clear()
        self._fail(entries, error)
        for task in list(self.computing):
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(task.cancel)

    @staticmethod
    def _fail(entries: list[Entry], error: GradwireError) -> None:
        for entry in entries:
            entry.on_error(error)
            entry.acknowledged.set()
