"""Training: a dry run, a synchronous training, and jobs."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import AsyncIterable
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from gradwire.rlhf import RewardModelConfig, TrainingConfig
from pydantic import Field, create_model
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.api.access import Reader, TheContext, Trainer
from gradwire_feedback.api.bodies import CountedRoute
from gradwire_feedback.api.errors import PROBLEMS
from gradwire_feedback.api.schemas import (
    AgentId,
    Body,
    DryRunOut,
    JobId,
    JobOut,
    Name,
    Problem,
    ProgressOut,
    TrainedOut,
)
from gradwire_feedback.context import Context
from gradwire_feedback.database.tables import Job, Policy
from gradwire_feedback.store import jobs as store
from gradwire_feedback.store.problems import ConflictError
from gradwire_feedback.training.estimate import estimate
from gradwire_feedback.training.plan import make_plan

router = APIRouter(prefix="/api/policies", tags=["training"], responses=PROBLEMS, route_class=CountedRoute)

LARGEST_NUMBER = 1_000_000
EVENT_POLL_S = 0.3
REWARD_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", "batch_size", "num_epochs", "learning_rate")


def _number(kind: Any, default: Any) -> Any:
    return (kind, Field(default=default, le=LARGEST_NUMBER))


_reward_hints = typing.get_type_hints(RewardModelConfig)
RewardModelIn: type[Body] = create_model(
    "RewardModelIn",
    __base__=Body,
    __doc__="Settings of the reward model; see RewardModelConfig.",
    **{name: _number(_reward_hints[name] | None, None) for name in REWARD_SETTINGS},
)


class TrainingOptions(Body):
    """Starting point of a training."""

    dry_run: bool = Field(default=False, description="Estimate only.")
    method: Literal["ppo", "dpo"] = Field(
        default="ppo", description="`ppo` against a reward model of the scores, or `dpo` on the preferences."
    )
    beta: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = Field(
        default=None, description="With `dpo`: weight of the KL to the starting version; 0.1 if absent."
    )
    start_from: Name | None = Field(
        default=None, description="Version to continue from, or `base`; the newest if absent."
    )
    reward_model: Name = Field(
        default="retrain",
        description="`retrain` on all feedback, `reuse` the starting version's, or name a version.",
    )
    reward_model_config: RewardModelIn | None = Field(  # type: ignore[valid-type]  # made from RewardModelConfig above
        default=None, description="Settings of a retrained reward model; absent ones are the policy's."
    )


def _setting(name: str, kind: Any, default: Any) -> Any:
    """Build a field from TrainingConfig; the library itself checks its range."""
    if name == "base_model":
        return (Name | None, Field(default=None, description="The service's --base-model if absent."))
    return (kind, Field(default=default, le=LARGEST_NUMBER if kind in (int, float) else None))


_hints = typing.get_type_hints(TrainingConfig)
_settings: dict[str, Any] = {
    each.name: _setting(each.name, _hints[each.name], each.default)
    for each in fields(TrainingConfig)
    if each.default is not MISSING
}
TrainIn: type[TrainingOptions] = create_model(
    "TrainIn", __base__=TrainingOptions, __doc__="Settings of a training; see TrainingConfig.", **_settings
)


@router.post(
    "/train_policy/{agent_id}",
    response_model=DryRunOut | TrainedOut,
    responses={
        202: {"model": JobOut, "description": "The job, as asked for with `Prefer: respond-async`."},
        500: {"model": Problem, "description": "The training failed; the job has the reason."},
    },
)
async def train_policy(
    agent_id: AgentId,
    request: TrainIn,  # type: ignore[valid-type]  # made from TrainingConfig above
    context: TheContext,
    caller: Trainer,
    prefer: Annotated[str | None, Header(max_length=200)] = None,
) -> Response:
    """Trains a reward model and then the policy on the agent's feedback, or estimates the cost of the training.

    The answer comes when the training has ended; with `Prefer: respond-async` at once, with a job. A client that
    disconnects does not stop the training.
    """
    options: TrainingOptions = request
    changed = options.model_dump(include=set(_settings) & options.model_fields_set)
    rewards = options.reward_model_config
    plan = await run_in_threadpool(
        make_plan,
        context.database,
        context.settings,
        agent_id,
        changed,
        options.start_from,
        options.reward_model,
        {} if rewards is None else rewards.model_dump(exclude_unset=True),
        options.method,
        options.beta,
    )
    model = await context.server.model_info(plan.config["base_model"])
    TrainingConfig(**plan.config).check_context(model.name, model.context_length)
    if options.dry_run:
        found = await estimate(context.database, context.server, context.settings, agent_id, plan)
        return JSONResponse(DryRunOut(**found).model_dump(mode="json", by_alias=True))
    job = await run_in_threadpool(context.jobs.submit, agent_id, plan)
    if prefer is not None and "respond-async" in [each.strip().lower() for each in prefer.split(",")]:
        headers = {"Location": f"/api/policies/jobs/{job.id}", "Preference-Applied": "respond-async"}
        return JSONResponse(job_out(context, job).model_dump(mode="json", by_alias=True), 202, headers)
    ended = job_out(context, await context.jobs.wait(job.id))
    if ended.status == "cancelled":
        raise ConflictError(f"job {job.id} was cancelled")
    if ended.result is None:
        state = f"failed: {ended.error}" if ended.status == "failed" else "continues when the service is back"
        detail = Problem(detail=f"the training {state} (job {job.id})")
        return JSONResponse(detail.model_dump(mode="json", by_alias=True), 500 if ended.status == "failed" else 503)
    return JSONResponse(ended.result.model_dump(mode="json", by_alias=True))


def job_out(context: Context, job: Job) -> JobOut:
    """Convert a job for the answer, with its version's metrics once there is one."""
    result = None
    if job.status == "succeeded":
        with context.database.read() as session:
            result = trained_out(store.policy_of_job(session, job.id))
    return JobOut(
        id=job.id,
        agent_id=job.agent_id,
        status=job.status,  # type: ignore[arg-type]  # only store.jobs writes it
        version=job.version,
        progress=ProgressOut(**job.progress) if job.progress else None,
        error=job.error,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        result=result,
    )


