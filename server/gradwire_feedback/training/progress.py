"""Progress reports and cancellation of a running job."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from gradwire.rlhf import TrainingProgress

from gradwire_feedback.database.connection import Database
from gradwire_feedback.store import jobs as store

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
