"""``/v1/fine_tuning``: jobs, and trials of graders."""

from __future__ import annotations

import json
import re
import zlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.jobs import grading
from gradwire_server.core.jobs.files import DATA, page_of
from gradwire_server.doors.http.openai.files import listing, problems
from gradwire_server.doors.http.openai.fine_tuning import permissions
from gradwire_server.doors.http.openai.fine_tuning.answers import checkpoint_body, event_body, graded_body, job_body
from gradwire_server.doors.http.openai.fine_tuning.hyperparameters import RECIPES, resolve
from gradwire_server.doors.http.openai.fine_tuning.judging import Asked, with_sources
from gradwire_server.doors.http.openai.fine_tuning.requests import CreateJob, RunGrader, ValidateGrader
from gradwire_server.doors.http.openai.names import PREFIX, find_model
from gradwire_server.doors.http.openai.requests import check_encodable, invalid, named, unsupported
from gradwire_server.doors.http.openai.tuned_models import JOB, checkpoints_of
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.errors import unknown_job

LEAST_ROWS = 10
OURS = ("model", "init_from", "data", "validation", "seed", "loggers", "wandb")
"""Settings that the request has by OpenAI's names."""
PARAMETERS = {"data": "training_file", "validation": "validation_file", "job": "model", "loggers": "integrations"}
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
    """Queue the job that a request describes.

    Raises:
        ServiceError: The request is invalid.
    """
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
    if extra:  # of the rest the door has taken care
        await grading.check_settings(caller.name, RECIPES[method], recipe, "gradwire")
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
    """Settings of the recipe that a request has besides OpenAI's; ``lora`` and ``full`` are the SDK's words for a rank.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
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
            return jobs.JobError(code=f"invalid_{param}", message=f"{file.file_id}: {message}", param=param)
    return None
