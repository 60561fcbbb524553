"""``/v1/fine_tuning``: jobs, and trials of graders."""

from __future__ import annotations

import copy
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.jobs import grading
from gradwire_server.core.jobs.files import DATA, page_of
from gradwire_server.core.jobs.states import ENDED, FAILED, RUNNING, SUCCEEDED
from gradwire_server.doors.http.openai.conversations import Conversation
from gradwire_server.doors.http.openai.files import listing, problems
from gradwire_server.doors.http.openai.fine_tuning import permissions
from gradwire_server.doors.http.openai.fine_tuning.hyperparameters import RECIPES, resolve
from gradwire_server.doors.http.openai.fine_tuning.requests import CreateJob, RunGrader, ValidateGrader
from gradwire_server.doors.http.openai.names import PREFIX, find_model
from gradwire_server.doors.http.openai.requests import (
    ChatRequest,
    JsonSchemaFormat,
    ResponseFormat,
    check_encodable,
    named,
    unsupported,
)
from gradwire_server.doors.http.openai.tuned_models import (
    JOB,
    checkpoint_name,
    checkpoints_of,
    note_of,
    organisation,
    tuned_name,
)
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.errors import ServiceError, invalid, unknown_job

JUDGED = ("score_model", "label_model")


def with_sources(core: Core, caller: Caller, grader: dict[str, Any], param: str) -> dict[str, Any]:
    """A valid grader whose models have the names that our SDK samples from.

    Raises:
        ServiceError: UNKNOWN_MODEL for one that the caller may not read.
    """
    expanded = copy.deepcopy(grader)
    for part in _judged(expanded):
        try:
            part["model"] = find_model(core, caller, part["model"]).source
        except ServiceError as error:
            error.error.field = param
            raise
    return expanded


def _judged(spec: Any) -> Iterator[dict[str, Any]]:
    """The parts of a grader that name a model."""
    if isinstance(spec, dict):
        if spec.get("type") in JUDGED:
            yield spec
        for each in spec.values():
            yield from _judged(each)


class Asked:
    """Puts the questions of a grader's trial to the server's models.

    Attributes:
        tokens: Name of a model -> tokens that it read and wrote.
    """

    def __init__(self, core: Core, caller: Caller, http: Request) -> None:
        self._core, self._caller, self._http = core, caller, http
        self.tokens: Counter[str] = Counter()

    async def __call__(self, question: dict[str, Any]) -> str:
        """The text of an answer.

        Raises:
            ServiceError: It could not be sampled.
        """
        form = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=question["json_schema"]))
        asked = ChatRequest(
            model=question["model"], messages=question["messages"], temperature=question["temperature"],
            top_p=question["top_p"], seed=question["seed"], max_tokens=question["max_tokens"], response_format=form,
        )  # fmt: skip
        conversation = Conversation(self._core, self._caller, asked)
        (part,), counts = await conversation.answers(await conversation.request(), self._http)
        self.tokens[question["model"]] += counts.prompt + counts.sampled
        return part.content


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
"""Fields of a trial of a grader with the details of its errors."""


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


LEAST_ROWS = 10
OURS = ("model", "init_from", "data", "validation", "seed", "loggers", "wandb")
"""Settings that the request has by OpenAI's names."""
PARAMETERS = {"data": "training_file", "validation": "validation_file", "job": "model", "loggers": "integrations",
              "settings": "gradwire"}  # fmt: skip
_METADATA = re.compile(r"metadata\[(.{1,64})\]")
_EVENT = re.compile(r"ftevent-[a-z2-7]{24}-(\d{1,18})")
Limit = Annotated[int, Query(ge=1, le=1000)]


