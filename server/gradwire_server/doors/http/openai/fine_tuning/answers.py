"""Jobs, their events and their checkpoints in OpenAI's form."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.core.jobs.jobs import ENDED, FAILED, RUNNING, SUCCEEDED
from gradwire_server.doors.http.openai.tuned_models import JOB, checkpoint_name, note_of, organisation, tuned_name

METRICS = {
    "train_loss": "train/loss",
    "train_mean_token_accuracy": "train/token_accuracy",
    "valid_loss": "eval/loss",
    "valid_mean_token_accuracy": "eval/token_accuracy",
    "full_valid_loss": "eval/loss",
    "full_valid_mean_token_accuracy": "eval/token_accuracy",
    "train_reward_mean": "rewards/mean",
    "full_valid_reward_mean": "eval/reward",
}
"""OpenAI's metrics -> ours."""


def job_body(job: jobs.Job) -> dict[str, Any]:
    """A job."""
    note = note_of(job)
    ended = job.state in ENDED
    error = None
    if job.state == FAILED:
        error = {"code": job.error.code, "message": job.error.message, "param": job.error.param or None}
    numbers = note["hyperparameters"]
    return {
        "id": job.job_id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_at),
        "started_at": int(job.started_at) or None,
        "finished_at": int(job.finished_at) or None,
        "estimated_finish": _estimated(job),
        "model": note["model"],
        "fine_tuned_model": tuned_name(job) if job.state == SUCCEEDED else None,
        "organization_id": organisation(job),
        "status": job.state,
        "training_file": note["training_file"],
        "validation_file": note["validation_file"],
        "result_files": list(job.result_files),
        "seed": note["seed"],
        "trained_tokens": job.trained_tokens if ended else None,
        "error": error,
        "hyperparameters": {name: numbers[name] for name in ("n_epochs", "batch_size", "learning_rate_multiplier")},
        "method": {
            "type": note["method"],
            note["method"]: {"hyperparameters": numbers} | ({"grader": note["grader"]} if note["grader"] else {}),
        },
        "integrations": [],
        "metadata": dict(job.spec.metadata),
        "user_provided_suffix": note["suffix"],
        "gradwire": {"run_id": job.run_id or None, "checkpoints": [each.path for each in job.checkpoints]},
    }


def event_body(job_id: str, event: jobs.JobEvent) -> dict[str, Any]:
    """An event; the metrics of a step are in its data under OpenAI's names and ours."""
    data = json.loads(event.data or "{}")
    return {
        "id": f"ftevent-{job_id.removeprefix(JOB)}-{event.number}",
        "object": "fine_tuning.job.event",
        "created_at": int(event.created_at),
        "level": event.level,
        "message": event.message,
        "type": event.type,
        "data": {"step": event.step, **_metrics(data), **data} if event.type == "metrics" else data,
    }


def checkpoint_body(job: jobs.Job, checkpoint: jobs.JobCheckpoint) -> dict[str, Any]:
    """A checkpoint."""
    return {
        "id": f"ftckpt_{job.job_id.removeprefix(JOB)}_{checkpoint.step}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(checkpoint.created_at),
        "step_number": checkpoint.step,
        "fine_tuning_job_id": job.job_id,
        "fine_tuned_model_checkpoint": checkpoint_name(job, checkpoint),
        "metrics": {"step": checkpoint.step, **_metrics(json.loads(checkpoint.metrics or "{}"))},
        "gradwire": {"checkpoint": checkpoint.path},
    }


def _metrics(ours: Mapping[str, float]) -> dict[str, float]:
    return {name: ours[mine] for name, mine in METRICS.items() if mine in ours}


def _estimated(job: jobs.Job) -> int | None:
    if job.state != RUNNING or not job.step or not job.total_steps:
        return None
    each = (time.time() - job.started_at) / job.step
    return int(time.time() + each * (job.total_steps - job.step))
