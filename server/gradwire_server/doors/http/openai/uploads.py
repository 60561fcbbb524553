"""``/v1/uploads``: files that arrive in parts."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter, Request
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import jobs_pb2 as jobs
from pydantic import ConfigDict, Field
from starlette.datastructures import UploadFile

from gradwire_server.core.core import Core
from gradwire_server.core.jobs.file_parts import MAX_PARTS, Upload
from gradwire_server.doors.http.openai.files import LEAST_S, MOST_S, chunks_of, file_body, form_of
from gradwire_server.doors.http.openai.requests import check_encodable
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.errors import invalid

FORM = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", "format": "binary"}}}
DOCUMENTED = {"requestBody": {"content": {"multipart/form-data": {"schema": FORM}}, "required": True}}


class ExpiresAfter(BoundedModel):
    """When the file is deleted."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_S, le=MOST_S)


class CreateUpload(BoundedModel):
    """``POST /v1/uploads``."""

    model_config = ConfigDict(extra="forbid")

    filename: str
    purpose: str
    bytes: int = Field(ge=1, lt=2**53)
    mime_type: str = ""
    expires_after: ExpiresAfter | None = None


class CompleteUpload(BoundedModel):
    """``POST /v1/uploads/{upload_id}/complete``."""

    model_config = ConfigDict(extra="forbid")

    part_ids: list[str] = Field(min_length=1, max_length=MAX_PARTS)
    md5: str | None = None


def routes(core: Core) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/uploads")

    @router.post("")
    async def create_upload(asked: CreateUpload, caller: CallerOf) -> dict[str, Any]:
        for field, text in (("filename", asked.filename), ("purpose", asked.purpose)):
            check_encodable(text, field)
        expires_at = time.time() + asked.expires_after.seconds if asked.expires_after is not None else 0.0
        described = jobs.File(filename=asked.filename, purpose=asked.purpose, expires_at=expires_at)
        return _body(await core.file_parts.create(caller, described, asked.bytes))

    @router.post("/{upload_id}/parts", openapi_extra=DOCUMENTED)
    async def add_part(upload_id: str, http: Request, caller: CallerOf) -> dict[str, Any]:
        with core.file_parts.part(caller, upload_id) as part:
            async with form_of(http, 1, part.reach) as form:
                data = form.get("data")
                if not isinstance(data, UploadFile):
                    raise invalid("data is missing: send a form (multipart/form-data) with a file in it", "data")
                created_at = await core.file_parts.add(caller, part, chunks_of(data))
        return {"id": part.part_id, "object": "upload.part", "created_at": int(created_at), "upload_id": upload_id}

    @router.post("/{upload_id}/complete")
    async def complete_upload(upload_id: str, asked: CompleteUpload, caller: CallerOf) -> dict[str, Any]:
        return _body(await core.file_parts.complete(caller, upload_id, asked.part_ids, asked.md5 or ""))

    @router.post("/{upload_id}/cancel")
    async def cancel_upload(upload_id: str, caller: CallerOf) -> dict[str, Any]:
        return _body(await core.file_parts.cancel(caller, upload_id))

    return router


def _body(upload: Upload) -> dict[str, Any]:
    return {
        "id": upload.upload_id,
        "object": "upload",
        "bytes": upload.size_bytes,
        "created_at": int(upload.created_at),
        "expires_at": int(upload.expires_at),
        "filename": upload.described.filename,
        "purpose": upload.described.purpose,
        "status": upload.status,
        "file": None if upload.file is None else file_body(upload.file),
    }
