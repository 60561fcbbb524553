"""``/v1/files``: data sets that fine-tuning jobs train on, and the tables that they leave."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb
from starlette.datastructures import FormData, UploadFile
from starlette.types import Message

from gradwire_server.config import CHUNK_BYTES
from gradwire_server.core.core import Core
from gradwire_server.doors.http.bodies import FORM_BYTES
from gradwire_server.doors.http.openai.requests import check_encodable
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.durable_files import is_full
from gradwire_server.errors import ServiceError, invalid

MAX_FIELDS = 10
LEAST_S, MOST_S = 3600, 2_592_000
"""Seconds after which a file may expire."""
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string"},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
}
DOCUMENTED = {"requestBody": {"content": {"multipart/form-data": {"schema": FORM}}, "required": True}}


def routes(core: Core) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/files")

    @router.post("", openapi_extra=DOCUMENTED)
    async def create_file(http: Request, caller: CallerOf) -> dict[str, Any]:
        key = http.headers.get("idempotency-key", "")
        with core.files.arriving(caller) as arrival:
            async with form_of(http, MAX_FIELDS, arrival.reach) as form:
                file, described = _asked(form)
                return file_body(await core.files.create(caller, described, chunks_of(file), key, arrival))

    @router.get("")
    async def list_files(
        caller: CallerOf,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str = "",
    ) -> dict[str, Any]:
        found, more = core.files.page(caller, limit, after, purpose, oldest_first=order == "asc")
        return listing([file_body(file) for file in found], more)

    @router.get("/{file_id}")
    async def get_file(file_id: str, caller: CallerOf) -> dict[str, Any]:
        return file_body(core.files.get(caller, file_id))

    @router.delete("/{file_id}")
    async def delete_file(file_id: str, caller: CallerOf) -> dict[str, Any]:
        await core.files.delete(caller, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.get("/{file_id}/content", response_class=Response)
    async def get_content(file_id: str, caller: CallerOf) -> Response:
        await core.files.check_content(caller, file_id)
        return StreamingResponse(core.files.content(caller, file_id), media_type="application/octet-stream")

    return router


def file_body(file: jobs.File) -> dict[str, Any]:
    """A file in OpenAI's form."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at) or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "error" if file.num_problems else "processed",
        "status_details": problems(file) or None,
    }


def problems(file: jobs.File) -> str:
    """The lines of a file that nothing can be trained on, as a sentence; empty if there are none."""
    if not file.num_problems:
        return ""
    said = "; ".join(f"line {each.line}: {each.reason}" if each.line else each.reason for each in file.problems)
    return f"{file.num_problems} of {file.num_lines} rows cannot be used: {said}" if file.num_lines else said


def listing(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of a list."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": more, **ends}


def _asked(form: FormData) -> tuple[UploadFile, jobs.File]:
    """The file of a form, and what is said of it."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise invalid("file is missing: send a form (multipart/form-data) with a file in it", "file")
    filename, purpose = file.filename or "file", form.get("purpose")
    if not isinstance(purpose, str):
        raise invalid('purpose is missing: "fine-tune" is for data to train on', "purpose")
    for field, text in (("file", filename), ("purpose", purpose)):
        check_encodable(text, field)
    return file, jobs.File(filename=filename, purpose=purpose, expires_at=_expiry(form))


def _expiry(form: FormData) -> float:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return 0.0
    if anchor != "created_at":
        raise invalid('expires_after[anchor] must be "created_at"', "expires_after")
    if not (isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise invalid("expires_after[seconds] is no number of seconds", "expires_after")
    if not LEAST_S <= int(seconds) <= MOST_S:
        raise invalid(f"expires_after[seconds] is {seconds}; it must be from {LEAST_S} to {MOST_S}", "expires_after")
    return time.time() + int(seconds)


@asynccontextmanager
async def form_of(http: Request, max_fields: int, reach: Callable[[int], None]) -> AsyncGenerator[FormData]:
    """The form in a request, whose file waits on the disk.

    Args:
        reach: Told how many bytes of the file have arrived at least; what it raises ends the request at once.
    """
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await http.receive()
        size += len(message.get("body", b""))
        reach(size - FORM_BYTES)
        return message

    try:
        async with Request(http.scope, counted).form(max_files=1, max_fields=max_fields) as form:
            yield form
    except OSError as error:
        if not is_full(error):
            raise
        raise ServiceError(pb.ERROR_CODE_STORAGE_FULL, "the server's disk is full: the file was not stored") from error


async def chunks_of(file: UploadFile) -> AsyncGenerator[bytes]:
    """The content of a form's file."""
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk
