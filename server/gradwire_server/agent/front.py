"""The way of an agent to its server: a channel, and the call that lends an engine."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.engine_pb2 import EngineChunk, EngineOffer
from gradwire_proto.v1.engine_pb2_grpc import EngineServiceStub

from gradwire_server.engine_link.chunks import ADMITTED, ChunkedLink
from gradwire_server.engine_link.frames import LinkClosed
from gradwire_server.errors import ERROR_METADATA, ServiceError

ADDRESS = re.compile(r"(https?)://([^/\s]+:\d+)/?")
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


@dataclass(frozen=True)
class Front:
    """A server, and how it is reached.

    Attributes:
        address: ``https://HOST:PORT``; ``http://`` on loopback.
        key: The API key, of the role "engine".
        ca_cert: PEM file with the authority that signed the server's certificate; the system's when absent.
        client_cert, client_key: PEM files, for a server that asks for certificates.

    Raises:
        ValueError: The address is invalid, or would let the key travel in the clear.
    """

    address: str
    key: str = ""
    ca_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def __post_init__(self) -> None:
        host = self.target.rpartition(":")[0].strip("[]")
        if not self.is_encrypted and not (host in ("localhost", "::1") or host.startswith("127.")):
            raise ValueError(f"--front {self.address[:200]}: beyond this machine it takes https://, or the key is read")

    @property
    def is_encrypted(self) -> bool:
        """Whether TLS is spoken."""
        return self._matched()[1] == "https"

    @property
    def target(self) -> str:
        """``HOST:PORT``."""
        return self._matched()[2]

    def _matched(self) -> re.Match[str]:
        matched = ADDRESS.fullmatch(self.address)
        if matched is None:
            raise ValueError(f"--front must be https://HOST:PORT of the server's gRPC, not {self.address[:200]!r}")
        return matched

    def channel(self) -> Any:
        """A channel to it.

        Raises:
            OSError: A file cannot be read.
        """
        if not self.is_encrypted:
            return grpc.aio.insecure_channel(self.target, OPTIONS)
        read = [file.read_bytes() if file else None for file in (self.ca_cert, self.client_key, self.client_cert)]
        return grpc.aio.secure_channel(self.target, grpc.ssl_channel_credentials(*read), OPTIONS)


class Lending:
    """The call that lends an engine to a server.

    Args:
        on_lease: Takes the numbers about the lease that come back.
    """

    def __init__(self, channel: Any, front: Front, offer: EngineOffer, on_lease: Callable[[int], None]) -> None:
        self.link = ChunkedLink(self.read, on_lease)
        metadata = (("authorization", f"Bearer {front.key}"),) if front.key else ()
        stub: Any = EngineServiceStub(channel)
        self._call = stub.Attach(metadata=metadata)
        self._taken = asyncio.Event()
        self._writing = asyncio.create_task(self._write(offer))

    async def _write(self, offer: EngineOffer) -> None:
        # Nothing is written to a call that may be refused: gRPC can tell of that write instead of the refusal.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader is told
            if ADMITTED not in dict(await self._call.initial_metadata()):
                return
            await self._call.write(EngineChunk(offer=offer))
            await self._taken.wait()
            async for chunk in self.link.chunks():
                await self._call.write(chunk)
            await self._call.done_writing()

    async def read(self) -> EngineChunk | None:
        """The next chunk from the server; None at the end.

        Raises:
            ServiceError: The server refuses the engine.
            LinkClosed: It cannot be reached any more.
        """
        try:
            chunk = await self._call.read()
            if chunk is grpc.aio.EOF:
                if await self._call.code() is not grpc.StatusCode.OK:
                    raise _error(await self._call.code(), await self._call.details(), await self._metadata())
                return None
        except grpc.aio.AioRpcError as error:
            raise _error(error.code(), error.details(), dict(error.trailing_metadata() or ())) from error
        assert isinstance(chunk, EngineChunk)
        self._taken.set()
        return chunk

    async def _metadata(self) -> dict[str, Any]:
        return dict(await self._call.trailing_metadata() or ())

    async def cancel(self) -> None:
        """End the call at once."""
        self._call.cancel()
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)


def _error(code: grpc.StatusCode, details: str | None, metadata: dict[str, Any]) -> ServiceError | LinkClosed:
    if ERROR_METADATA in metadata:
        return ServiceError.of(pb.Error.FromString(metadata[ERROR_METADATA]))
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ServiceError(pb.ERROR_CODE_UNSUPPORTED, "this server takes no engines of other machines: update it")
    return LinkClosed(details or code.name)
