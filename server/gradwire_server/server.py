"""The server put together: the core, its doors, its metrics; started in this order, stopped in the other."""

from __future__ import annotations

import asyncio
from types import TracebackType

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.doors.grpc.door import GrpcDoor
from gradwire_server.engine_client.process import EngineClient
from gradwire_server.errors import ServiceError
from gradwire_server.observability.exposition import Exposition
from gradwire_server.observability.tracing import Tracing


class Server:
    """One server over one state folder.

    Args:
        config: its settings.
        engine: another engine than the child process that the settings describe; it is the caller's to stop.
        tracing: another destination of traces than the settings describe; it is the caller's to close.

    Attributes:
        core: what the doors lead to.
        door: the gRPC door.
    """

    def __init__(
        self, config: ServerConfig, engine: EngineClient | None = None, tracing: Tracing | None = None
    ) -> None:
        self.config = config
        self.core = Core(config, engine, tracing, on_engine_ready=lambda ready: self.door.engine_changed(ready))
        self.door = GrpcDoor(self.core)
        self._exposition: Exposition | None = None

    async def start(self) -> None:
        """
        Raises:
            ServiceError: the engine did not start, and why.
            SystemExit: the address or the state folder cannot be had; with a sentence.
        """
        self._check_keys()
        await self.core.start()
        self._start_metrics()
        await self.door.open()

    async def stop(self) -> None:
        """Accepts no more, finishes what is being carried out, ends the streams, then the engine and the journal.

        Stopping twice is fine.
        """
        if self.door.is_open:
            await self.door.announce_end()
            await self.core.drain()
            await self.door.close()
        await self.core.stop()
        exposition, self._exposition = self._exposition, None
        if exposition is not None:
            await asyncio.to_thread(exposition.close)

    async def __aenter__(self) -> Server:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """Where the gRPC door listens."""
        return self.door.address

    @property
    def metrics_address(self) -> str:
        """Where the metrics are; empty where they are not asked for."""
        return self._exposition.address if self._exposition else ""

    def _check_keys(self) -> None:
        config = self.config
        if not (config.loopback or config.insecure_bind) and not self.core.keys.any:
            raise SystemExit(
                f"gradwire: without API keys the server listens on loopback only, not on {config.address};"
                f" make one with `gradwire keys create NAME --state-dir {config.state_dir}`,"
                " or let anyone in with --insecure-bind"
            )

    def _start_metrics(self) -> None:
        address, core = self.config.metrics_address, self.core
        if not address:
            return
        try:
            self._exposition = Exposition(
                core.metrics, address, core.scheduler.backlog, core.engine.vitals, lambda: core.engine.is_ready
            )
        except OSError as error:
            raise SystemExit(f"gradwire: cannot serve metrics on {address}: {error}") from error


def start_failure(error: ServiceError) -> str:
    """The sentence with which a server that could not start ends."""
    return f"gradwire: {pb.ErrorCode.Name(error.code).removeprefix('ERROR_CODE_').lower()}: {error}"
