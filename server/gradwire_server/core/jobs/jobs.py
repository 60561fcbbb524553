"""Jobs: creation, states, events and reports.

A job is on disk before it is acknowledged, and every change of it is. What its worker has not reported is repeated by
the next one from the run's last checkpoint, and replaces what was reported for the same steps.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller, Keys
from gradwire_server.access.model_names import ModelNames
from gradwire_server.config import ServerConfig
from gradwire_server.core.jobs.files import Files, new_id, page_of
from gradwire_server.errors import ServiceError, check_length, limit_exceeded, unknown_job
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
SAID = {QUEUED: "resumed", PAUSED: "paused", CANCELLED: "cancelled"}
RECIPES = ("sft", "dpo", "kto", "orpo", "simpo", "reward", "process_reward", "ppo", "grpo", "distill")
SCRIPT = "script"
FILE_SETTINGS = ("data", "validation", "script")
"""Settings that name files of the owner's."""
OWN_SETTINGS = ("address", "folder", "loggers")
"""Settings that are the server's to choose."""
MAX_PAGE = 1000
MAX_LOG_BYTES = 1 << 20
MAX_METADATA_CHARS = 512
REPEATED_S = 600.0
"""Seconds within which a client repeats a request that it had no answer to."""
MAX_CRASHES = 5
"""Crashes of a job's worker in a row without a step between them after which the job fails."""


