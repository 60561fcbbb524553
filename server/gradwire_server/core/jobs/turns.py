"""The workers' side of jobs: which one starts next, what it reports, and how it ends.

What a worker has not reported is repeated by the next one from the run's last checkpoint, and replaces what was
reported for the same steps.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller, Keys
from gradwire_server.config import ServerConfig
from gradwire_server.core.jobs.states import (
    FAILED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    JobStates,
    copied,
    end,
    last_words,
    said,
)
from gradwire_server.errors import ServiceError, invalid

MOST = 2**53
"""Above all numbers of a report."""
MAX_CRASHES = 5
"""Crashes of a job's worker in a row without a step between them after which the job fails."""


class JobTurns:
    """The turns of jobs at the workers."""

    def __init__(self, config: ServerConfig, states: JobStates, keys: Keys) -> None:
        self.states, self._config, self._keys = states, config, keys
        self._crashes: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._turn = 0

    def choose(self, started: Collection[str]) -> jobs.Job | None:
        """The queued job that is to start next: of the key with the fewest running jobs, then the one served longest
        ago, its oldest.

        Args:
            started: Ids of the jobs that have a worker.
        """
        running = Counter(job.owner for job_id in started if (job := self.states.find(job_id)) is not None)
        oldest: dict[str, jobs.Job] = {}
        for job in self.states:
            if job.state == QUEUED and job.job_id not in started:
                oldest.setdefault(job.owner, job)
        fitting = [owner for owner in oldest if running[owner] < self._most_running(owner)]
        if not fitting:
            return None
        owner = min(fitting, key=lambda name: (running[name], self._served.get(name, 0)))
        return oldest[owner]

    async def begin(self, job_id: str) -> jobs.Job | None:
        """Make a queued job a running one, in its next attempt; None if it is no longer queued."""
        async with self.states.changing:
            known = self.states.find(job_id)
            if known is None or known.state != QUEUED:
                return None
            job = copied(known)
            job.state, job.attempt = RUNNING, job.attempt + 1
            job.started_at = job.started_at or time.time()
            words = "The job has started." if job.attempt == 1 else f"The job goes on in attempt {job.attempt}."
            await self.states.update(job, [said(words)])
            self._turn += 1
            self._served[job.owner] = self._turn
            return job

    async def worker_ended(self, job_id: str, attempt: int, code: int) -> None:
        """Queue a job again whose worker ended without a result, or let it fail if it does so over and over."""
        job = self.states.find(job_id)
        if job is None or job.state != RUNNING or job.attempt != attempt:
            return
        if not self._keys.may_call(job.owner):
            message = f"the key of {job.owner} was revoked while the job ran"
            await self.states.move(job_id, FAILED, "", jobs.JobError(code="key_revoked", message=message))
            return
        self._crashes[job_id] += 1
        if self._crashes[job_id] >= MAX_CRASHES:
            message = f"its worker ended {MAX_CRASHES} times in a row (exit code {code}) without a step; see the log"
            await self.states.move(job_id, FAILED, "", jobs.JobError(code="worker_crashed", message=message))
            return
        await self.states.move(job_id, QUEUED, f"The worker ended (exit code {code}); the job goes on.", level="warn")

    def crashes(self, job_id: str) -> int:
        """Crashes of a job's worker since its last step."""
        return self._crashes[job_id]

    async def report(self, caller: Caller, request: jobs.ReportJobRequest) -> jobs.Job:
        """Take over what a worker reports; on disk when this returns.

        Raises:
            ServiceError: UNKNOWN_JOB; STALE_EPOCH if the job is not running, or another worker runs it;
                PERMISSION_DENIED to others than workers; INVALID_ARGUMENT.
        """
        async with self.states.changing:
            job = copied(self.states.get(caller, request.job_id))
            if self._keys.required and not caller.lent:
                message = "only the worker that the server has started for a job reports on it"
                raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message, field="job_id")
            if job.state != RUNNING or job.attempt != request.attempt:
                message = f"the job {job.job_id} is {job.state} in attempt {job.attempt}; this is {request.attempt}"
                raise ServiceError(pb.ERROR_CODE_STALE_EPOCH, message)
            if request.state and request.state not in (SUCCEEDED, FAILED):
                raise invalid("a worker ends a job as succeeded or failed", "state")
            now, events = time.time(), list(request.events)
            for event in events:
                event.created_at = event.created_at or now
                tokens = _checked(event).get("train/tokens", 0)
                if event.step > job.step:
                    job.step = event.step
                    self._crashes.pop(job.job_id, None)
                    job.trained_tokens += int(tokens)
            for each in request.checkpoints:
                _object(each.metrics, "checkpoints.metrics")
            for name in ("run_id", "total_steps", "resolved"):
                if getattr(request, name):
                    setattr(job, name, getattr(request, name))
            known = {checkpoint.path for checkpoint in job.checkpoints}
            for checkpoint in request.checkpoints:
                if checkpoint.path not in known:  # a worker that goes on names the one from which it does, too
                    known.add(checkpoint.path)
                    checkpoint.created_at = checkpoint.created_at or now
                    job.checkpoints.append(checkpoint)
                    events.append(said(f"Checkpoint created at step {checkpoint.step}"))
            known_results = set(job.result_files)
            job.result_files.extend(name for name in request.result_files if name not in known_results)
            if request.state:
                end(job, request.state, request.error)
                events.append(last_words(job))
            await self.states.update(job, events)
        if request.state:
            self.states.on_change()
        return job

    def _most_running(self, owner: str) -> int:
        given = self._keys.quota(owner).running_jobs
        return self._config.limits.key_running_jobs if given is None else given


def _checked(event: jobs.JobEvent) -> dict[str, Any]:
    """The data of an event that can be kept and read."""
    data = _object(event.data, "events.data")
    tokens = data.get("train/tokens", 0)
    numbers = (tokens, event.step, event.created_at)
    if not all(isinstance(each, int | float) and 0 <= each < MOST for each in numbers):
        raise invalid("an event has a time, a step or a number of tokens that there cannot be", "events")
    return data


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid(f"{field} is no JSON object: {text[:50]!r}", field)
    return parsed
