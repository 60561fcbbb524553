"""Durable training jobs: a row a job, and a thread that works on the oldest row that has not ended.

A job is a snapshot of the feedback, a training and a new version. Each part may be done again: the snapshot is a file
that is kept, the trainer finds its run on the training server again, and a job creates one version because
``policies.job_id`` is unique. So a killed service goes on with the row that it finds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any

import gradwire
import sqlalchemy as sa
from gradwire.rlhf import TrainingProgress, TrainingResult
from gradwire.whole_files import whole_file

from gradwire_feedback.database.connection import Database
from gradwire_feedback.database.tables import Job, Policy
from gradwire_feedback.names import version_folder
from gradwire_feedback.settings import Settings
from gradwire_feedback.store import jobs as store
from gradwire_feedback.store.order import next_number
from gradwire_feedback.training.examples import write_examples
from gradwire_feedback.training.plan import Plan, rows_of, train
from gradwire_feedback.training.preferences import PreferenceResult
from gradwire_feedback.training.server import TrainingServer

log = logging.getLogger(__name__)


PROGRESS_EVERY_S = 0.2
SHOWN_METRICS = {
    "mse": "meanSquaredError", "correlation": "correlation", "rewards/score": "reward", "train/kl": "kl",
    "train/loss": "loss", "train/value_error": "valueError", "preference_accuracy": "accuracy",
    "reward_margin": "rewardMargin",
}  # fmt: skip
"""Trainer metrics shown in the progress, and their names there."""


class JobCancelledError(Exception):
    """The job was cancelled."""


class ServiceStopping(BaseException):
    """The service stops during a job. Not an Exception: the job has not failed, and goes on at the next start."""


class ProgressReporter:
    """Writes progress to the job's row periodically, and stops the training when the job is cancelled."""

    def __init__(self, database: Database, job_id: str, stopping: threading.Event) -> None:
        self._database, self._job_id, self._stopping = database, job_id, stopping
        self._written = float("-inf")
        self._stage = ""

    def __call__(self, progress: TrainingProgress) -> None:
        if self._stopping.is_set():
            raise ServiceStopping
        if time.monotonic() - self._written < PROGRESS_EVERY_S and progress.stage == self._stage:
            return
        self._written, self._stage = time.monotonic(), progress.stage
        with self._database.write() as session:
            job = store.job_of(session, self._job_id)
            job.progress = progress_json(progress)
            cancelled = job.cancel_requested
        if cancelled:
            raise JobCancelledError


def progress_json(progress: TrainingProgress) -> dict[str, Any]:
    """Convert progress to JSON with the main metrics; NaN becomes null."""
    metrics = {
        shown: value if math.isfinite(value) else None
        for name, shown in SHOWN_METRICS.items()
        if (value := progress.metrics.get(name)) is not None
    }
    return {"stage": progress.stage, "step": progress.step, "total": progress.total, "metrics": metrics}


WAIT_POLL_S = 0.3
STOP_PATIENCE_S = 10.0
ATTEMPTS = 5
MOST_STARTS = 50
"""A job that was begun that often, as each time it ended the process, has failed."""
RETRY_AFTER_S = 2.0


