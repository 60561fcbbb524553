"""The server put together: state folder, engine, scheduler, gRPC door; started in this order, stopped in the other."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import add_TrainingServiceServicer_to_server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gradwire_server.access.keys import Keys
from gradwire_server.config import Limits, ServerConfig
from gradwire_server.doors.grpc.interceptors import Guard
from gradwire_server.doors.grpc.service import TrainingService
from gradwire_server.engine_client.process import EngineClient, EngineProcess
from gradwire_server.errors import RpcError
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.observability.exposition import Exposition
from gradwire_server.observability.metrics import Metrics
from gradwire_server.observability.tracing import Tracing
from gradwire_server.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

SERVICE = "gradwire.v1.TrainingService"
STREAMS_GRACE_S = 5.0
ENGINE_GRACE_S = 5.0


def grpc_options(limits: Limits) -> list[tuple[str, int]]:
    """Bursts of thousands of calls wait, frequent pings are allowed, nothing is
    compressed, two servers never share a port by accident."""
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.max_concurrent_streams", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.so_reuseport", 0),
    ]


def credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """TLS with the server's certificate; with a client CA, only for clients whose certificate it signed.

    Raises:
        SystemExit: a file cannot be read.
    """

    def read(path: Path | None) -> bytes | None:
        try:
            return path.read_bytes() if path else None
        except OSError as error:
            raise SystemExit(f"gradwire: {path} cannot be read: {error.strerror}") from error

    pair = (read(config.tls_key) or b"", read(config.tls_cert) or b"")
    authority = read(config.tls_client_ca)
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


class Server:
    """One server over one state folder.

    Args:
        config: its settings.
        engine: another than the child process that the settings describe; it is the caller's to stop.
        tracing: another than what the settings describe; it is the caller's to close.
    """

    def __init__(
        self, config: ServerConfig, engine: EngineClient | None = None, tracing: Tracing | None = None
    ) -> None:
        self.config = config
        self._given = engine
        self._own_engine: EngineProcess | None = None
        self._journal: Journal | None = None
        self._lock = -1
        self._given_tracing = tracing
        self._tracing = Tracing()
        self._exposition: Exposition | None = None
        self._grpc: Any = None
        self._health: Any = None
        self.address = ""
        self.left: dict[str, int] = {}

    @property
    def engine(self) -> EngineClient:
        engine = self._given or self._own_engine
        if engine is None:
            raise RuntimeError("the server is not started")
        return engine

    async def start(self) -> None:
        """
        Raises:
            RpcError: the engine did not start, and why.
            SystemExit: the address or the state folder cannot be had; with a sentence.
        """
        config = self.config
        open_door = config.loopback or config.insecure_bind
        self.keys = keys = Keys(config.state_dir, open_door=open_door)
        if not open_door and not keys.any:
            raise SystemExit(
                f"gradwire: without API keys the server listens on loopback only, not on {config.address};"
                f" make one with `gradwire keys create NAME --state-dir {config.state_dir}`,"
                " or let anyone in with --insecure-bind"
            )
        config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_state()
        try:
            self._journal = journal = Journal(config.state_dir, keep_payloads=config.durability == "journal")
            self.runs = RunRecords(journal.store, config.state_dir, config.limits.max_runs)
            records = await self.runs.load()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter from sqlite3's own message
            raise SystemExit(
                f"gradwire: {config.state_dir / 'gradwire.db'} cannot be read ({error}); put a copy of the folder in"
                " its place. Checkpoints below runs/ are files of their own, and may be whole"
            ) from error
        self._health = health.aio.HealthServicer()
        if self._given is None:
            self._own_engine = EngineProcess(config, self._engine_changed)
            await self._own_engine.start()
        self.metrics = metrics = Metrics(per_run=config.metrics_runs)
        metrics.know(self.engine.hello.losses)
        journal.store.on_commit = metrics.committed
        self._start_tracing()
        self.scheduler = Scheduler(self.engine, journal, self.runs, config, keys.quota, metrics, self._tracing)
        await self.scheduler.start(records)
        self._service = TrainingService(config, self.engine, self.runs, self.scheduler, keys)
        self._grpc = grpc.aio.server(interceptors=[Guard(keys)], options=grpc_options(config.limits))
        add_TrainingServiceServicer_to_server(self._service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        try:
            if config.tls_cert is None:
                port = self._grpc.add_insecure_port(config.address)
            else:
                port = self._grpc.add_secure_port(config.address, credentials(config))
        except RuntimeError as error:
            raise SystemExit(f"gradwire: cannot listen on {config.address}: {error}") from error
        self._start_metrics()
        await self._grpc.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._set_ready(True)
        self.address = f"{config.address.rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        """Accepts no more, finishes what is being carried out, ends the streams, then the engine, then the journal.

        Stopping twice is fine.
        """
        door, self._grpc = self._grpc, None
        engine, self._own_engine = self._own_engine, None
        journal, self._journal = self._journal, None
        if door is not None:
            await self._health.enter_graceful_shutdown()
            self.left = await self.scheduler.drain(self.config.grace_s)
            self._service.stopping.set()
            await door.stop(STREAMS_GRACE_S)
        if engine is not None:
            await engine.stop(ENGINE_GRACE_S)
        if journal is not None:
            await journal.close()
        exposition, self._exposition = self._exposition, None
        if exposition is not None:
            await asyncio.to_thread(exposition.close)
        tracing, self._tracing = self._tracing, Tracing()
        if tracing is not self._given_tracing:
            await asyncio.to_thread(tracing.close)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

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

    def _start_tracing(self) -> None:
        try:
            if self._given_tracing is not None:
                self._tracing = self._given_tracing
            elif self.config.traces:
                self._tracing = Tracing.to(self.config.traces, "gradwire-front")
        except RuntimeError as error:
            raise SystemExit(f"gradwire: {error}") from error

    def _start_metrics(self) -> None:
        address = self.config.metrics_address
        if not address:
            return
        try:
            self._exposition = Exposition(
                self.metrics, address, self.scheduler.backlog, self.engine.vitals, lambda: self.engine.is_ready
            )
        except OSError as error:
            raise SystemExit(f"gradwire: cannot serve metrics on {address}: {error}") from error

    @property
    def metrics_address(self) -> str:
        """Where the metrics are; empty where they are not asked for."""
        return self._exposition.address if self._exposition else ""

    def _lock_state(self) -> None:
        lock = os.open(self.config.state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode() or "another process"
            os.close(lock)
            raise SystemExit(
                f"gradwire: the state folder {self.config.state_dir} is in use by process {holder}"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock

    def _engine_changed(self, ready: bool) -> None:
        if self._grpc is not None:
            self._changing = asyncio.ensure_future(self._set_ready(ready))

    async def _set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set(SERVICE, status.SERVING if ready else status.NOT_SERVING)


def start_failure(error: RpcError) -> str:
    """The sentence with which a server that could not start ends."""
    return f"gradwire: {pb.ErrorCode.Name(error.code).removeprefix('ERROR_CODE_').lower()}: {error}"
