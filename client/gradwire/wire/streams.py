"""Frames of the calls that are streams: operations out, acknowledgements and results in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Protocol, TypeVar

import grpc
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import errors
from gradwire.errors import ConnectionLostError

CHUNK_BYTES = 1 << 20
TOGETHER_BYTES = 256 << 10
"""Operations up to this total size are sent in one message."""
F = TypeVar("F", covariant=True)


class AsyncCall(Protocol[F]):
    """A call whose answers are a stream."""

    def __aiter__(self) -> AsyncIterator[F]: ...

    def cancel(self) -> bool: ...


class SubmitStream:
    """Stream of outgoing operations and incoming acknowledgements."""

    def __init__(self, call: grpc.aio.StreamStreamCall[pb.SubmitFrame, pb.SubmitAck], address: str) -> None:
        self._call = call
        self._address = address

    async def send(self, operations: Sequence[tuple[pb.OperationHeader, bytes]]) -> None:
        """Write operations, grouping small ones; returns when they are sent, not when they arrive."""
        try:
            for frame in _submit_frames(operations):
                await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error, self._address) from None
        except asyncio.InvalidStateError:
            # The call has ended; the reader of the acknowledgements learns why.
            raise ConnectionLostError(f"{self._address} ended the stream of operations") from None

    async def acknowledgements(self) -> AsyncGenerator[pb.SubmitAck]:
        """Yield acknowledgements until the server ends the stream or the connection breaks."""
        async with contextlib.aclosing(frames_of(self._call, self._address)) as frames:
            async for frame in frames:
                yield frame
                for ack in frame.more:
                    yield ack

    async def end(self) -> None:
        """End the outgoing side: the server answers the operations it has, and closes the stream."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call has ended; the reader of the acknowledgements learns why

    def cancel(self) -> None:
        self._call.cancel()


def _submit_frames(operations: Sequence[tuple[pb.OperationHeader, bytes]]) -> Iterator[pb.SubmitFrame]:
    together, size = pb.SubmitFrame(), 0
    for header, payload in operations:
        length = header.ByteSize() + len(payload)
        if size and size + length > TOGETHER_BYTES:
            yield together
            size = 0
        if size:
            together.more.add(header=header, chunk=payload)
        else:
            together = pb.SubmitFrame(header=header, chunk=payload[:CHUNK_BYTES], batched=True, patient=True)
        size += length
        for start in range(CHUNK_BYTES, len(payload), CHUNK_BYTES):
            yield together
            together = pb.SubmitFrame(chunk=payload[start : start + CHUNK_BYTES])
    if size:
        yield together


async def frames_of(call: AsyncCall[F], address: str) -> AsyncGenerator[F]:
    try:
        async for frame in call:
            yield frame
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc(error, address) from None
    finally:
        call.cancel()


async def results_of(call: AsyncCall[pb.ResultFrame], address: str) -> AsyncGenerator[tuple[pb.OperationResult, bytes]]:
    header, chunks, missing = pb.OperationResult(), list[bytes](), 0
    async with contextlib.aclosing(frames_of(call, address)) as frames:
        async for first in frames:
            for frame in (first, *first.more):
                if frame.HasField("header"):
                    header, chunks, missing = frame.header, [], frame.header.payload_bytes
                if chunk := frame.chunk:
                    chunks.append(chunk)
                    missing -= len(chunk)
                if missing == 0:
                    yield header, b"".join(chunks)
