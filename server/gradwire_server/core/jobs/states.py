"""The states of jobs, in memory and on disk.

A job is on disk before it is acknowledged, and every change of it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.jobs.specs import files_of
from gradwire_server.errors import ServiceError, unknown_job
from gradwire_server.journal.job_records import JobRecords, StoredJob

QUEUED, RUNNING, PAUSED = "queued", "running", "paused"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
ENDED = (SUCCEEDED, FAILED, CANCELLED)
NEXT: Mapping[str, tuple[str, ...]] = {
    QUEUED: (RUNNING, PAUSED, CANCELLED, FAILED),
    RUNNING: (QUEUED, PAUSED, *ENDED),
    PAUSED: (QUEUED, CANCELLED),
    SUCCEEDED: (),
    FAILED: (),
    CANCELLED: (),
}
"""The states that may follow each state."""


class JobStates:
    """Every job with its state.

    Args:
        on_change: Called when a job may have to be started or stopped.
        tell: Called with the owner of a job that is not as it was.

    Attributes:
        changing: Held while a job is made, changed or deleted.
    """

    def __init__(self, records: JobRecords, on_change: Callable[[], object], tell: Callable[[str], object]) -> None:
        self._records, self.on_change, self._tell = records, on_change, tell
        self._known: dict[str, StoredJob] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._files: dict[str, Sequence[str]] = {}
        self.changing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[jobs.Job]:
        """All jobs, oldest first."""
        return iter([stored.job for stored in self._known.values()])

    async def load(self) -> None:
        """Read the jobs; those that ran when the server ended are queued again."""
        for stored in await self._records.load():
            self._add(stored)
        for stored in list(self._known.values()):
            if stored.job.state == RUNNING:
                await self.move(stored.job.job_id, QUEUED, "The server was started again; the job goes on.")

    def get(self, caller: Caller, job_id: str) -> jobs.Job:
        """Return a job.

        Raises:
            ServiceError: UNKNOWN_JOB, also for one of another key.
        """
        stored = self._known.get(job_id)
        if stored is None or (caller.name != stored.job.owner and not caller.sees_all):
            raise unknown_job(job_id)
        return stored.job

    def find(self, job_id: str) -> jobs.Job | None:
        """A job of any key; None if there is none."""
        stored = self._known.get(job_id)
        return None if stored is None else stored.job

    def needing(self, file_id: str) -> str:
        """The id of a job that has not ended and names a file; "" if there is none."""
        for job_id, files in self._files.items():
            if file_id in files and self._known[job_id].job.state not in ENDED:
                return job_id
        return ""

    def of_key(self, owner: str, idempotency_key: str) -> StoredJob | None:
        """The job that an idempotency key has made."""
        return self._known.get(self._by_key.get((owner, idempotency_key), ""))

    def repeated(self, owner: str, request: bytes, since: float) -> jobs.Job | None:
        """The newest job since then that was made by an equal request."""
        for stored in reversed(self._known.values()):
            if stored.job.owner == owner and stored.request == request and stored.job.created_at > since:
                return stored.job
        return None

    async def insert(self, stored: StoredJob, events: Sequence[jobs.JobEvent]) -> None:
        """Add a job; ``changing`` is held."""
        await self._records.insert(stored, events)
        self._add(stored)
        self._tell(stored.job.owner)

    async def delete(self, job_id: str) -> None:
        """Forget a job; ``changing`` is held."""
        await self._records.delete(job_id)
        self._tell(self._known[job_id].job.owner)
        del self._known[job_id], self._files[job_id]
        self._by_key = {key: made for key, made in self._by_key.items() if made != job_id}

    async def update(self, job: jobs.Job, events: Sequence[jobs.JobEvent] = ()) -> None:
        """Replace a job by its changed copy; ``changing`` is held."""
        await self._records.update(job, events)
        old = self._known[job.job_id]
        self._known[job.job_id] = StoredJob(job, old.idempotency_key, old.request)
        self._tell(job.owner)

    async def events(
        self, job_id: str, after: int, limit: int, *, oldest_first: bool = False
    ) -> Sequence[jobs.JobEvent]:
        """Events of a job beyond a number."""
        return await self._records.events(job_id, after, limit, oldest_first=oldest_first)

    async def move(
        self, job_id: str, state: str, words: str, error: jobs.JobError | None = None, level: str = "info"
    ) -> jobs.Job:
        """Bring a job into another state; a paused one that is to pause stays as it is.

        Raises:
            ServiceError: UNSUPPORTED if it cannot follow the present one.
        """
        async with self.changing:
            job = copied(self._known[job_id].job)
            if job.state == state == PAUSED:
                return job
            if state not in NEXT[job.state]:
                raise unfit(f"the job {job_id} is {job.state} and cannot become {state}")
            if state in ENDED:
                end(job, state, error)
            job.state = state
            event = last_words(job) if state == FAILED else said(words, level)
            await self.update(job, [event])
        self.on_change()
        return job

    async def change(self, job_id: str, **fields: bool) -> None:
        """Set fields of a job, unless it was deleted meanwhile."""
        async with self.changing:
            known = self.find(job_id)
            if known is None:
                return
            job = copied(known)
            for name, value in fields.items():
                setattr(job, name, value)
            await self.update(job)

    def _add(self, stored: StoredJob) -> None:
        self._known[stored.job.job_id] = stored
        self._files[stored.job.job_id] = files_of(stored.job.spec)
        if stored.idempotency_key:
            self._by_key[stored.job.owner, stored.idempotency_key] = stored.job.job_id


def copied(job: jobs.Job) -> jobs.Job:
    """A copy to change."""
    copy = jobs.Job()
    copy.CopyFrom(job)
    return copy


def end(job: jobs.Job, state: str, error: jobs.JobError | None) -> None:
    """End a job in a state of ``ENDED``."""
    job.state, job.finished_at = state, time.time()
    if error is not None and state == FAILED:
        job.error.CopyFrom(error)


def last_words(job: jobs.Job) -> jobs.JobEvent:
    """The last event of an ended job."""
    if job.state == SUCCEEDED:
        return said("The job has successfully completed")
    return said(f"The job failed: {job.error.message}", "error")


def said(message: str, level: str = "info") -> jobs.JobEvent:
    """An event with a sentence."""
    return jobs.JobEvent(created_at=time.time(), level=level, message=message, type="message")


def unfit(message: str) -> ServiceError:
    """The error of a change that a job's state does not allow."""
    return ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="job_id")