def routes(core: Core) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/fine_tuning")

    @router.post("/jobs")
    async def create_job(asked: CreateJob, http: Request, caller: CallerOf) -> dict[str, Any]:
        with named(PARAMETERS):
            return job_body(await _create(core, caller, asked, http))

    @router.get("/jobs")
    async def list_jobs(http: Request, caller: CallerOf, after: str = "", limit: Limit = 20) -> dict[str, Any]:
        metadata = {key[9:-1]: value for key, value in http.query_params.items() if _METADATA.fullmatch(key)}
        found, more = core.jobs.page(caller, limit, after, metadata, noted=True)
        return listing([job_body(job) for job in found], more)

    def known(caller: Caller, job_id: str) -> jobs.Job:
        job = core.jobs.states.get(caller, job_id)
        if not job.spec.note:  # made by another door
            raise unknown_job(job_id)
        return job

    @router.get("/jobs/{job_id}")
    async def get_job(job_id: str, caller: CallerOf) -> dict[str, Any]:
        return job_body(known(caller, job_id))

    @router.post("/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str, caller: CallerOf) -> dict[str, Any]:
        return job_body(await core.jobs.cancel(caller, known(caller, job_id).job_id))

    @router.post("/jobs/{job_id}/pause")
    async def pause_job(job_id: str, caller: CallerOf) -> dict[str, Any]:
        return job_body(await core.jobs.pause(caller, known(caller, job_id).job_id))

    @router.post("/jobs/{job_id}/resume")
    async def resume_job(job_id: str, caller: CallerOf) -> dict[str, Any]:
        return job_body(await core.jobs.resume(caller, known(caller, job_id).job_id))

    @router.get("/jobs/{job_id}/events")
    async def list_events(job_id: str, caller: CallerOf, after: str = "", limit: Limit = 20) -> dict[str, Any]:
        known(caller, job_id)
        number = _EVENT.fullmatch(after)
        if after and (number is None or not after.startswith(f"ftevent-{job_id.removeprefix(JOB)}-")):
            raise invalid(f"after is {after[:100]!r}, which is no event of this job", "after")
        found, more = await core.jobs.events(caller, job_id, int(number[1]) if number else 0, limit)
        return listing([event_body(job_id, event) for event in found], more)

    @router.get("/jobs/{job_id}/checkpoints")
    async def list_checkpoints(job_id: str, caller: CallerOf, after: str = "", limit: Limit = 10) -> dict[str, Any]:
        job = known(caller, job_id)
        found = [checkpoint_body(job, each) for each in reversed(checkpoints_of(job))]
        page, more = page_of(found, [each["id"] for each in found], limit, after, "after")
        return listing(page, more)

    @router.post("/alpha/graders/validate")
    async def validate_grader(asked: ValidateGrader, caller: CallerOf) -> dict[str, Any]:
        await grading.validate(caller.name, asked.grader, "grader")
        with_sources(core, caller, asked.grader, "grader")
        return {"grader": asked.grader}

    @router.post("/alpha/graders/run")
    async def run_grader(asked: RunGrader, http: Request, caller: CallerOf) -> dict[str, Any]:
        await grading.validate(caller.name, asked.grader, "grader")
        grader = with_sources(core, caller, asked.grader, "grader")
        judge = Asked(core, caller, http)
        found = await grading.run(caller.name, grader, asked.model_sample, asked.item or {}, "grader", judge)
        return graded_body(asked.grader, found, judge.tokens)

    router.include_router(permissions.routes(core))
    return router


async def _create(core: Core, caller: Caller, asked: CreateJob, http: Request) -> jobs.Job:
    """Queue the job that a request describes."""
    method = asked.method.type if asked.method is not None else "supervised"
    for other in RECIPES:
        if other != method and getattr(asked.method, other, None) is not None:
            raise invalid(f"the method is {method}, which takes no settings of {other}", f"method.{other}")
    settings = asked.method.settings() if asked.method is not None else None
    hyperparameters, param = asked.hyperparameters, "hyperparameters"
    if settings is not None and settings.hyperparameters is not None:
        if hyperparameters:
            message = f"hyperparameters are in method.{method} as well, and those count: leave these out"
            raise invalid(message, "hyperparameters")
        hyperparameters, param = settings.hyperparameters, f"method.{method}.hyperparameters"
    grader = settings.grader if settings is not None else None
    if method != "reinforcement" and grader is not None:
        raise invalid(f"the method {method} takes no grader", f"method.{method}.grader")
    name = asked.model.removeprefix(PREFIX) if core.known_model(asked.model) is None else asked.model
    model = find_model(core, caller, name)
    if model.source != model.base and "/" not in model.source:
        raise unsupported(
            "a job starts from a base model, from what another job made, or from RUN_ID/CHECKPOINT", "model"
        )
    file = _data(core, caller, asked.training_file, "training_file")
    checked = [file]
    if asked.validation_file:
        checked.append(_data(core, caller, asked.validation_file, "validation_file"))
    resolved = resolve(
        method,
        hyperparameters or {},
        file,
        core.model_info(model.base),
        param,
        evaluates=asked.validation_file is not None,
    )
    if method == "reinforcement":
        if grader is None:
            raise invalid("reinforcement needs a grader", "method.reinforcement.grader")
        await grading.validate(caller.name, grader, "method.reinforcement.grader")
        resolved.settings["grading"] = with_sources(core, caller, grader, "method.reinforcement.grader")
    body = json.dumps(asked.model_dump(), ensure_ascii=False)
    check_encodable(body, "body")
    seed = zlib.crc32(body.encode()) >> 1 if asked.seed is None else asked.seed
    extra = _extensions(asked.gradwire or {})
    recipe = resolved.settings | extra | {"model": model.base, "data": file.file_id, "seed": seed}
    if model.source != model.base:
        recipe["init_from"] = model.source
    if asked.validation_file:
        recipe["validation"] = asked.validation_file
    integrations = [each.model_dump(exclude_none=True) for each in asked.integrations or ()]
    if integrations:
        recipe |= {"loggers": ["wandb"], "wandb": integrations[0]["wandb"]}
    note = {
        "model": asked.model, "method": method, "hyperparameters": resolved.numbers, "seed": seed,
        "suffix": asked.suffix, "training_file": asked.training_file, "validation_file": asked.validation_file,
        "grader": grader, "integrations": integrations,
    }  # fmt: skip
    spec = jobs.JobSpec(
        recipe=RECIPES[method], settings=json.dumps(recipe), name=asked.suffix or "", metadata=asked.metadata,
        note=json.dumps(note),
    )  # fmt: skip
    return await core.jobs.create(
        caller, spec, http.headers.get("idempotency-key", ""), resolved.warnings, _error(checked),
        repeated=http.headers.get("x-stainless-retry-count", "0") != "0",
    )  # fmt: skip


def _extensions(fields: dict[str, Any]) -> dict[str, Any]:
    """Settings of the recipe in a request, besides OpenAI's; ``lora`` and ``full`` are the SDK's words for a rank."""
    for field in OURS:
        if field in fields:
            raise invalid(f"gradwire.{field} is in the request by OpenAI's name: leave it out", "gradwire")
    said = [name for name in ("lora", "full", "lora_rank") if name in fields]
    if len(said) > 1:
        raise invalid(f"gradwire has {' and '.join(said)}, which say the same: leave one", "gradwire")
    extra = {name: value for name, value in fields.items() if name not in ("lora", "full")}
    if "lora" in fields:
        extra["lora_rank"] = fields["lora"]
    if "full" in fields:
        if not isinstance(fields["full"], bool):
            raise invalid("gradwire.full must be true or false", "gradwire")
        extra |= {"lora_rank": 0} if fields["full"] else {}
    return extra


def _data(core: Core, caller: Caller, file_id: str, param: str) -> jobs.File:
    file = core.files.get(caller, file_id, param)
    if file.purpose != DATA:
        raise invalid(f"{file_id} has the purpose {file.purpose!r}; upload it with {DATA!r}", param)
    return file


def _error(files: list[jobs.File]) -> jobs.JobError | None:
    """Why nothing can be trained on these files: the training file, then the validation file."""
    for file, param in zip(files, ("training_file", "validation_file"), strict=False):
        message = problems(file)
        if not message and param == "training_file" and file.num_lines < LEAST_ROWS:
            message = f"the file has {file.num_lines} rows; {LEAST_ROWS} at least"
        if message:
            return jobs.JobError(code=f"invalid_{param}", message=f"{file.filename}: {message}", param=param)
    return None
