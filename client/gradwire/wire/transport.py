"""The channel: calls of the service, retried where a repeat is safe; no ``grpc.RpcError`` leaves it.

Left out on purpose: gRPC's own retries, which skip messages over about 256 KiB and do not know an operation's
number; compression, which costs more than it saves on tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from gradwire_proto.v1 import jobs_pb2, sessions_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.jobs_pb2_grpc import JobServiceStub
from gradwire_proto.v1.sessions_pb2_grpc import SessionServiceStub
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub

if TYPE_CHECKING:  # the stub files have this class; the generated module has one class for sync and async
    from gradwire_proto.v1.jobs_pb2_grpc import JobServiceAsyncStub
    from gradwire_proto.v1.sessions_pb2_grpc import SessionServiceAsyncStub
    from gradwire_proto.v1.training_pb2_grpc import TrainingServiceAsyncStub

from gradwire import errors
from gradwire.errors import (
    ConnectionLostError,
    GradwireError,
    InvalidRequestError,
    RunParkedError,
    ServiceClosedError,
)
from gradwire.futures import running_loop
from gradwire.wire.processes import check_not_forked, note_connection
from gradwire.wire.streams import SubmitStream, frames_of, results_of
from gradwire.wire.tls import SECURE_SCHEMES, Tls

SILENT_ATTEMPTS = 6
"""After this many failures in a row (about three seconds) a warning is logged."""
SAME_WARNING_S = 60.0
"""For so long, a warning for one call is not repeated for another."""
MAX_CONNECTIONS = 64
"""A server allows a connection a number of calls at a time; the channel opens another when they are under way."""
CLOSE_LINGER_S = 0.02
CLOSE_LATE_TIMES = 10
MAX_CLOSE_LINGER_S = 1.0

logger = logging.getLogger("gradwire")

Q = TypeVar("Q")
R = TypeVar("R")


class Backoff:
    """Waits between attempts that grow with each failure, up to a time limit.

    Args:
        patience_s: How long attempts may fail in a row before the error is final.
        warn: Called once in a row of failures, with the error and the seconds.
    """

    def __init__(self, patience_s: float, warn: Callable[[GradwireError, float], None]) -> None:
        self._patience_s, self._warn = patience_s, warn
        self._parked = ""
        self.progress()

    def progress(self) -> None:
        """Reset after a success: the next failure counts as the first."""
        self._attempt = 0
        self._since: float | None = None

    async def pause(self, error: GradwireError) -> None:
        """Wait before the next attempt, or raise ``error`` if the time is up."""
        now = asyncio.get_running_loop().time()
        self._since = self._since if self._since is not None else now
        if now - self._since >= self._patience_s:
            raise error
        wait_s = min(0.05 * 2**self._attempt, 5.0) * random.uniform(0.5, 1.0)
        self._attempt += 1
        if isinstance(error, RunParkedError):  # somebody has to do something, so it is said at the first attempt
            due, self._parked = str(error) != self._parked, str(error)
        else:
            due = self._attempt == SILENT_ATTEMPTS
        if due:
            self._warn(error, self._patience_s)
        await asyncio.sleep(wait_s)


class Transport:
    """A channel to one server.

    Args:
        address: ``HOST:PORT``; ``https://HOST:PORT`` for TLS with the system's roots.
        api_key: Sent with every call.
        tls: Certificates; None means plain text unless the address is ``https://``.
        patience_s: How long a repeatable call is retried while the server is away.
        check_alive: Called before each new attempt; raises if another attempt is pointless.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        patience_s: float = 60.0,
        check_alive: Callable[[], None] = lambda: None,
    ) -> None:
        for scheme in SECURE_SCHEMES:
            if address.startswith(scheme):
                address, tls = address.removeprefix(scheme), tls or Tls()
        self.address = address
        self.patience_s = patience_s
        self.check_alive = check_alive
        self.api_key = api_key or ""
        note_connection()
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        scaling = {"maxConnectionsPerSubchannel": MAX_CONNECTIONS}
        options = [
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.max_send_message_length", 64 << 20),
            ("grpc.enable_retries", 0),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.service_config", json.dumps({"connectionScaling": scaling})),
            ("grpc.max_connections_per_subchannel_cap", MAX_CONNECTIONS),
            # Otherwise channels to one address share a connection, and with it one limit on streams.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options)
        # The stub's constructor is generated once for both kinds of channel.
        self._stub: TrainingServiceAsyncStub = TrainingServiceStub(self._channel)
        self._jobs: JobServiceAsyncStub = JobServiceStub(self._channel)
        self._sessions: SessionServiceAsyncStub = SessionServiceStub(self._channel)
        self._closed = False
        self._warned: dict[str, float] = {}
        self._loop = running_loop()

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()
        # grpc.aio reports a cancelled call as done before its core has, and offers no way to wait for the core: an
        # event that arrives after this loop is closed would be logged as an error in the program's next loop.
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(CLOSE_LINGER_S)
        late_s = loop.time() - began - CLOSE_LINGER_S  # on a busy machine the core's threads are late as well
        await asyncio.sleep(min(CLOSE_LATE_TIMES * late_s, MAX_CLOSE_LINGER_S))

    def backoff(self, patience_s: float | None = None) -> Backoff:
        """Waits for a call of this transport, by default with its patience."""
        return Backoff(self.patience_s if patience_s is None else patience_s, self._warn)

    def _warn(self, error: GradwireError, patience_s: float) -> None:
        """Log why calls are repeated, unless it was logged for another call a moment ago."""
        reason = str(error) if isinstance(error, RunParkedError) else type(error).__name__
        now = time.monotonic()
        self._warned = {each: at for each, at in self._warned.items() if now - at < SAME_WARNING_S}
        if reason not in self._warned:
            logger.warning("%s; trying again for up to %.0f s", error, patience_s)
            self._warned[reason] = now

    async def unary(
        self,
        method: Callable[[TrainingServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, R]],
        request: Q,
        *,
        timeout_s: float | None = 60.0,
        patience_s: float | None = None,
    ) -> R:
        """Make one call and repeat it while the server is away. Every unary method of the service may be repeated."""
        return await self._repeated(lambda: method(self._stub), request, timeout_s, patience_s)

    async def delete(
        self, method: Callable[[TrainingServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, R]], request: Q
    ) -> None:
        """Make and repeat a call that deletes something; a repeated call that does not find it has succeeded."""
        await self._deleted(lambda: method(self._stub), request)

    async def job_delete(
        self, method: Callable[[JobServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, R]], request: Q
    ) -> None:
        """Make and repeat a call of the job service that deletes something."""
        await self._deleted(lambda: method(self._jobs), request)

    async def job_call(
        self, method: Callable[[JobServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, R]], request: Q
    ) -> R:
        """Make and repeat one call of the job service."""
        return await self._repeated(lambda: method(self._jobs), request, 60.0, None)

    async def session_call(
        self, method: Callable[[SessionServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, R]], request: Q
    ) -> R:
        """Make and repeat one call of the session service."""
        return await self._repeated(lambda: method(self._sessions), request, 60.0, None)

    async def session_delete(
        self, method: Callable[[SessionServiceAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Q, R]], request: Q
    ) -> None:
        """Make and repeat a call of the session service that deletes something."""
        await self._deleted(lambda: method(self._sessions), request)

    async def rollout(self, request: sessions_pb2.GetRolloutRequest) -> list[sessions_pb2.RolloutFrame]:
        """Return a session and its turns; from the first again while the server is away."""
        self.check_loop()
        backoff = self.backoff()
        while True:
            try:
                call = self._sessions.GetRollout(request, metadata=self._metadata)
                return [frame async for frame in frames_of(call, self.address)]
            except errors.RETRYABLE as failure:
                await backoff.pause(failure)
            self.check_alive()

    async def upload_file(self, frames: Callable[[], AsyncIterator[jobs_pb2.UploadFileFrame]]) -> jobs_pb2.File:
        """Send a file; from its first frame again while the server is away."""
        self.check_loop()
        backoff = self.backoff()
        while True:
            try:
                return await self._jobs.UploadFile(frames(), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                failure = errors.from_rpc(error, self.address)
            if not isinstance(failure, errors.RETRYABLE):
                raise failure
            await backoff.pause(failure)
            self.check_alive()

    def read_file(self, file_id: str) -> AsyncGenerator[jobs_pb2.ReadFileFrame]:
        """Yield a file's content."""
        self.check_loop()
        request = jobs_pb2.ReadFileRequest(file_id=file_id)
        return frames_of(self._jobs.ReadFile(request, metadata=self._metadata), self.address)

    async def _repeated(
        self,
        method: Callable[[], grpc.aio.UnaryUnaryMultiCallable[Q, R]],
        request: Q,
        timeout_s: float | None,
        patience_s: float | None,
    ) -> R:
        backoff = self.backoff(patience_s)
        while True:
            try:
                return await self._once(method(), request, timeout_s)
            except errors.RETRYABLE as error:
                await backoff.pause(error)
                self.check_alive()

    async def _deleted(self, method: Callable[[], grpc.aio.UnaryUnaryMultiCallable[Q, R]], request: Q) -> None:
        attempts = 0

        def counted() -> grpc.aio.UnaryUnaryMultiCallable[Q, R]:
            nonlocal attempts
            attempts += 1
            return method()

        try:
            await self._repeated(counted, request, 60.0, None)
        except errors.NotFoundError:
            if attempts == 1:
                raise

    async def _once(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, R], request: Q, timeout_s: float | None) -> R:
        if self._closed:
            raise ServiceClosedError("the service is closed")
        self.check_loop()
        call = method(request, timeout=timeout_s, metadata=self._metadata)

        async def outcome() -> R:
            return await call

        # A cancelled `await call` inside an anyio cancel scope leaks CancelledError (grpc bug 43502): the call is
        # awaited in a task of its own, and cancelled by its own method.
        task = asyncio.create_task(outcome())
        task.add_done_callback(_retrieved)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait([task])
            raise
        if task.cancelled():
            raise ServiceClosedError("the service was closed during the call")
        try:
            return task.result()
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error, self.address) from None

    def check_loop(self) -> None:
        """Check that the calls are made where the channel lives.

        Raises:
            InvalidRequestError: Another event loop runs, or the process was forked from the channel's.
        """
        check_not_forked()
        if self._loop is None or self._loop is running_loop():
            return
        if self._loop.is_closed():
            raise InvalidRequestError(
                "the event loop that the service was opened on has ended: open and use it inside one asyncio.run(), or"
                " use gradwire.sync"
            )
        raise InvalidRequestError(
            "the service was opened on another event loop: call it there, open one for this loop, or use gradwire.sync;"
            " only futures of operations can be awaited on any loop"
        )

    def submit(self) -> SubmitStream:
        """Open a stream of operations and their acknowledgements."""
        return SubmitStream(self._stub.Submit(metadata=self._metadata), self.address)

    def results(self, run_id: str, from_seq: int) -> AsyncGenerator[tuple[pb.OperationResult, bytes]]:
        """Yield results with their payloads, from this number on, until the stream breaks."""
        request = pb.ResultsRequest(run_id=run_id, from_seq=from_seq, batched=True)
        return results_of(self._stub.Results(request, metadata=self._metadata), self.address)

    async def sample(self, request: pb.SampleRequest) -> tuple[pb.OperationResult, bytes]:
        """Sample outside any run's queue."""
        self.check_loop()
        async with contextlib.aclosing(
            results_of(self._stub.Sample(request, metadata=self._metadata), self.address)
        ) as results:
            async for result in results:
                return result
        raise ConnectionLostError(f"{self.address} ended the stream without a result")

    def stream_sample(self, request: pb.SampleRequest) -> AsyncGenerator[pb.SampleFrame]:
        """Yield new tokens of samples outside any run's queue, and last the result."""
        self.check_loop()
        return frames_of(self._stub.StreamSample(request, metadata=self._metadata), self.address)

    async def history(self, run_id: str, at_most: int) -> list[pb.HistoryPage]:
        """The pages of a run's record in order; asked for again from the first while the server is away."""
        self.check_loop()
        request, backoff = pb.GetHistoryRequest(run_id=run_id, at_most=at_most, columns=True), self.backoff()
        while True:
            received: list[pb.HistoryPage] = []
            call = self._stub.GetHistory(request, metadata=self._metadata)
            try:
                async with contextlib.aclosing(frames_of(call, self.address)) as pages:
                    async for page in pages:
                        received.append(page)
                return received
            except errors.RETRYABLE as error:
                await backoff.pause(error)
                self.check_alive()

    async def recording(self, run_id: str, kind: str, number: int) -> tuple[pb.Recording, bytes]:
        """A recording of a run and its content; asked for again from the beginning while the server is away."""
        self.check_loop()
        request, backoff = pb.ReadRecordingRequest(run_id=run_id, kind=kind, number=number), self.backoff()
        while True:
            recording, chunks = pb.Recording(), list[bytes]()
            call = self._stub.ReadRecording(request, metadata=self._metadata)
            try:
                async with contextlib.aclosing(frames_of(call, self.address)) as frames:
                    async for frame in frames:
                        recording.MergeFrom(frame.recording)
                        chunks.append(frame.chunk)
                return recording, b"".join(chunks)
            except errors.RETRYABLE as error:
                await backoff.pause(error)
                self.check_alive()

    async def watch(self, cursor: str, with_points: bool) -> AsyncGenerator[pb.RunUpdates]:
        """Yield changes of the runs without end; goes on from the last cursor when the server was away."""
        self.check_loop()
        backoff = self.backoff()
        while True:
            request = pb.WatchRunsRequest(cursor=cursor, with_points=with_points)
            failure: GradwireError = ConnectionLostError(f"{self.address} ended the stream of changes")
            try:
                call = self._stub.WatchRuns(request, metadata=self._metadata)
                async with contextlib.aclosing(frames_of(call, self.address)) as updates:
                    async for update in updates:
                        backoff.progress()
                        cursor = update.cursor or cursor
                        yield update
            except errors.RETRYABLE as error:
                failure = error
            await backoff.pause(failure)
            self.check_alive()

    def download(self, request: pb.DownloadRequest) -> AsyncGenerator[pb.DownloadFrame]:
        """Yield the frames of a checkpoint's or export's files, in order."""
        self.check_loop()
        return frames_of(self._stub.Download(request, metadata=self._metadata), self.address)


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's exception, so that asyncio does not report it when the waiting caller is gone."""
    if not task.cancelled():
        task.exception()
