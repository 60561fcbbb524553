"""Names of fine-tuned models: ``ft:BASE:ORGANISATION:SUFFIX:ID``, and ``…:ckpt-step-N`` for a checkpoint of one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.jobs.jobs import MAX_PAGE
from gradwire_server.core.jobs.specs import settings_of
from gradwire_server.core.jobs.states import SUCCEEDED
from gradwire_server.errors import ServiceError

JOB = "ftjob-"
_NAME = re.compile(r"ft:.+:(?P<id>[a-z2-7]{24})(?::ckpt-step-(?P<step>\d{1,12}))?")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def note_of(job: jobs.Job) -> dict[str, Any]:
    """The note that this door keeps with a job."""
    note: dict[str, Any] = json.loads(job.spec.note)
    return note


def organisation(job: jobs.Job) -> str:
    """The key of a job's owner, as part of a name."""
    return _NOT_IN_A_NAME.sub("-", job.owner) or "gradwire"


def tuned_name(job: jobs.Job) -> str:
    """The name of the model that a job makes."""
    suffix = _NOT_IN_A_NAME.sub("-", note_of(job)["suffix"] or "")
    return f"ft:{settings_of(job.spec)['model']}:{organisation(job)}:{suffix}:{job.job_id.removeprefix(JOB)}"


def checkpoint_name(job: jobs.Job, checkpoint: jobs.JobCheckpoint) -> str:
    """The name of the model that a checkpoint is."""
    return f"{tuned_name(job)}:ckpt-step-{checkpoint.step}"


def checkpoints_of(job: jobs.Job) -> list[jobs.JobCheckpoint]:
    """A job's checkpoints, one a step, oldest first: reinforcement keeps its best one a second time."""
    return list({checkpoint.step: checkpoint for checkpoint in job.checkpoints}.values())


def models_of(job: jobs.Job) -> Iterator[tuple[str, jobs.JobCheckpoint]]:
    """The models that a job has made so far: the finished one first, then its checkpoints."""
    if job.model_deleted:
        return
    if job.state == SUCCEEDED and job.checkpoints:
        yield tuned_name(job), job.checkpoints[-1]
    for checkpoint in checkpoints_of(job):
        yield checkpoint_name(job, checkpoint), checkpoint


def find_tuned(core: Core, caller: Caller, name: str) -> tuple[jobs.Job, jobs.JobCheckpoint] | None:
    """The job and the checkpoint of a fine-tuned model; None if the caller may read no model of this name."""
    found = _NAME.fullmatch(name)
    job = core.jobs.states.find(JOB + found["id"]) if found is not None else None
    models = dict(models_of(job)) if job is not None and job.spec.note else {}
    if job is None or name not in models:
        return None
    try:
        core.runs.get(caller, job.run_id)  # its owner's, or shared with the caller
    except ServiceError:
        return None
    return job, models[name]


def tuned_jobs(core: Core, caller: Caller) -> Iterator[jobs.Job]:
    """The caller's jobs that this door made, newest first."""
    after, more = "", True
    while more:
        page, more = core.jobs.page(caller, MAX_PAGE, after, noted=True)
        yield from page
        after = page[-1].job_id if page else ""
