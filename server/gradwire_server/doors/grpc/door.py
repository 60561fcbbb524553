"""The gRPC door: the services for training, jobs and health on one port."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.engine_pb2 import EngineChunk
from gradwire_proto.v1.engine_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from gradwire_proto.v1.jobs_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server
from gradwire_proto.v1.sessions_pb2_grpc import SessionServiceServicer, add_SessionServiceServicer_to_server
from gradwire_proto.v1.training_pb2_grpc import add_TrainingServiceServicer_to_server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.doors.certificates import Certificates
from gradwire_server.doors.door import Door
from gradwire_server.doors.grpc.headers import HEADER_BYTES
from gradwire_server.doors.grpc.interceptors import CALLER, Guard
from gradwire_server.doors.grpc.service import TrainingService
from gradwire_server.engine_link.chunks import ADMITTED
from gradwire_server.errors import NotNow, ServiceError, invalid
from gradwire_server.limits import Limits

if TYPE_CHECKING:
    from gradwire_server.engine_client.remote import RemoteLife


class SessionService(SessionServiceServicer):
    """The RPCs of the session service, documented in ``sessions.proto``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def CreateRolloutSession(
        self, request: sessions.CreateRolloutSessionRequest, context: Any
    ) -> sessions.RolloutSession:
        return await self._core.rollouts.create(CALLER.get(), request)

    async def GetRolloutSession(
        self, request: sessions.GetRolloutSessionRequest, context: Any
    ) -> sessions.RolloutSession:
        return self._core.rollouts.get(CALLER.get(), request.session_id)

    async def ListRolloutSessions(
        self, request: sessions.ListRolloutSessionsRequest, context: Any
    ) -> sessions.ListRolloutSessionsResponse:
        page, token = self._core.rollouts.page(CALLER.get(), request)
        return sessions.ListRolloutSessionsResponse(sessions=page, next_page_token=token)

    async def EndRolloutSession(
        self, request: sessions.EndRolloutSessionRequest, context: Any
    ) -> sessions.RolloutSession:
        return await self._core.rollouts.end(CALLER.get(), request)

    async def DeleteRolloutSession(
        self, request: sessions.DeleteRolloutSessionRequest, context: Any
    ) -> sessions.DeleteRolloutSessionResponse:
        await self._core.rollouts.delete(CALLER.get(), request.session_id)
        return sessions.DeleteRolloutSessionResponse()

    async def GetRollout(
        self, request: sessions.GetRolloutRequest, context: Any
    ) -> AsyncIterator[sessions.RolloutFrame]:
        rollout = self._core.rollouts.rollout(CALLER.get(), request.session_id, request.first)
        async with aclosing(rollout) as frames:
            async for frame in frames:
                yield frame


