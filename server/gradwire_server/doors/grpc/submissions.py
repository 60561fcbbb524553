"""One Submit stream: reads frames, submits operations to the core, and yields acknowledgements once durable."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable
from itertools import chain

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.config import CHUNK_BYTES
from gradwire_server.core.core import Core
from gradwire_server.core.incoming import Incoming
from gradwire_server.errors import ServiceError
from gradwire_server.observability.tracing import MAX_TRACEPARENT

log = logging.getLogger(__name__)

MOST_TOGETHER = 255
SLICE_FRAMES = 4
"""Frames of one message that are taken before others are served."""
ACKS_WAIT_S = 0.02
"""How long an acknowledgement waits for others if the client waits for none: a message costs either side 0.2 ms."""
ANSWERED_ACKS_WAIT_S = 0.2
"""How long it waits besides if its operation has a result by then, which tells the client the same."""


def _broken(message: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, f"the stream of frames is broken: {message}")


def _refused(header: pb.OperationHeader, error: ServiceError) -> pb.SubmitAck:
    ack = pb.SubmitAck(run_id=header.run_id, seq=header.seq, error=error.error)
    ack.error.request_id = error.error.request_id or secrets.token_hex(8)
    code = pb.ErrorCode.Name(error.code)
    log.info("request %s: operation %d of %s refused: %s", ack.error.request_id, ack.seq, ack.run_id[:100], code)
    return ack


class Submissions:
    """The submissions of one Submit stream.

    Args:
        core: The core that accepts the operations.
        caller: The stream's caller.
    """

    def __init__(self, core: Core, caller: Caller) -> None:
        self._core, self._caller = core, caller
        self._acks: asyncio.Queue[pb.SubmitAck | None] = asyncio.Queue()
        self._batched = self._patient = False
        self._outstanding = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def acks(
        self, frames: AsyncIterable[pb.SubmitFrame], stopping: asyncio.Event
    ) -> AsyncGenerator[pb.SubmitAck]:
        """Yield acknowledgements until the client has closed its side and received all of them.

        Raises:
            ServiceError: INVALID_ARGUMENT for frames out of order, SHUTTING_DOWN when the server stops. Operations
                already submitted to the core are not affected.
        """
        reader = asyncio.create_task(self._read(frames))
        stopper = asyncio.create_task(stopping.wait())
        for task in (reader, stopper):
            task.add_done_callback(lambda _: self._acks.put_nowait(None))
        try:
            while True:
                ack = await self._acks.get()
                if ack is not None:
                    if self._patient and not ack.HasField("error"):
                        await asyncio.sleep(ACKS_WAIT_S)
                        if self._batched and self._core.has_result(ack.run_id, ack.seq):
                            await asyncio.sleep(ANSWERED_ACKS_WAIT_S)
                    yield self._together(ack)
                elif reader.done():
                    reader.result()
                    return
                else:
                    raise ServiceError(
                        pb.ERROR_CODE_SHUTTING_DOWN, "the server is shutting down; submit again once it is back"
                    )
        finally:
            reader.cancel()
            stopper.cancel()
            await asyncio.gather(reader, stopper, return_exceptions=True)
            del task, reader, stopper  # an error's traceback holds this frame, and its task the error: a cycle

    def _together(self, ack: pb.SubmitAck) -> pb.SubmitAck:
        """Combine an acknowledgement with those queued after it, if the client accepts batches."""
        if not self._batched or self._acks.empty():
            return ack
        together = pb.SubmitAck()
        together.CopyFrom(ack)  # a repeated submission on another stream may share the message
        while not self._acks.empty() and len(together.more) < MOST_TOGETHER:
            following = self._acks.get_nowait()
            if following is None:
                self._acks.put_nowait(None)
                break
            together.more.append(following)
        return together

    async def _read(self, frames: AsyncIterable[pb.SubmitFrame]) -> None:
        incoming: Incoming | None = None
        try:
            async for first in frames:
                self._batched |= first.batched
                self._patient |= first.patient
                async with self._core.calls.slice(self._caller.name):
                    for place, frame in enumerate(chain((first,), first.more), 1):
                        incoming = self._take(frame, incoming)
                        if place % SLICE_FRAMES == 0:
                            await asyncio.sleep(0)
            if incoming is not None:
                raise _broken(f"it ended before the payload of operation {incoming.header.seq} was complete")
        finally:
            if incoming is not None:
                incoming.end()
        await self._idle.wait()

    def _take(self, frame: pb.SubmitFrame, incoming: Incoming | None) -> Incoming | None:
        """Add a frame to the operation that is being received; returns what is not complete then."""
        if frame.HasField("header"):
            if incoming is not None:
                raise _broken(f"a header came before the payload of operation {incoming.header.seq} was complete")
            incoming = self._begin(frame.header)
        elif incoming is None:
            raise _broken("a chunk came before a header")
        if len(frame.chunk) > CHUNK_BYTES:
            raise _broken(f"a chunk of {len(frame.chunk)} bytes; {CHUNK_BYTES} at most")
        incoming.add(frame.chunk)
        if not incoming.complete:
            return incoming
        self._hand_over(incoming)
        return None

    def _begin(self, given: pb.OperationHeader) -> Incoming:
        header = pb.OperationHeader()
        header.CopyFrom(given)  # a reference would keep the whole frame, with its chunk, in memory
        header.traceparent = header.traceparent[:MAX_TRACEPARENT]
        incoming = self._core.receive(self._caller, header)
        incoming.patient = self._patient
        return incoming

    def _hand_over(self, incoming: Incoming) -> None:
        header = incoming.header
        try:
            future = self._core.submit(self._caller, incoming)
        except ServiceError as error:
            self._acks.put_nowait(_refused(header, error))
            return
        self._outstanding += 1
        self._idle.clear()
        future.add_done_callback(lambda done: self._acknowledged(header, done))

    def _acknowledged(self, header: pb.OperationHeader, done: asyncio.Future[pb.SubmitAck]) -> None:
        error = done.exception()
        if isinstance(error, ServiceError):
            self._acks.put_nowait(_refused(header, error))
        elif error is None:
            self._acks.put_nowait(done.result())
        self._outstanding -= 1
        if not self._outstanding:
            self._idle.set()