class Jobs:
    """The jobs of a server.

    Args:
        files: The files that they may name.
        on_change: Called when a job may have to be started or stopped.
    """

    def __init__(
        self,
        config: ServerConfig,
        records: JobRecords,
        files: Files,
        keys: Keys,
        models: ModelNames,
        on_change: Callable[[], object],
    ) -> None:
        self._config, self._records, self._files, self._keys, self._models = config, records, files, keys, models
        self._on_change = on_change
        self._known: dict[str, StoredJob] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._changing = asyncio.Lock()
        self._crashes: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._turn = 0

    async def load(self) -> None:
        """Read the jobs; those that ran when the server ended are queued again."""
        for stored in await self._records.load():
            self._add(stored)
        for stored in list(self._known.values()):
            if stored.job.state == RUNNING:
                await self._move(stored.job.job_id, QUEUED, "The server was started again; the job goes on.")

    # ---- for callers ----

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
        request = spec.SerializeToString(deterministic=True)
        check_length(idempotency_key, "max_name_chars", self._config.limits.max_name_chars, "idempotency_key")
        async with self._changing:
            if idempotency_key and (job_id := self._by_key.get((caller.name, idempotency_key))):
                known = self._known[job_id]
                if known.request != request:
                    message = f"this idempotency key made the job {job_id} with other settings; a new one takes a new"
                    raise ServiceError(pb.ERROR_CODE_ALREADY_EXISTS, message, field="idempotency_key")
                return known.job
            since = time.time() - REPEATED_S
            for stored in reversed(self._known.values()) if repeated else ():
                job = stored.job
                if job.owner == caller.name and stored.request == request and job.created_at > since:
                    return job
            self._check(caller, spec)
            self._check_room(caller)
            job = jobs.Job(job_id=new_id("ftjob-"), owner=caller.name, state=QUEUED, created_at=time.time())
            job.spec.CopyFrom(spec)
            events = [_said(f"Created fine-tuning job: {job.job_id}"), *(_said(each, "warn") for each in warnings)]
            if error is not None:
                _end(job, FAILED, error)
                events.append(_last_words(job))
            stored = StoredJob(job, idempotency_key, request)
            await self._records.insert(stored, events)
            self._add(stored)
        self._on_change()
        return job

    def get(self, caller: Caller, job_id: str) -> jobs.Job:
        """Return a job.

        Raises:
            ServiceError: UNKNOWN_JOB, also for one of another key.
        """
        stored = self._known.get(job_id)
        if stored is None or (caller.name != stored.job.owner and caller.role != "admin"):
            raise unknown_job(job_id)
        return stored.job

    def find(self, job_id: str) -> jobs.Job | None:
        """A job of any key; None if there is none."""
        stored = self._known.get(job_id)
        return None if stored is None else stored.job

    def of_run(self, run_id: str) -> jobs.Job | None:
        """The job that made a run; None if none did."""
        return next((each.job for each in self._known.values() if run_id and each.job.run_id == run_id), None)

    def untold(self, since: float) -> list[jobs.Job]:
        """Jobs that have ended since then, of which the webhook has not been told."""
        found = [stored.job for stored in self._known.values()]
        return [job for job in found if job.state in ENDED and not job.told and job.finished_at > since]

    async def mark_told(self, job_id: str) -> None:
        """Note that the webhook knows of a job's end; on disk when this returns."""
        await self._change(job_id, told=True)

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
        mine = [
            stored.job
            for stored in reversed(self._known.values())
            if caller.name == stored.job.owner or caller.role == "admin"
        ]
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
        async with self._changing:
            job = self.get(caller, job_id)
            if job.state not in ENDED:
                raise _unfit(f"the job {job_id} is {job.state}: cancel it first")
            await self._records.delete(job_id)
            del self._known[job_id]
            self._by_key = {key: made for key, made in self._by_key.items() if made != job_id}
            await asyncio.to_thread(shutil.rmtree, self.folder(job_id), ignore_errors=True)

    async def delete_model(self, caller: Caller, job_id: str) -> None:
        """Let the names of a job's models be none any more; its run and its checkpoints stay.

        Raises:
            ServiceError: UNKNOWN_JOB.
        """
        self.get(caller, job_id)
        await self._change(job_id, model_deleted=True)

    async def events(
        self, caller: Caller, job_id: str, after: int = 0, limit: int = 0, *, oldest_first: bool = False
    ) -> tuple[list[jobs.JobEvent], bool]:
        """List a job's events beyond a number, newest first unless asked otherwise, and whether there are more.

        Raises:
            ServiceError: UNKNOWN_JOB.
        """
        self.get(caller, job_id)
        most = min(limit or MAX_PAGE, MAX_PAGE)
        found = await self._records.events(job_id, after, most + 1, oldest_first=oldest_first)
        return found[:most], len(found) > most

    async def read_log(self, caller: Caller, job_id: str, offset: int) -> tuple[bytes, int]:
        """Read what a job's workers have printed, from an offset, and the size of all of it.

        Raises:
            ServiceError: UNKNOWN_JOB.
        """
        self.get(caller, job_id)
        return await asyncio.to_thread(_read_log, self.log_file(job_id), offset)

    async def report(self, caller: Caller, request: jobs.ReportJobRequest) -> jobs.Job:
        """Take over what a worker reports; on disk when this returns.

        Raises:
            ServiceError: UNKNOWN_JOB; STALE_EPOCH if the job is not running, or another worker runs it.
        """
        async with self._changing:
            job = jobs.Job()
            job.CopyFrom(self.get(caller, request.job_id))
            if job.state != RUNNING or job.attempt != request.attempt:
                message = f"the job {job.job_id} is {job.state} in attempt {job.attempt}; this is {request.attempt}"
                raise ServiceError(pb.ERROR_CODE_STALE_EPOCH, message)
            if request.state and request.state not in (SUCCEEDED, FAILED):
                raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "a worker ends a job as succeeded or failed")
            now, events = time.time(), list(request.events)
            for event in events:
                event.created_at = event.created_at or now
                if event.step > job.step:
                    job.step = event.step
                    self._crashes.pop(job.job_id, None)
                    job.trained_tokens += int(json.loads(event.data or "{}").get("train/tokens", 0))
            for name in ("run_id", "total_steps", "resolved"):
                if getattr(request, name):
                    setattr(job, name, getattr(request, name))
            known = {checkpoint.path for checkpoint in job.checkpoints}
            for checkpoint in request.checkpoints:
                if checkpoint.path not in known:
                    checkpoint.created_at = checkpoint.created_at or now
                    job.checkpoints.append(checkpoint)
                    events.append(_said(f"Checkpoint created at step {checkpoint.step}"))
            known_results = set(job.result_files)
            job.result_files.extend(name for name in request.result_files if name not in known_results)
            if request.state:
                _end(job, request.state, request.error)
                events.append(_last_words(job))
            await self._records.update(job, events)
            self._replace(job)
        if request.state:
            self._on_change()
        return job

    # ---- for the workers ----

    def choose(self, started: Collection[str]) -> jobs.Job | None:
        """The queued job that is to start next: of the key with the fewest running jobs, then the one served longest
        ago, its oldest.

        Args:
            started: Ids of the jobs that have a worker.
        """
        running = Counter(self._known[job_id].job.owner for job_id in started if job_id in self._known)
        oldest: dict[str, jobs.Job] = {}
        for stored in self._known.values():
            if stored.job.state == QUEUED and stored.job.job_id not in started:
                oldest.setdefault(stored.job.owner, stored.job)
        fitting = [owner for owner in oldest if running[owner] < self._most_running(owner)]
        if not fitting:
            return None
        owner = min(fitting, key=lambda name: (running[name], self._served.get(name, 0)))
        return oldest[owner]

    async def begin(self, job_id: str) -> jobs.Job | None:
        """Make a queued job a running one, in its next attempt; None if it is no longer queued."""
        async with self._changing:
            known = self.find(job_id)
            if known is None or known.state != QUEUED:
                return None
            job = jobs.Job()
            job.CopyFrom(known)
            job.state, job.attempt = RUNNING, job.attempt + 1
            job.started_at = job.started_at or time.time()
            words = "The job has started." if job.attempt == 1 else f"The job goes on in attempt {job.attempt}."
            await self._records.update(job, [_said(words)])
            self._replace(job)
            self._turn += 1
            self._served[job.owner] = self._turn
            return job

    async def worker_ended(self, job_id: str, attempt: int, code: int) -> None:
        """Queue a job again whose worker ended without a result, or let it fail if it does so over and over."""
        job = self.find(job_id)
        if job is None or job.state != RUNNING or job.attempt != attempt:
            return
        if not self._keys.may_call(job.owner):
            message = f"the key of {job.owner} was revoked while the job ran"
            await self._move(job_id, FAILED, "", jobs.JobError(code="key_revoked", message=message))
            return
        self._crashes[job_id] += 1
        if self._crashes[job_id] >= MAX_CRASHES:
            message = f"its worker ended {MAX_CRASHES} times in a row (exit code {code}) without a step; see the log"
            await self._move(job_id, FAILED, "", jobs.JobError(code="worker_crashed", message=message))
            return
        await self._move(job_id, QUEUED, f"The worker ended (exit code {code}); the job goes on.", level="warn")

    def crashes(self, job_id: str) -> int:
        """Crashes of a job's worker since its last step."""
        return self._crashes[job_id]

    def needs(self, file_id: str) -> str:
        """The id of a job that has not ended and names a file; "" if there is none."""
        for stored in self._known.values():
            if stored.job.state not in ENDED and file_id in _files_of(stored.job.spec):
                return stored.job.job_id
        return ""

    def folder(self, job_id: str) -> Path:
        """The folder of a job's recipe: its position, metrics, report and log."""
        return self._config.state_dir / "jobs" / job_id

    def log_file(self, job_id: str) -> Path:
        """Where a job's workers print."""
        return self.folder(job_id) / "job.log"

    # ---- internals ----

    def _check(self, caller: Caller, spec: jobs.JobSpec) -> None:
        limits = self._config.limits
        if spec.recipe == SCRIPT:
            if not self._config.job_scripts:
                raise _denied("scripts are off on this server: --job-scripts lets administrators run them")
            if caller.role != "admin" and self._keys.required:
                raise _denied("only administrators may run scripts as jobs")
        elif spec.recipe not in RECIPES:
            raise _invalid(f"recipe is {spec.recipe[:50]!r}; it must be one of {', '.join(RECIPES)}", "recipe")
        check_length(spec.name, "max_name_chars", limits.max_name_chars, "name")
        for field, text in (("settings", spec.settings), ("note", spec.note)):
            check_length(text, "max_kwargs_chars", limits.max_kwargs_chars, field)
        if len(spec.metadata) > limits.max_tags:
            raise limit_exceeded(f"{len(spec.metadata)} metadata", "max_tags", limits.max_tags, "metadata")
        for text in (text for pair in spec.metadata.items() for text in pair):
            if len(text) > MAX_METADATA_CHARS:
                raise _invalid(
                    f"metadata has a text of {len(text)} characters; {MAX_METADATA_CHARS} at most", "metadata"
                )
        settings = settings_of(spec)
        for name in OWN_SETTINGS:
            if settings.get(name):
                raise _invalid(f"{name} is the server's to choose: leave it out", name)
        if settings.get("init_from") and not str(settings["init_from"]).startswith("run-"):
            raise _invalid("init_from is no checkpoint RUN_ID/NAME, and folders are the server's", "init_from")
        if spec.recipe != SCRIPT:
            if not isinstance(settings.get("model"), str):
                raise _invalid("model is missing: name a model of this server", "model")
            self._models.find(settings["model"], "model")
        if not isinstance(settings.get(SCRIPT if spec.recipe == SCRIPT else "data"), str):
            raise _invalid("data is missing: upload a file and name its id", "data")
        for name in FILE_SETTINGS:
            if settings.get(name):
                self._files.get(caller, str(settings[name]), name)

    def _check_room(self, caller: Caller) -> None:
        limits = self._config.limits
        if len(self._known) >= limits.max_jobs:
            raise limit_exceeded(f"the server has {len(self._known)} jobs", "max_jobs", limits.max_jobs, "job")
        count = sum(1 for each in self._known.values() if each.job.owner == caller.name and each.job.state not in ENDED)
        if count >= limits.key_jobs:
            raise limit_exceeded(f"this key has {count} jobs that have not ended", "key_jobs", limits.key_jobs, "job")

    def _most_running(self, owner: str) -> int:
        given = self._keys.quota(owner).running_jobs
        return self._config.limits.key_running_jobs if given is None else given

    async def _asked(self, caller: Caller, job_id: str, state: str) -> jobs.Job:
        job = self.get(caller, job_id)
        if job.state == state == PAUSED:
            return job
        if state not in NEXT[job.state] or (state == QUEUED and job.state != PAUSED):
            raise _unfit(f"the job {job_id} is {job.state} and cannot be {SAID[state]}")
        return await self._move(job_id, state, f"The job was {SAID[state]}.")

    async def _move(
        self, job_id: str, state: str, words: str, error: jobs.JobError | None = None, level: str = "info"
    ) -> jobs.Job:
        async with self._changing:
            job = jobs.Job()
            job.CopyFrom(self._known[job_id].job)
            if state not in NEXT[job.state]:
                raise _unfit(f"the job {job_id} is {job.state} and cannot become {state}")
            if state in ENDED:
                _end(job, state, error)
            job.state = state
            event = _last_words(job) if state == FAILED else _said(words, level)
            await self._records.update(job, [event])
            self._replace(job)
        self._on_change()
        return job

    async def _change(self, job_id: str, **fields: bool) -> None:
        """Set fields of a job, unless it was deleted meanwhile."""
        async with self._changing:
            known = self.find(job_id)
            if known is None:
                return
            job = jobs.Job()
            job.CopyFrom(known)
            for name, value in fields.items():
                setattr(job, name, value)
            await self._records.update(job)
            self._replace(job)

    def _add(self, stored: StoredJob) -> None:
        self._known[stored.job.job_id] = stored
        if stored.idempotency_key:
            self._by_key[stored.job.owner, stored.idempotency_key] = stored.job.job_id

    def _replace(self, job: jobs.Job) -> None:
        old = self._known[job.job_id]
        self._known[job.job_id] = StoredJob(job, old.idempotency_key, old.request)