class JobService(JobServiceServicer):
    """The RPCs of the job service, documented in ``jobs.proto``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # ---- jobs ----

    async def CreateJob(self, request: jobs.CreateJobRequest, context: Any) -> jobs.Job:
        if request.spec.note:
            raise invalid("note is what a door of the server keeps with a job: leave it out", "note")
        return await self._core.jobs.create(CALLER.get(), request.spec, request.idempotency_key)

    async def GetJob(self, request: jobs.GetJobRequest, context: Any) -> jobs.Job:
        return self._core.jobs.states.get(CALLER.get(), request.job_id)

    async def ListJobs(self, request: jobs.ListJobsRequest, context: Any) -> jobs.ListJobsResponse:
        found, more = self._core.jobs.page(CALLER.get(), request.page_size, request.after, request.metadata)
        return jobs.ListJobsResponse(jobs=found, has_more=more)

    async def CancelJob(self, request: jobs.CancelJobRequest, context: Any) -> jobs.Job:
        return await self._core.jobs.cancel(CALLER.get(), request.job_id)

    async def PauseJob(self, request: jobs.PauseJobRequest, context: Any) -> jobs.Job:
        return await self._core.jobs.pause(CALLER.get(), request.job_id)

    async def ResumeJob(self, request: jobs.ResumeJobRequest, context: Any) -> jobs.Job:
        return await self._core.jobs.resume(CALLER.get(), request.job_id)

    async def DeleteJob(self, request: jobs.DeleteJobRequest, context: Any) -> jobs.DeleteJobResponse:
        await self._core.jobs.delete(CALLER.get(), request.job_id)
        return jobs.DeleteJobResponse()

    async def ListJobEvents(self, request: jobs.ListJobEventsRequest, context: Any) -> jobs.ListJobEventsResponse:
        events, more = await self._core.jobs.events(
            CALLER.get(), request.job_id, request.after, request.page_size, oldest_first=request.oldest_first
        )
        return jobs.ListJobEventsResponse(events=events, has_more=more)

    async def ReadJobLog(self, request: jobs.ReadJobLogRequest, context: Any) -> jobs.ReadJobLogResponse:
        chunk, size = await self._core.jobs.read_log(CALLER.get(), request.job_id, request.offset)
        return jobs.ReadJobLogResponse(chunk=chunk, size_bytes=size)

    async def ReportJob(self, request: jobs.ReportJobRequest, context: Any) -> jobs.Job:
        return await self._core.job_turns.report(CALLER.get(), request)

    # ---- files ----

    async def UploadFile(self, request_iterator: AsyncIterator[jobs.UploadFileFrame], context: Any) -> jobs.File:
        caller, frames = CALLER.get(), aiter(request_iterator)
        first = await anext(frames, None)
        if first is None:
            raise invalid("the upload has no frame", "file")

        async def chunks() -> AsyncIterator[bytes]:
            if first.chunk:
                yield first.chunk
            async for frame in frames:
                async with self._core.calls.slice(caller.name):
                    if len(frame.chunk) > CHUNK_BYTES:
                        raise invalid(f"a chunk has {len(frame.chunk)} bytes; {CHUNK_BYTES} at most", "chunk")
                yield frame.chunk

        return await self._core.files.create(caller, first.file, chunks(), first.idempotency_key)

    async def GetFile(self, request: jobs.GetFileRequest, context: Any) -> jobs.File:
        return self._core.files.get(CALLER.get(), request.file_id)

    async def ListFiles(self, request: jobs.ListFilesRequest, context: Any) -> jobs.ListFilesResponse:
        files, more = self._core.files.page(
            CALLER.get(), request.page_size, request.after, request.purpose, oldest_first=request.oldest_first
        )
        return jobs.ListFilesResponse(files=files, has_more=more)

    async def DeleteFile(self, request: jobs.DeleteFileRequest, context: Any) -> jobs.DeleteFileResponse:
        await self._core.files.delete(CALLER.get(), request.file_id)
        return jobs.DeleteFileResponse()

    async def ReadFile(self, request: jobs.ReadFileRequest, context: Any) -> AsyncIterator[jobs.ReadFileFrame]:
        async with aclosing(self._core.files.content(CALLER.get(), request.file_id)) as chunks:
            async for chunk in chunks:
                yield jobs.ReadFileFrame(chunk=chunk)


class EngineService(EngineServiceServicer):
    """The RPC of the agents, documented in ``engine.proto``."""

    def __init__(self, core: Core) -> None:
        self._agents = core.agents

    async def Attach(self, requests: AsyncIterator[EngineChunk], context: Any) -> AsyncIterator[EngineChunk]:
        await context.send_initial_metadata(((ADMITTED, "yes"),))  # the agent sends its offer now
        first = await anext(aiter(requests), EngineChunk())
        if not first.HasField("offer"):
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "the first chunk is to be the engine's offer")
        life = await self._agents.attach(first.offer)
        reading = asyncio.create_task(_read(requests, life))
        try:
            async for chunk in life.chunks():
                yield chunk
            if reading.done():
                reading.result()  # raises the error of a key that was revoked
        finally:
            self._agents.detach(life, "its agent is gone")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _read(requests: AsyncIterator[EngineChunk], life: RemoteLife) -> None:
    try:
        async for chunk in requests:
            await life.take(chunk)
    finally:
        await life.take(None)


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
