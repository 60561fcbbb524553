"""``/v1/fine_tuning/checkpoints/{checkpoint}/permissions``: who else may read what a job made.

A run is shared as a whole, so a permission of one of its checkpoints is one of them all.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from fastapi import APIRouter
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.jobs.files import page_of
from gradwire_server.doors.http.openai.files import listing
from gradwire_server.doors.http.openai.fine_tuning.requests import CreatePermissions
from gradwire_server.doors.http.openai.names import PREFIX
from gradwire_server.doors.http.openai.requests import named
from gradwire_server.doors.http.openai.tuned_models import find_tuned
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.errors import ServiceError, invalid

ID = "cp_"


def routes(core: Core) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/checkpoints")

    def job_of(caller: Caller, name: str) -> jobs.Job:
        tuned = find_tuned(core, caller, name.removeprefix(PREFIX))
        if tuned is None:
            message = f"there is no fine-tuned model {name[:200]!r} here"
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_MODEL, message, field="fine_tuned_model_checkpoint")
        return tuned[0]

    @router.post("/{name:path}/permissions")
    async def create(name: str, asked: CreatePermissions, caller: CallerOf) -> dict[str, Any]:
        job = job_of(caller, name)
        with named({"reader": "project_ids"}):
            for reader in asked.project_ids:
                await core.runs.share(caller, job.run_id, reader)
        return listing([_permission(job, reader) for reader in asked.project_ids], more=False)

    @router.get("/{name:path}/permissions")
    async def list_all(
        name: str, caller: CallerOf, after: str = "", limit: int = 10, project_id: str = "", order: str = "descending"
    ) -> dict[str, Any]:
        job = job_of(caller, name)
        readers = [each for each in core.runs.get(caller, job.run_id).readers if project_id in ("", each)]
        found = [_permission(job, each) for each in sorted(readers, reverse=order == "descending")]
        page, more = page_of(found, [each["id"] for each in found], max(1, min(limit, 1000)), after, "after")
        return listing(page, more)

    @router.delete("/{name:path}/permissions/{permission_id}")
    async def delete(name: str, permission_id: str, caller: CallerOf) -> dict[str, Any]:
        job = job_of(caller, name)
        reader = _reader(permission_id)
        if reader not in core.runs.get(caller, job.run_id).readers:
            message = f"there is no permission {permission_id[:200]!r} of {name[:200]}"
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_MODEL, message, field="permission_id")
        await core.runs.share(caller, job.run_id, reader, revoke=True)
        return {"id": permission_id, "object": "checkpoint.permission", "deleted": True}

    return router


def _permission(job: jobs.Job, reader: str) -> dict[str, Any]:
    coded = base64.b32encode(reader.encode()).decode().rstrip("=").lower()
    return {
        "id": ID + coded, "object": "checkpoint.permission", "created_at": int(job.finished_at or job.created_at),
        "project_id": reader,
    }  # fmt: skip


def _reader(permission_id: str) -> str:
    """The key that a permission is for.

    Raises:
        ServiceError: INVALID_ARGUMENT for what is no id of one.
    """
    coded = permission_id.removeprefix(ID).upper()
    try:
        return base64.b32decode(coded + "=" * (-len(coded) % 8)).decode()
    except (binascii.Error, ValueError):
        raise invalid(f"{permission_id[:100]!r} is no id of a permission", "permission_id") from None
