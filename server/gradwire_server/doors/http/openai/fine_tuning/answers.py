"""Jobs, their events and their checkpoints in OpenAI's form."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.core.jobs.states import ENDED, FAILED, RUNNING, SUCCEEDED
from gradwire_server.doors.http.openai.tuned_models import JOB, checkpoint_name, note_of, organisation, tuned_name

METRICS = {
    "train_loss": "train/loss",
    "train_mean_token_accuracy": "train/token_accuracy",
    "valid_loss": "eval/loss",
    "valid_mean_token_accuracy": "eval/token_accuracy",
    "full_valid_loss": "eval/loss",
    "full_valid_mean_token_accuracy": "eval/token_accuracy",
    "train_reward_mean": "rewards/reward",
    "full_valid_reward_mean": "eval/score",
}
"""OpenAI's metrics -> ours."""
ERRORS = (
    "formula_parse_error", "invalid_variable_error", "model_grader_parse_error", "model_grader_refusal_error",
    "model_grader_server_error", "other_error", "python_grader_runtime_error", "python_grader_server_error",
    "sample_parse_error", "truncated_observation_error", "unresponsive_reward_error",
)  # fmt: skip
ERROR_DETAILS = (
    "model_grader_server_error_details", "python_grader_runtime_error_details", "python_grader_server_error_type",
)  # fmt: skip
"""What a trial of a grader tells: whether each of these happened, and their details."""


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
        "integrations": note["integrations"],
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


def graded_body(grader: Mapping[str, Any], graded: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """A trial of a grader, and the tokens that models read and wrote for it.

    The reward of a sample that could not be graded is 0, and the error says why.
    """
    errors: dict[str, Any] = dict.fromkeys(ERRORS, False) | dict.fromkeys(ERROR_DETAILS)
    if graded["error"]:
        errors[graded["error"]] = True
        if graded["error"] == "python_grader_runtime_error":
            errors["python_grader_runtime_error_details"] = graded["details"]
        if graded["error"] == "model_grader_server_error":
            errors["model_grader_server_error_details"] = graded["details"]
    return {
        "reward": graded["reward"],
        "sub_rewards": graded["scores"],
        "model_grader_token_usage_per_model": dict(tokens),
        "metadata": {
            "name": graded["name"],
            "type": grader["type"],
            "scores": graded["scores"],
            "execution_time": graded["seconds"],
            "token_usage": sum(tokens.values()) if tokens else None,
            "sampled_model_name": next(iter(tokens), None) if grader["type"] != "multi" else None,
            "errors": errors,
        },
        "gradwire": {"error": graded["details"] or None},
    }


def _metrics(ours: Mapping[str, float]) -> dict[str, float]:
    return {name: ours[mine] for name, mine in METRICS.items() if mine in ours}


def _estimated(job: jobs.Job) -> int | None:
    if job.state != RUNNING or not job.step or not job.total_steps:
        return None
    each = (time.time() - job.started_at) / job.step
    return int(time.time() + each * (job.total_steps - job.step))
