"""The gRPC door: the services for training, jobs and health on one port."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
from gradwire_proto.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server
from gradwire_proto.v1.jobs_pb2_grpc import add_JobServiceServicer_to_server
from gradwire_proto.v1.sessions_pb2_grpc import add_SessionServiceServicer_to_server
from gradwire_proto.v1.training_pb2_grpc import add_TrainingServiceServicer_to_server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.doors.certificates import Certificates
from gradwire_server.doors.door import Door
from gradwire_server.doors.grpc.engines import EngineService
from gradwire_server.doors.grpc.headers import HEADER_BYTES
from gradwire_server.doors.grpc.interceptors import Guard
from gradwire_server.doors.grpc.jobs import JobService
from gradwire_server.doors.grpc.service import TrainingService
from gradwire_server.doors.grpc.sessions import SessionService
from gradwire_server.errors import NotNow
from gradwire_server.limits import Limits

SERVICE = "gradwire.v1.TrainingService"
RUNS = "gradwire.v1.Runs"
"""Name of the health check that fails while a run is parked."""
STREAMS_GRACE_S = 5.0
CONNECTION_STREAMS = 64
"""Calls of a connection at a time; clients open another connection for more, or wait."""
HANDSHAKE_S = 20.0
"""Time for a connection to begin: TLS and the settings of HTTP/2."""
IDLE_S = 600.0
"""Time that a connection may stay without a call; gRPC's clients open another with their next one."""


class GrpcDoor(Door):
    """The gRPC server in front of a started core.

    Args:
        core: The core that executes the calls.

    Attributes:
        address: ``HOST:PORT`` where the door listens, once it is open.
        local_address: Where processes of this user reach it, without TLS: a socket in a folder of its own.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._health: Any = health.aio.HealthServicer()
        self._service: TrainingService | None = None
        self._grpc: Any = None
        self._changing: set[asyncio.Future[None]] = set()
        self.address = self.local_address = ""
        self._socket_folder: tempfile.TemporaryDirectory[str] | None = None

    async def open(self) -> None:
        """Listen on the configured address.

        Raises:
            SystemExit: The address cannot be bound, or a TLS file cannot be read; with a message.
        """
        config = self._core.config
        self._service = TrainingService(self._core)
        self._grpc = grpc.aio.server(interceptors=[Guard(self._core)], options=grpc_options(config.limits))
        add_TrainingServiceServicer_to_server(self._service, self._grpc)
        add_JobServiceServicer_to_server(JobService(self._core), self._grpc)
        add_SessionServiceServicer_to_server(SessionService(self._core), self._grpc)
        add_EngineServiceServicer_to_server(EngineService(self._core), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        self._socket_folder = tempfile.TemporaryDirectory(prefix="gradwire-", ignore_cleanup_errors=True)
        self.local_address = f"unix:{self._socket_folder.name}/door"
        try:
            self._grpc.add_insecure_port(self.local_address)
            if config.tls_cert is None:
                port = self._grpc.add_insecure_port(config.address)
            else:
                port = self._grpc.add_secure_port(config.address, credentials(config))
        except RuntimeError as error:
            raise NotNow(f"gradwire: cannot listen on {config.address}: {error}") from error
        await self._grpc.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._set_ready(True)
        await self._set_parked(self._core.scheduler.num_parked)
        self.address = f"{config.address.rpartition(':')[0]}:{port}"

    def engine_changed(self) -> None:
        """Report to health checks whether an engine is ready."""
        if self._grpc is not None:
            self._report(self._set_ready(self._core.engines.is_ready))

    def parked_changed(self, count: int) -> None:
        """Report to health checks whether a run is parked."""
        if self._grpc is not None:
            self._report(self._set_parked(count))

    def _report(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    @property
    def is_open(self) -> bool:
        """Whether the door accepts calls."""
        return self._grpc is not None

    async def announce_end(self) -> None:
        """Report to health checks that the server is about to stop."""
        if self.is_open:
            await self._health.enter_graceful_shutdown()

    async def close(self) -> None:
        """End the streams, then every remaining call. A second call does nothing."""
        door, self._grpc = self._grpc, None
        if door is not None and self._service is not None:
            self._service.stopping.set()
            self._core.agents.let_go()
            await door.stop(STREAMS_GRACE_S)
        folder, self._socket_folder = self._socket_folder, None
        if folder is not None:
            folder.cleanup()

    async def _set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set(SERVICE, status.SERVING if ready else status.NOT_SERVING)

    async def _set_parked(self, count: int) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set(RUNS, status.NOT_SERVING if count else status.SERVING)


def grpc_options(limits: Limits) -> list[tuple[str, int]]:
    """Options of the gRPC server.

    Bursts of thousands of calls are queued, frequent pings are allowed, nothing is compressed, and two servers cannot
    share a port by accident. Connections that say nothing are ended, as anybody can open thousands.
    """
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.max_concurrent_streams", CONNECTION_STREAMS),
        ("grpc.max_metadata_size", HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * HEADER_BYTES),
        ("grpc.http2.settings_timeout", int(HANDSHAKE_S * 1e3)),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1e3)),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1e3)),
    ]


def credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """TLS credentials with the server's certificate; with a client CA, clients need a certificate that it signed.

    Raises:
        SystemExit: A file cannot be read.
    """
    files = Certificates(config)

    def present() -> grpc.ServerCertificateConfiguration:
        key, certificate, authority = files.pem()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        return present() if files.changed() else None

    # The stubs do not know that None means the present one.
    return grpc.dynamic_ssl_server_credentials(present(), renewed, files.client_ca is not None)  # type: ignore[arg-type]
