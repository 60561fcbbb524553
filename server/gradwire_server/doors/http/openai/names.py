"""Names of models: a base model, ``RUN_ID`` for the weights that a run has now, ``RUN_ID/CHECKPOINT``, or what a
fine-tuning job made (:mod:`.tuned_models`). Any name may have ``openai/`` before it, as LiteLLM and DSPy write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.jobs.specs import settings_of
from gradwire_server.doors.http.openai.tuned_models import find_tuned, models_of, tuned_jobs
from gradwire_server.errors import ServiceError

PREFIX = "openai/"


@dataclass(frozen=True)
class Model:
    """A model that may be sampled.

    Attributes:
        base: Its base model.
        source: The weights, as the sampler is asked for them: the base model, a run, or a run's checkpoint.
    """

    base: str
    source: str


def find_model(core: Core, caller: Caller, name: str) -> Model:
    """The model of a name that the caller may read.

    Raises:
        ServiceError: UNKNOWN_MODEL, also for a run or checkpoint that the caller may not read.
    """
    if (source := core.rollouts.source(caller)) is not None:
        return Model(source.base_model, source.model)
    if (tuned := find_tuned(core, caller, name)) is not None:
        job, checkpoint = tuned
        return Model(settings_of(job.spec)["model"], checkpoint.path)
    try:
        source = core.source(caller, name)
        return Model(source.base_model, source.model)
    except ServiceError:
        if name.startswith(PREFIX):
            return find_model(core, caller, name.removeprefix(PREFIX))
        known = ", ".join(sorted(core.config.all_models))
        message = (
            f"there is no model {name[:200]!r} here; there are {known}, RUN_ID for what a run has learned by now,"
            " RUN_ID/CHECKPOINT, and what fine-tuning jobs have made"
        )
        raise ServiceError(pb.ERROR_CODE_UNKNOWN_MODEL, message, field="model") from None


def described(name: str, created: float = 0, owner: str = "gradwire") -> dict[str, Any]:
    """A model in OpenAI's form."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner or "gradwire"}


async def listed(core: Core, caller: Caller) -> list[dict[str, Any]]:
    """The base models, loaded or allowed; then what the caller's fine-tuning jobs made; then its runs, each with its
    newest checkpoint. No name is listed twice. In a rollout session there is its model alone."""
    if (source := core.rollouts.source(caller)) is not None:
        return [described(source.model)]
    models = {name: described(name) for name in core.config.all_models}

    def add(name: str, created: float, owner: str) -> None:
        models.setdefault(name, described(name, created, owner))

    for job in tuned_jobs(core, caller):
        for name, checkpoint in models_of(job):
            add(name, checkpoint.created_at, job.owner)
    token = ""
    while True:
        runs, token = await core.runs.page(caller, 0, token)
        for run in runs:
            shared = core.jobs.of_run(run.run_id) if run.owner != caller.name and not caller.sees_all else None
            if shared is not None and shared.spec.note:
                for name, checkpoint in models_of(shared):
                    add(name, checkpoint.created_at, shared.owner)
            add(run.run_id, run.created_at, run.owner)
            if run.latest_checkpoint:
                add(run.latest_checkpoint, run.created_at, run.owner)
        if not token:
            return list(models.values())
