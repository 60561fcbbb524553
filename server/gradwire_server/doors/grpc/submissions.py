"""One Submit stream: frames in, operations to the scheduler, acknowledgements out as they become durable."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.access.quotas import Usage
from gradwire_server.config import CHUNK_BYTES, Limits
from gradwire_server.errors import RpcError
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.observability.tracing import MAX_TRACEPARENT
from gradwire_server.scheduling.checks import check_rows
from gradwire_server.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

MOST_TOGETHER = 255


@dataclass
class _Incoming:
    """An operation whose payload is still coming in; it is not kept when it will be refused anyway.

    `refusal` becomes its result; `rejection` is its acknowledgement, and its number is not used up.
    """

    header: pb.OperationHeader
    refusal: pb.Error | None = None
    rejection: RpcError | None = None
    usage: Usage | None = None
    chunks: list[bytes] = field(default_factory=list)
    received: int = 0

    def __post_init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, chunk: bytes) -> None:
        if not chunk:
            return
        if len(chunk) > CHUNK_BYTES:
            raise _broken(f"a chunk of {len(chunk)} bytes; {CHUNK_BYTES} at most")
        self.received += len(chunk)
        if self.received > self.header.payload_bytes:
            raise _broken(
                f"operation {self.header.seq} sends more than the {self.header.payload_bytes} bytes it announced"
            )
        self._digest.update(chunk)
        if self.refusal is None and self.rejection is None:
            self.chunks.append(chunk)

    def end(self) -> None:
        """Gives the room back that its payload had while it came in."""
        if self.usage is not None:
            self.usage.incoming_bytes -= self.header.payload_bytes
            self.usage = None

    @property
    def complete(self) -> bool:
        return self.received == self.header.payload_bytes

    def check_digest(self) -> None:
        digest = self._digest.digest() if self.received else b""
        if digest != self.header.payload_digest:
            raise RpcError(
                pb.ERROR_CODE_PAYLOAD_CORRUPT,
                f"the payload of operation {self.header.seq} is not the one its digest names; submit it again",
            )


def _broken(message: str) -> RpcError:
    return RpcError(pb.ERROR_CODE_INVALID_ARGUMENT, f"the stream of frames is broken: {message}")


def _refused(header: pb.OperationHeader, error: RpcError) -> pb.SubmitAck:
    ack = pb.SubmitAck(run_id=header.run_id, seq=header.seq, error=error.error)
    ack.error.request_id = error.error.request_id or secrets.token_hex(8)
    code = pb.ErrorCode.Name(error.code)
    log.info("request %s: operation %d of %s refused: %s", ack.error.request_id, ack.seq, ack.run_id[:100], code)
    return ack


class Submissions:
    """Reads a stream on behalf of a caller."""

    def __init__(self, scheduler: Scheduler, runs: RunRecords, limits: Limits, caller: Caller) -> None:
        self._scheduler, self._runs, self._limits, self._caller = scheduler, runs, limits, caller
        self._acks: asyncio.Queue[pb.SubmitAck | None] = asyncio.Queue()
        self._batched = False
        self._outstanding = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def acks(self, frames: AsyncIterable[pb.SubmitFrame], stopping: asyncio.Event) -> AsyncIterator[pb.SubmitAck]:
        """Acknowledgements, until the client has ended its side and has them all, or the server stops.

        Raises:
            RpcError: for frames out of order. What was handed to the scheduler before goes on.
        """
        reader = asyncio.create_task(self._read(frames))
        stopper = asyncio.create_task(stopping.wait())
        for task in (reader, stopper):
            task.add_done_callback(lambda _: self._acks.put_nowait(None))
        try:
            while True:
                ack = await self._acks.get()
                if ack is not None:
                    yield self._together(ack)
                elif reader.done():
                    reader.result()
                    return
                else:
                    raise RpcError(
                        pb.ERROR_CODE_SHUTTING_DOWN, "the server is shutting down; submit again once it is back"
                    )
        finally:
            reader.cancel()
            stopper.cancel()
            await asyncio.gather(reader, stopper, return_exceptions=True)

    def _together(self, ack: pb.SubmitAck) -> pb.SubmitAck:
        """An acknowledgement with those that wait behind it, for a client that reads them so."""
        if not self._batched or self._acks.empty():
            return ack
        together = pb.SubmitAck()
        together.CopyFrom(ack)  # it may be another stream's as well
        while not self._acks.empty() and len(together.more) < MOST_TOGETHER:
            following = self._acks.get_nowait()
            if following is None:
                self._acks.put_nowait(None)
                break
            together.more.append(following)
        return together

    async def _read(self, frames: AsyncIterable[pb.SubmitFrame]) -> None:
        incoming: _Incoming | None = None
        try:
            async for first in frames:
                self._batched |= first.batched
                for frame in (first, *first.more):
                    if frame.HasField("header"):
                        if incoming is not None:
                            raise _broken(
                                f"a header came before the payload of operation {incoming.header.seq} was complete"
                            )
                        incoming = self._begin(frame.header)
                    elif incoming is None:
                        raise _broken("a chunk came before a header")
                    incoming.add(frame.chunk)
                    if incoming.complete:
                        self._hand_over(incoming)
                        incoming = None
            if incoming is not None:
                raise _broken(f"it ended before the payload of operation {incoming.header.seq} was complete")
        finally:
            if incoming is not None:
                incoming.end()
        await self._idle.wait()

    def _begin(self, given: pb.OperationHeader) -> _Incoming:
        header = pb.OperationHeader()
        header.CopyFrom(given)  # a reference would keep the frame's chunk in memory
        header.traceparent = header.traceparent[:MAX_TRACEPARENT]
        incoming = _Incoming(header)
        try:
            record = self._runs.get(header.run_id, self._caller, write=True)
            incoming.refusal = self._scheduler.admission.refusal(record, header)
            if incoming.refusal is None:
                usage = self._scheduler.usage(record.owner)
                usage.receive(header.payload_bytes)
                incoming.usage = usage
        except RpcError as error:
            incoming.rejection = error
        return incoming

    def _hand_over(self, incoming: _Incoming) -> None:
        header = incoming.header
        incoming.end()
        try:
            if incoming.rejection is not None:
                raise incoming.rejection
            self._runs.get(header.run_id, self._caller, write=True)
            incoming.check_digest()
            refusal = incoming.refusal or check_rows(header, incoming.chunks, self._limits)
            future = self._scheduler.admission.submit(header, incoming.chunks, refusal)
        except RpcError as error:
            self._acks.put_nowait(_refused(header, error))
            return
        self._outstanding += 1
        self._idle.clear()
        future.add_done_callback(lambda done: self._acknowledged(header, done))

    def _acknowledged(self, header: pb.OperationHeader, done: asyncio.Future[pb.SubmitAck]) -> None:
        error = done.exception()
        if isinstance(error, RpcError):
            self._acks.put_nowait(_refused(header, error))
        elif error is None:
            self._acks.put_nowait(done.result())
        self._outstanding -= 1
        if not self._outstanding:
            self._idle.set()
