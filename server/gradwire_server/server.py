"""Assembly of the server: the core, the metrics endpoint and the doors, started in this order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.core.startable import Startable
from gradwire_server.doors.registered import DOORS
from gradwire_server.engine_client.client import EngineClient
from gradwire_server.errors import NotNow, ServiceError
from gradwire_server.observability.exposition import Exposition
from gradwire_server.observability.tracing import Tracing

if TYPE_CHECKING:
    from gradwire_server.doors.grpc.door import GrpcDoor
    from gradwire_server.doors.http.door import HttpDoor


class Server(Startable):
    """A server on one state folder, with its core and doors.

    Args:
        engines: Engines to use instead of the child processes that the settings describe; the caller stops them.
        tracing: Tracing to use instead of what the settings describe; the caller closes it.
        own_key: Key that callers must present; see :class:`.keys.Keys`.
    """

    def __init__(
        self,
        config: ServerConfig,
        engines: Sequence[EngineClient] = (),
        tracing: Tracing | None = None,
        own_key: str = "",
    ) -> None:
        self.config = config
        self.core = Core(
            config, engines, tracing, own_key=own_key, on_parked=lambda count: self.door.parked_changed(count)
        )
        self.doors = {name: door for name, make in DOORS.items() if (door := make(self.core)) is not None}
        self.core.engines.watch(self.door.engine_changed)
        self._exposition: Exposition | None = None
        self._embedded = bool(own_key)

    async def start(self) -> None:
        """Start the core, the metrics endpoint and the doors.

        Raises:
            ServiceError: The engine did not start.
            SystemExit: An API key is needed, or an address or the state folder cannot be used; with a message.
        """
        self._check_keys()
        await self.core.start()
        self._start_metrics()
        for door in self.doors.values():
            await door.open()
        self.core.job_workers.start(self.door.local_address)
        if self._embedded and self.http is None:
            self.core.rollouts.open_door = self._open_for_agents

    async def _open_for_agents(self) -> None:
        """Open the HTTP door of a server that a program embeds, on loopback, at its first rollout session."""
        try:
            module = await asyncio.to_thread(import_module, "gradwire_server.doors.http.door")
        except ImportError:
            return
        door: HttpDoor = module.HttpDoor(self.core, "127.0.0.1:0")
        await door.open()
        self.doors = {"http": door, **self.doors}

    async def stop(self) -> None:
        """Accept nothing more, finish the operations being executed, close the streams, the engine and the journal.

        A second call does nothing.
        """
        for door in self.doors.values():
            await door.announce_end()
        if self.door.is_open:
            await self.core.job_workers.stop()
            await self.core.drain()
        for door in reversed(self.doors.values()):
            await door.close()
        await self.core.stop()
        exposition, self._exposition = self._exposition, None
        if exposition is not None:
            await asyncio.to_thread(exposition.close)

    @property
    def door(self) -> GrpcDoor:
        """The gRPC door."""
        return cast("GrpcDoor", self.doors["grpc"])

    @property
    def http(self) -> HttpDoor | None:
        """The HTTP door; None if it is off."""
        return cast("HttpDoor | None", self.doors.get("http"))

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the gRPC door."""
        return self.door.address

    @property
    def metrics_address(self) -> str:
        """``HOST:PORT`` of the metrics endpoint; empty if it is off."""
        return self._exposition.address if self._exposition else ""

    def _check_keys(self) -> None:
        config = self.config
        if not (config.loopback or config.insecure_bind) and not self.core.keys.any:
            raise SystemExit(
                f"gradwire: without API keys the server listens on loopback only, not on {_beyond_loopback(config)};"
                f" make one with `gradwire keys create NAME --state-dir {config.state_dir}`,"
                " or let anyone in with --insecure-bind"
            )

    def _start_metrics(self) -> None:
        address, core = self.config.metrics_address, self.core
        if not address:
            return
        try:
            self._exposition = Exposition(core.metrics, address, core.scheduler.backlog, lambda: core.engines.engines)
        except OSError as error:
            raise NotNow(f"gradwire: cannot serve metrics on {address}: {error}") from error


def start_failure(error: ServiceError) -> str:
    """Exit message of a server whose engine did not start."""
    return f"gradwire: {error}"


def _beyond_loopback(config: ServerConfig) -> str:
    return " and ".join(address for address in (config.address, config.http) if address)
