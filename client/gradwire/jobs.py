"""Trainings that the server runs by itself: ``service.jobs``."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as pb

from gradwire.errors import InvalidArgumentError, InvalidRequestError
from gradwire.files import Files
from gradwire.wire.transport import Transport

ENDED = ("succeeded", "failed", "cancelled")
FILE_SETTINGS = ("data", "validation", "script")
"""Settings of a recipe that name files."""
SERVERS_OWN = ("address", "folder")
"""Settings of a recipe that are the server's to choose."""
PAGE_SIZE = 500
POLL_S = 0.5


@dataclass(frozen=True)
class JobCheckpoint:
    """A checkpoint of a job.

    Attributes:
        step: Steps taken before it.
        path: ``"RUN_ID/NAME"``, for ``sampling_client``, ``fork_run`` and others.
        created_at: Unix time in seconds.
        metrics: The newest metrics at that step.
    """

    step: int
    path: str
    created_at: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class JobEvent:
    """Something that happened in a job.

    Attributes:
        number: Grows within the job.
        created_at: Unix time in seconds.
        level: ``"info"``, ``"warn"`` or ``"error"``.
        message: A sentence.
        type: ``"message"`` or ``"metrics"``.
        step: The step that metrics belong to; 0 for a message.
        data: The metrics.
    """

    number: int
    created_at: float
    level: str
    message: str
    type: str
    step: int
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A job as the server knows it. Times are Unix seconds, 0 for what has not happened.

    Attributes:
        job_id: The job's id.
        recipe: Name of its recipe, or ``"script"``.
        state: ``"queued"``, ``"running"``, ``"paused"``, ``"succeeded"``, ``"failed"`` or ``"cancelled"``.
        settings: The recipe's settings as they were given.
        name, metadata: Labels for people.
        owner: Name of the key that created it; empty on a server without keys.
        step, total_steps: Steps taken, and to take; 0 before that is known.
        trained_tokens: Tokens of the batches that were trained on.
        attempt: Number of workers that it had so far.
        run_id: Its run; empty before there is one.
        checkpoints: Its checkpoints, oldest first.
        result_files: Ids of files with its metrics, once it has succeeded.
        error: Why it failed; empty otherwise.
        error_code: The kind of that, such as ``"invalid_training_file"``.
    """

    job_id: str
    recipe: str
    state: str
    settings: Mapping[str, Any]
    name: str
    metadata: Mapping[str, str]
    owner: str
    created_at: float
    started_at: float
    finished_at: float
    step: int
    total_steps: int
    trained_tokens: int
    attempt: int
    run_id: str
    checkpoints: tuple[JobCheckpoint, ...] = ()
    result_files: tuple[str, ...] = ()
    error: str = ""
    error_code: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it has succeeded, failed or been cancelled."""
        return self.state in ENDED

    @staticmethod
    def from_message(job: pb.Job) -> Job:
        return Job(
            job_id=job.job_id,
            recipe=job.spec.recipe,
            state=job.state,
            settings=json.loads(job.spec.settings or "{}"),
            name=job.spec.name,
            metadata=dict(job.spec.metadata),
            owner=job.owner,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            step=job.step,
            total_steps=job.total_steps,
            trained_tokens=job.trained_tokens,
            attempt=job.attempt,
            run_id=job.run_id,
            checkpoints=tuple(
                JobCheckpoint(each.step, each.path, each.created_at, json.loads(each.metrics or "{}"))
                for each in job.checkpoints
            ),
            result_files=tuple(job.result_files),
            error=job.error.message,
            error_code=job.error.code,
        )


@dataclass(frozen=True)
class JobEnd:
    """How a job ended, as its worker reports it.

    Attributes:
        state: ``"succeeded"`` or ``"failed"``.
        result_files: Ids of files with its metrics.
        error: Why it failed.
        error_code: The kind of that.
        param: The setting at fault.
    """

    state: str
    result_files: tuple[str, ...] = ()
    error: str = ""
    error_code: str = ""
    param: str = ""


