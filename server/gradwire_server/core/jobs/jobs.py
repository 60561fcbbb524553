"""Jobs as callers see them: creation, listing, events and logs, and what their owners ask of them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.access.keys import Caller
from gradwire_server.config import ServerConfig
from gradwire_server.core.jobs.files import new_id, page_of
from gradwire_server.core.jobs.specs import JobSpecs
from gradwire_server.core.jobs.states import (
    CANCELLED,
    ENDED,
    FAILED,
    NEXT,
    PAUSED,
    QUEUED,
    JobStates,
    end,
    last_words,
    said,
    unfit,
)
from gradwire_server.errors import check_length, key_reused, limit_exceeded
from gradwire_server.journal.job_records import StoredJob

SAID = {QUEUED: "resumed", PAUSED: "paused", CANCELLED: "cancelled"}
MAX_PAGE = 1000
MAX_LOG_BYTES = 1 << 20
REPEATED_S = 600.0
"""Seconds within which a client repeats a request that it had no answer to."""


class JobService:
    """The jobs of a server."""

    def __init__(self, config: ServerConfig, states: JobStates, specs: JobSpecs) -> None:
        self.states, self._config, self._specs = states, config, specs

    async def create(
        self,
        caller: Caller,
        spec: jobs.JobSpec,
        idempotency_key: str = "",
        warnings: Collection[str] = (),
        error: jobs.JobError | None = None,
        *,
        repeated: bool = False,
    ) -> jobs.Job:
        """Queue a job, or return the one that this idempotency key has already made; on disk when this returns.

        Args:
            warnings: Told as its first events.
            error: Why the job cannot run; it has failed when this returns.
            repeated: The client sends the request again without a key: an equal one of a moment ago is this one.

        Raises:
            ServiceError: INVALID_ARGUMENT for settings that no recipe takes; UNKNOWN_FILE, UNKNOWN_MODEL,
                LIMIT_EXCEEDED; PERMISSION_DENIED for a script; ALREADY_EXISTS if the key made another job.
        """
        request = self._specs.content(caller, spec)
        check_length(idempotency_key, "max_name_chars", self._config.limits.max_name_chars, "idempotency_key")

        def known() -> jobs.Job | None:
            """The job that was made already; without one, a new one is checked."""
            if idempotency_key and (stored := self.states.of_key(caller.name, idempotency_key)):
                if stored.request != request and stored.job.spec != spec:
                    raise key_reused(f"the job {stored.job.job_id}", "settings")
                return stored.job
            if repeated and (job := self.states.repeated(caller.name, request, time.time() - REPEATED_S)) is not None:
                return job
            self._specs.check(caller, spec)
            self._check_room(caller)
            return None

        if (job := known()) is not None:
            return job
        await self._specs.check_settings(caller, spec)
        async with self.states.changing:
            if (job := known()) is not None:
                return job
            job = jobs.Job(job_id=new_id("ftjob-"), owner=caller.name, state=QUEUED, created_at=time.time())
            job.spec.CopyFrom(spec)
            events = [said(f"Created fine-tuning job: {job.job_id}"), *(said(each, "warn") for each in warnings)]
            if error is not None:
                end(job, FAILED, error)
                events.append(last_words(job))
            stored = StoredJob(job, idempotency_key, request)
            await self.states.insert(stored, events)
        self.states.on_change()
        return job

    def of_run(self, run_id: str) -> jobs.Job | None:
        """The job that made a run; None if none did."""
        return next((job for job in self.states if run_id and job.run_id == run_id), None)

    def untold(self, since: float) -> list[jobs.Job]:
        """Jobs that have ended since then, of which the webhook has not been told."""
        return [job for job in self.states if job.state in ENDED and not job.told and job.finished_at > since]

    async def mark_told(self, job_id: str) -> None:
        """Note that the webhook knows of a job's end; on disk when this returns."""
        await self.states.change(job_id, told=True)

    def page(
        self,
        caller: Caller,
        limit: int,
        after: str = "",
        metadata: Mapping[str, str] | None = None,
        *,
        noted: bool = False,
    ) -> tuple[list[jobs.Job], bool]:
        """List the caller's jobs, an admin's all, newest first, and whether there are more.

        Args:
            noted: Only those with which a door keeps a note.
        """
        wanted = (metadata or {}).items()
        newest_first = reversed(list(self.states))
        mine = [job for job in newest_first if caller.name == job.owner or caller.sees_all]
        mine = [job for job in mine if wanted <= dict(job.spec.metadata).items() and (job.spec.note or not noted)]
        return page_of(mine, [job.job_id for job in mine], min(limit or MAX_PAGE, MAX_PAGE), after, "after")

    async def cancel(self, caller: Caller, job_id: str) -> jobs.Job:
        """End a job; its run and checkpoints stay.

        Raises:
            ServiceError: UNKNOWN_JOB; UNSUPPORTED for one that has ended.
        """
        return await self._asked(caller, job_id, CANCELLED)

    async def pause(self, caller: Caller, job_id: str) -> jobs.Job:
        """Stop a job's worker until :meth:`resume`; a paused job again changes nothing.

        Raises:
            ServiceError: UNKNOWN_JOB; UNSUPPORTED for one that has ended.
        """
        return await self._asked(caller, job_id, PAUSED)

    async def resume(self, caller: Caller, job_id: str) -> jobs.Job:
        """Queue a paused job again.

        Raises:
            ServiceError: UNKNOWN_JOB; UNSUPPORTED for one that is not paused.
        """
        return await self._asked(caller, job_id, QUEUED)

    async def delete(self, caller: Caller, job_id: str) -> None:
        """Delete a job that has ended, with its events and log.

        Raises:
            ServiceError: UNKNOWN_JOB; UNSUPPORTED for one that has not ended.
        """
        async with self.states.changing:
            job = self.states.get(caller, job_id)
            if job.state not in ENDED:
                raise unfit(f"the job {job_id} is {job.state}: cancel it first")
            await self.states.delete(job_id)
            await asyncio.to_thread(shutil.rmtree, self.folder(job_id), ignore_errors=True)

    async def delete_model(self, caller: Caller, job_id: str) -> None:
        """Let the names of a job's models be none any more; its run and its checkpoints stay.

        Raises:
            ServiceError: UNKNOWN_JOB.
        """
        self.states.get(caller, job_id)
        await self.states.change(job_id, model_deleted=True)

    async def events(
        self, caller: Caller, job_id: str, after: int = 0, limit: int = 0, *, oldest_first: bool = False
    ) -> tuple[list[jobs.JobEvent], bool]:
        """List a job's events beyond a number, newest first unless asked otherwise, and whether there are more.

        Raises:
            ServiceError: UNKNOWN_JOB.
        """
        self.states.get(caller, job_id)
        most = min(limit or MAX_PAGE, MAX_PAGE)
        found = await self.states.events(job_id, after, most + 1, oldest_first=oldest_first)
        return list(found[:most]), len(found) > most

    async def read_log(self, caller: Caller, job_id: str, offset: int) -> tuple[bytes, int]:
        """Read what a job's workers have printed, from an offset, and the size of all of it.

        Raises:
            ServiceError: UNKNOWN_JOB.
        """
        self.states.get(caller, job_id)
        return await asyncio.to_thread(_read_log, self.log_file(job_id), offset)

    def folder(self, job_id: str) -> Path:
        """The folder of a job's recipe: its position, metrics, report and log."""
        return self._config.state_dir / "jobs" / job_id

    def log_file(self, job_id: str) -> Path:
        """Where a job's workers print."""
        return self.folder(job_id) / "job.log"

    # ---- internals ----

    def _check_room(self, caller: Caller) -> None:
        limits = self._config.limits
        if len(self.states) >= limits.max_jobs:
            raise limit_exceeded(f"the server has {len(self.states)} jobs", "max_jobs", limits.max_jobs, "job")
        count = sum(1 for job in self.states if job.owner == caller.name and job.state not in ENDED)
        if count >= limits.key_jobs:
            raise limit_exceeded(f"this key has {count} jobs that have not ended", "key_jobs", limits.key_jobs, "job")

    async def _asked(self, caller: Caller, job_id: str, state: str) -> jobs.Job:
        job = self.states.get(caller, job_id)
        fits = state in NEXT[job.state] or job.state == state == PAUSED
        if not fits or (state == QUEUED and job.state != PAUSED):
            raise unfit(f"the job {job_id} is {job.state} and cannot be {SAID[state]}")
        return await self.states.move(job_id, state, f"The job was {SAID[state]}.")


def _read_log(path: Path, offset: int) -> tuple[bytes, int]:
    if not path.exists():
        return b"", 0
    with path.open("rb") as file:
        size = path.stat().st_size
        file.seek(min(offset, size))
        return file.read(MAX_LOG_BYTES), size