class JobRunner:
    """Runs jobs, one at a time; the service has one instance."""

    def __init__(self, settings: Settings, database: Database, server: TrainingServer) -> None:
        self._settings, self._database, self._server = settings, database, server
        self._stopping, self._asked = threading.Event(), threading.Event()
        self._worker = threading.Thread(target=self._work, name="gradwire-feedback-jobs", daemon=True)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        """Start to work; unfinished jobs of the last process continue."""
        self._worker.start()

    def interrupt(self) -> None:
        """Make the running job stop at its next step; it continues at the next start of the service."""
        self._stopping.set()
        self._asked.set()

    def stop(self) -> bool:
        """Interrupt the running job; return False if it does not stop in time."""
        self.interrupt()
        if self._worker.ident is not None:
            self._worker.join(STOP_PATIENCE_S)
        return not self._worker.is_alive()

    def submit(self, agent_id: str, plan: Plan) -> Job:
        """Queue a training.

        Raises:
            ConflictError: The agent already has an active job.
        """
        with self._database.write() as session:
            job = store.create_job(session, agent_id, asdict(plan))
        self._asked.set()
        return job

    def cancel(self, job_id: str) -> Job:
        """Request the end of a job; a job that has ended is not changed.

        Raises:
            NotFoundError: There is no such job.
        """
        with self._database.write() as session:
            job = store.job_of(session, job_id)
            if job.status == "queued":
                store.finish(session, job_id, "cancelled")
            elif job.status == "running":
                job.cancel_requested = True
            return job

    def get(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            NotFoundError: There is no such job.
        """
        with self._database.read() as session:
            return store.job_of(session, job_id)

    async def wait(self, job_id: str) -> Job:
        """Return the job once it has ended, or its current state when the service stops."""
        while True:
            job = await asyncio.to_thread(self.get, job_id)
            if job.status not in store.ACTIVE or self.stopping:
                return job
            await asyncio.sleep(WAIT_POLL_S)

    def _work(self) -> None:
        """The thread: one job after another, the oldest first."""
        while True:
            self._asked.clear()
            if self.stopping:
                return
            try:
                with self._database.write() as session:
                    job = store.oldest_active(session)
                    job_id = None if job is None else job.id
                    if job is not None:
                        job.starts += 1
                if job_id is None:
                    self._asked.wait()
                else:
                    self._run(job_id)
            except ServiceStopping:
                return
            except Exception:  # the database is away: the row says what is left to do
                log.exception("the jobs cannot go on now; they are tried again")
                self._stopping.wait(RETRY_AFTER_S)

    def _run(self, job_id: str) -> None:
        try:
            if self.get(job_id).starts > MOST_STARTS:
                raise RuntimeError(f"it was begun {MOST_STARTS} times, and the service ended each time")
            self._snapshot(job_id)
            self._train(job_id)
            self._publish(job_id)
        except JobCancelledError:
            self._end(job_id, "cancelled", None)
        except Exception as error:
            # an error of the training server is a sentence for the operator; any other needs its traceback
            log.error("job %s failed: %s", job_id, error, exc_info=not isinstance(error, gradwire.GradwireError))
            self._end(job_id, "failed", f"{type(error).__name__}: {error}")

    def _snapshot_file(self, job: Job) -> Path:
        return self._settings.models_dir / job.agent_id / ".jobs" / f"{job.id}.jsonl"

    def _snapshot(self, job_id: str) -> None:
        """Fix the job's feedback, and with it the version's name."""
        with self._database.write() as session:
            job = store.job_of(session, job_id)
            if job.status not in store.ACTIVE:  # cancelled a moment ago
                raise JobCancelledError
            file = self._snapshot_file(job)
            if not file.exists():
                job.request = job.request | {"trained_until": next_number(session, job.agent_id)}
                rows = rows_of(session, job.agent_id, Plan(**job.request))
                with whole_file(file) as whole:
                    whole.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            store.begin(session, job_id, len(_read(file)))

    def _train(self, job_id: str) -> None:
        job = self.get(job_id)
        assert job.version is not None
        folder = version_folder(self._settings.models_dir, job.agent_id, job.version)
        feedbacks = _read(self._snapshot_file(job))
        report = ProgressReporter(self._database, job_id, self._stopping)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                plan = Plan(**job.request)
                asyncio.run(train(plan, feedbacks, folder, self._server, report))
                asyncio.run(write_examples(plan, feedbacks, folder, self._server))
                return
            except (gradwire.ConnectionLostError, gradwire.EngineUnavailableError) as error:
                if self.stopping:
                    raise ServiceStopping from error
                if attempt == ATTEMPTS:
                    raise
                log.warning("job %s lost the training server (%s); it will continue", job_id, error)
                self._stopping.wait(RETRY_AFTER_S)

    def _publish(self, job_id: str) -> None:
        """Create the version; idempotent."""
        job = self.get(job_id)
        assert job.version is not None
        folder = version_folder(self._settings.models_dir, job.agent_id, job.version)
        plan = Plan(**job.request)
        figures = _figures(plan, folder)
        with self._database.write() as session:
            if session.scalar(sa.select(Policy).where(Policy.job_id == job_id)) is None:
                session.add(
                    Policy(
                        agent_id=job.agent_id,
                        version=job.version,
                        number=next_number(session, job.agent_id),
                        parent=plan.start_from,
                        method=plan.method,
                        job_id=job_id,
                        model_path=str(folder / "policy"),
                        trained_until=plan.trained_until,
                        config=plan.config,
                        **figures,
                    )
                )
            store.finish(session, job_id, "succeeded")
        snapshot = self._snapshot_file(job)
        if snapshot.exists():
            snapshot.rename(folder / "feedback.jsonl")

    def _end(self, job_id: str, status: str, error: str | None) -> None:
        """End a job without a version, and remove its files."""
        job = self.get(job_id)
        if job.version is not None:
            folder = version_folder(self._settings.models_dir, job.agent_id, job.version)
            try:
                asyncio.run(self._server.discard(folder))
            except gradwire.GradwireError as trouble:
                log.warning("the runs of job %s remain on the training server: %s", job_id, trouble)
            rmtree(folder, ignore_errors=True)
        self._snapshot_file(job).unlink(missing_ok=True)
        with self._database.write() as session:
            store.finish(session, job_id, status, error)


def _figures(plan: Plan, folder: Path) -> dict[str, Any]:
    """The columns of a version that its training decides."""
    if plan.method == "dpo":
        trained = PreferenceResult.load(folder)
        return {
            "checkpoint": trained.checkpoint,
            "feedback_count": trained.pairs,
            "training_steps": len(trained.curves["loss"]),
        }
    result = TrainingResult.load(folder)
    return {
        "reward_model_path": plan.reward_model_path or str(folder / "reward_model"),
        "checkpoint": result.policy_checkpoint,
        "feedback_count": result.feedback_count,
        "training_steps": result.training_steps,
        "reward_mean": result.final_reward_mean,
        "reward_std": result.final_reward_std,
    }


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