class Jobs:
    """The jobs of your key on a server: ``service.jobs``."""

    def __init__(self, transport: Transport, files: Files) -> None:
        self._transport, self._files = transport, files

    async def submit(
        self,
        recipe: str,
        settings: Mapping[str, Any] | Any,
        name: str = "",
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str = "",
    ) -> Job:
        """Queue a training that the server runs by itself; it is on the server's disk when this returns.

        Args:
            recipe: A recipe of ``gradwire train``; ``"script"`` for administrators of a server that allows it.
            settings: Its settings, as a mapping or as the recipe's own class. ``data`` and ``validation`` are paths
                of local files, which are uploaded, or ids of files on the server. ``model`` is one of the server's;
                ``address``, ``folder`` and ``loggers`` are the server's to choose.
            name: A label for people.
            metadata: Key-value labels for people.
            idempotency_key: The same key again, with the same settings and files, returns the job that it made.

        Raises:
            InvalidArgumentError: A setting is unknown or out of range, a file is missing, or some lines of it cannot be
                used. Files that were uploaded for a refused job are deleted unless there is an ``idempotency_key``.
            AlreadyExistsError: The key made a job with other settings or files.
        """
        arguments = dataclasses.asdict(settings) if dataclasses.is_dataclass(settings) else dict(settings)  # type: ignore[arg-type]
        if dataclasses.is_dataclass(settings):
            arguments = {key: value for key, value in arguments.items() if key not in SERVERS_OWN}
        uploaded = list[str]()
        for key in FILE_SETTINGS:
            if isinstance(arguments.get(key), list):
                raise InvalidArgumentError(f"{key} is a list: a job trains on one file, so join them", field=key)
            if (value := arguments.get(key)) and not str(value).startswith("file-"):
                arguments[key] = await self._uploaded(str(value), key, idempotency_key)
                uploaded.append(arguments[key])
        spec = pb.JobSpec(recipe=recipe, settings=json.dumps(arguments), name=name, metadata=metadata)
        request = pb.CreateJobRequest(spec=spec, idempotency_key=idempotency_key or secrets.token_hex(16))
        try:
            return Job.from_message(await self._transport.job_call(lambda stub: stub.CreateJob, request))
        except InvalidRequestError:
            for file_id in uploaded if not idempotency_key else ():
                await self._files.delete(file_id)
            raise

    async def get(self, job_id: str) -> Job:
        """Fetch a job."""
        answer = await self._transport.job_call(lambda stub: stub.GetJob, pb.GetJobRequest(job_id=job_id))
        return Job.from_message(answer)

    async def list(self, metadata: Mapping[str, str] | None = None) -> Sequence[Job]:
        """List the jobs of your key, newest first; only those that have all of ``metadata``."""
        jobs: list[Job] = []
        more = True
        while more:
            after = jobs[-1].job_id if jobs else ""
            request = pb.ListJobsRequest(page_size=PAGE_SIZE, after=after, metadata=metadata)
            answer = await self._transport.job_call(lambda stub: stub.ListJobs, request)
            jobs += map(Job.from_message, answer.jobs)
            more = answer.has_more
        return jobs

    async def cancel(self, job_id: str) -> Job:
        """End a job; its run and its checkpoints stay."""
        request = pb.CancelJobRequest(job_id=job_id)
        return Job.from_message(await self._transport.job_call(lambda stub: stub.CancelJob, request))

    async def pause(self, job_id: str) -> Job:
        """Stop a job until :meth:`resume`; its worker saves a checkpoint first where it can."""
        request = pb.PauseJobRequest(job_id=job_id)
        return Job.from_message(await self._transport.job_call(lambda stub: stub.PauseJob, request))

    async def resume(self, job_id: str) -> Job:
        """Queue a paused job again; it goes on where it was."""
        request = pb.ResumeJobRequest(job_id=job_id)
        return Job.from_message(await self._transport.job_call(lambda stub: stub.ResumeJob, request))

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its events and its log; its run stays."""
        await self._transport.job_delete(lambda stub: stub.DeleteJob, pb.DeleteJobRequest(job_id=job_id))

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """Wait until a job has ended.

        Args:
            timeout: Seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: The time is over; the job goes on.
        """
        async with asyncio.timeout(timeout):
            while not (job := await self.get(job_id)).has_ended:  # noqa: ASYNC110  nothing here learns of it
                await asyncio.sleep(POLL_S)
            return job

    async def events(self, job_id: str, after: int = 0) -> Sequence[JobEvent]:
        """List what has happened in a job, oldest first; behind the event with the number ``after``."""
        events: list[JobEvent] = []
        more = True
        while more:
            number = events[-1].number if events else after
            request = pb.ListJobEventsRequest(job_id=job_id, after=number, page_size=PAGE_SIZE, oldest_first=True)
            answer = await self._transport.job_call(lambda stub: stub.ListJobEvents, request)
            events += [
                JobEvent(
                    each.number, each.created_at, each.level, each.message, each.type, each.step,
                    json.loads(each.data or "{}"),
                )
                for each in answer.events
            ]  # fmt: skip
            more = answer.has_more
        return events

    async def log(self, job_id: str, offset: int = 0) -> str:
        """Read what a job's workers have printed, from an offset in bytes."""
        content = b""
        while True:
            request = pb.ReadJobLogRequest(job_id=job_id, offset=offset + len(content))
            answer = await self._transport.job_call(lambda stub: stub.ReadJobLog, request)
            content += answer.chunk
            if not answer.chunk or offset + len(content) >= answer.size_bytes:
                return content.decode(errors="replace")

    async def report(
        self,
        job_id: str,
        attempt: int,
        events: Sequence[JobEvent] = (),
        checkpoints: Sequence[JobCheckpoint] = (),
        run_id: str = "",
        total_steps: int = 0,
        resolved: Mapping[str, Any] | None = None,
        end: JobEnd | None = None,
    ) -> Job:
        """Report, as a job's worker, what happened; it is on the server's disk when this returns.

        Args:
            attempt: The worker's number.
            events: Their own numbers are ignored; metrics of a step that was reported before replace these.
            checkpoints: New checkpoints; known ones are ignored.
            resolved: The settings as the recipe uses them.
            end: How the job ended; it has if this is given.

        Raises:
            StaleEpochError: The job is not running, or has another worker.
        """
        request = pb.ReportJobRequest(job_id=job_id, attempt=attempt, run_id=run_id, total_steps=total_steps)
        for event in events:
            request.events.add(
                created_at=event.created_at, level=event.level, message=event.message, type=event.type,
                step=event.step, data=json.dumps(dict(event.data)),
            )  # fmt: skip
        for each in checkpoints:
            metrics = json.dumps(dict(each.metrics))
            request.checkpoints.add(step=each.step, path=each.path, created_at=each.created_at, metrics=metrics)
        if resolved is not None:
            request.resolved = json.dumps(dict(resolved))
        if end is not None:
            request.state = end.state
            request.result_files.extend(end.result_files)
            if end.state == "failed":
                request.error.CopyFrom(pb.JobError(code=end.error_code, message=end.error, param=end.param))
        return Job.from_message(await self._transport.job_call(lambda stub: stub.ReportJob, request))

    async def _uploaded(self, path: str, setting: str, idempotency_key: str) -> str:
        own = hashlib.sha256(f"{setting} of {idempotency_key}".encode()).hexdigest() if idempotency_key else ""
        purpose = "script" if setting == "script" else "fine-tune"
        file = await self._files.upload(path, purpose, idempotency_key=own)
        if file.num_problems:
            await self._files.delete(file.file_id)
            raise InvalidArgumentError(f"{path}: {file.problems_text}", field="data")
        return file.file_id
