"""`gradwire.v1.JobService`: each RPC is one call on the core."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.jobs_pb2_grpc import JobServiceServicer

from gradwire_server.config import CHUNK_BYTES
from gradwire_server.core.core import Core
from gradwire_server.doors.grpc.interceptors import CALLER
from gradwire_server.errors import ServiceError


class JobService(JobServiceServicer):
    """The RPCs of the job service, documented in ``jobs.proto``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # ---- jobs ----

    async def CreateJob(self, request: jobs.CreateJobRequest, context: Any) -> jobs.Job:
        if request.spec.note:
            message = "note is what a door of the server keeps with a job: leave it out"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="note")
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
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "the upload has no frame", field="file")

        async def chunks() -> AsyncIterator[bytes]:
            if first.chunk:
                yield first.chunk
            async for frame in frames:
                async with self._core.calls.slice(caller.name):
                    if len(frame.chunk) > CHUNK_BYTES:
                        message = f"a chunk has {len(frame.chunk)} bytes; {CHUNK_BYTES} at most"
                        raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="chunk")
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