def trained_out(policy: Policy) -> TrainedOut:
    return TrainedOut(
        policy_id=policy.id,
        version=policy.version,
        model_path=policy.model_path,
        reward_model_path=policy.reward_model_path,
        feedback_count=policy.feedback_count,
        training_steps=policy.training_steps,
        reward_mean=policy.reward_mean,
        reward_std=policy.reward_std,
    )


def _known_job(job_id: JobId, context: TheContext) -> JobOut:
    return job_out(context, context.jobs.get(job_id))


KnownJob = Annotated[JobOut, Depends(_known_job)]


@router.get("/jobs/{id}")
def get_job(caller: Reader, job: KnownJob) -> JobOut:
    """Returns the progress of a job."""
    return job


@router.delete("/jobs/{id}")
def cancel_job(job_id: JobId, context: TheContext, caller: Trainer) -> JobOut:
    """Cancels a job; a job that has ended is not changed."""
    return job_out(context, context.jobs.cancel(job_id))


@router.get("/jobs/{id}/events", response_class=EventSourceResponse)
async def stream_job(caller: Reader, job: KnownJob, context: TheContext) -> AsyncIterable[ServerSentEvent]:
    """Streams a job as server-sent events: `progress` at every change, `end` at the end."""
    shown: JobOut | None = None
    while True:
        if job != shown:
            ended = job.status not in store.ACTIVE
            yield ServerSentEvent(event="end" if ended else "progress", data=job.model_dump(mode="json", by_alias=True))
            if ended:
                return
            shown = job
        if context.jobs.stopping:
            return
        await asyncio.sleep(EVENT_POLL_S)
        job = await run_in_threadpool(_known_job, job.id, context)