def settings_of(spec: jobs.JobSpec) -> dict[str, Any]:
    """The settings of a job.

    Raises:
        ServiceError: INVALID_ARGUMENT if they are no JSON object.
    """
    try:
        settings = json.loads(spec.settings or "{}")
    except (ValueError, RecursionError) as error:
        raise _invalid(f"settings are not JSON: {error}", "settings") from None
    if not isinstance(settings, dict):
        raise _invalid("settings are a JSON object", "settings")
    return settings


def _files_of(spec: jobs.JobSpec) -> list[Any]:
    settings = settings_of(spec)
    return [settings[name] for name in FILE_SETTINGS if settings.get(name)]


def _end(job: jobs.Job, state: str, error: jobs.JobError | None) -> None:
    job.state, job.finished_at = state, time.time()
    if error is not None and state == FAILED:
        job.error.CopyFrom(error)


def _last_words(job: jobs.Job) -> jobs.JobEvent:
    if job.state == SUCCEEDED:
        return _said("The job has successfully completed")
    return _said(f"The job failed: {job.error.message}", "error")


def _said(message: str, level: str = "info") -> jobs.JobEvent:
    return jobs.JobEvent(created_at=time.time(), level=level, message=message, type="message")


def _read_log(path: Path, offset: int) -> tuple[bytes, int]:
    if not path.exists():
        return b"", 0
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(MAX_LOG_BYTES), path.stat().st_size


def _invalid(message: str, field: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field=field)


def _unfit(message: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="job_id")


def _denied(message: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message, field="recipe")
