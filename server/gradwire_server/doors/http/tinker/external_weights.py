"""Routes of exported weights: adapters as folders that peft loads, and their files by signed URLs.

A URL needs no key. It is valid for an hour, and only while the export is there. Files of an export with age recipients
are encrypted to them when URLs are first asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import Field
from starlette.background import BackgroundTask

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf, TraceparentOf
from gradwire_server.doors.http.tinker.audit import note
from gradwire_server.doors.http.tinker.models import Models
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.operation_route import operation_route
from gradwire_server.doors.http.tinker.saved_weights import SavedWeights
from gradwire_server.doors.http.tinker.signed_urls import VALID_S, SignedUrls
from gradwire_server.doors.http.tinker.store import MAX_TTL_S, SavedRecord, TinkerStore
from gradwire_server.doors.http.tinker.training_requests import MAX_NUMBER
from gradwire_server.durable_files import link_or_copy
from gradwire_server.errors import ServiceError, invalid, unknown_checkpoint

SIGNED = "/external_weights/"
"""Beginning of the signed paths, relative to the protocol's prefix."""
MAX_RECIPIENTS = 10
AGE = ".age"


class SaveExternalRequest(BoundedModel):
    """Weights to export."""

    model_id: str
    path: str
    seq_id: int = Field(ge=1, lt=MAX_NUMBER)
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_S)
    age_encryption_recipients: list[str] | None = Field(default=None, max_length=MAX_RECIPIENTS)


def routes(core: Core, store: TinkerStore, models: Models, saved: SavedWeights) -> APIRouter:
    """The routes over the door's state."""
    router = APIRouter(route_class=operation_route(models))
    encrypting: dict[str, asyncio.Lock] = {}

    @router.post("/save_weights_external")
    async def save_weights_external(
        caller: CallerOf, request: SaveExternalRequest, trace: TraceparentOf
    ) -> dict[str, str]:
        """Export the adapter."""
        models.get(caller, request.model_id)
        refusal, name = None, ""
        try:
            path = TinkerPath.of(request.model_id, f"external_weights/{request.path}")
            record = _record(caller, path, request)
        except ServiceError as error:
            refusal = error.error
        else:
            name = path.stored_name
            await store.put(store.saved, record)
        operation = pb.Operation(export=pb.ExportModel(name=name, format="peft"))
        promise = await models.submit(
            caller, request.model_id, request.seq_id, "save_external", operation, refusal=refusal, traceparent=trace
        )
        if refusal is None:
            await note(store, caller, "checkpoint_export", str(path))
        return {"request_id": promise, "model_id": request.model_id}

    def _record(caller: Caller, path: TinkerPath, request: SaveExternalRequest) -> SavedRecord:
        recipients = request.age_encryption_recipients or []
        _age_recipients(recipients)
        known = store.saved.get(str(path))
        if known is not None and known.seq == request.seq_id:  # it is sent again
            return known
        if known is not None and known.size_bytes is not None:
            message = f"there are exported weights {str(path)!r} already: delete them first, or take another name"
            raise ServiceError(pb.ERROR_CODE_ALREADY_EXISTS, message, field="path")
        record = SavedRecord(owner=caller.name, path=str(path), seq=request.seq_id, recipients=recipients)
        if request.ttl_seconds is not None:
            record.expires_at = record.created_at + request.ttl_seconds
        return record

    signed = SignedUrls(core.keys, store.url_secret, SIGNED)

    @router.get("/training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls")
    async def external_weights_urls(caller: CallerOf, request: Request, model_id: str, name: str) -> dict[str, Any]:
        """Signed URLs of the files of exported weights."""
        path = TinkerPath.of(model_id, f"external_weights/{name}")
        files = await _listed(caller, path)
        recipients = store.saved[str(path)].recipients
        if recipients:
            async with encrypting.setdefault(str(path), asyncio.Lock()):
                if not all(file.endswith(AGE) for file in await _listed(caller, path)):
                    encrypt = partial(_encrypt, recipients=recipients)
                    await core.runs.change_export(caller, saved.export(caller, path), encrypt)
                files = await _listed(caller, path)
        await note(store, caller, "checkpoint_read", str(path))
        base, expires = signed.make(request, caller.name, str(path)), time.time() + VALID_S
        return {
            "urls": {file: f"{base}/{quote(file)}" for file in files},
            "expires": datetime.fromtimestamp(expires, UTC).isoformat(),
        }

    @router.get(SIGNED + "{token}/{file}")
    async def file(request: Request, token: str, file: str) -> FileResponse:
        """A file, by a signed URL."""
        path = TinkerPath.read(signed.read(request, token))
        record = store.saved.get(str(path))
        if record is None:
            raise unknown_checkpoint(str(path))
        async with AsyncExitStack() as used:
            folder = await used.enter_async_context(_folder(Caller(record.owner), path, file))
            if file not in await asyncio.to_thread(_files, folder):
                raise ServiceError(pb.ERROR_CODE_UNKNOWN_CHECKPOINT, f"{path} has no file {file[:200]!r}", field="file")
            sent = BackgroundTask(used.pop_all().aclose)
            return FileResponse(folder / file, media_type="application/octet-stream", background=sent)

    async def _listed(caller: Caller, path: TinkerPath) -> list[str]:
        async with _folder(caller, path) as folder:
            return await asyncio.to_thread(_files, folder)

    @asynccontextmanager
    async def _folder(caller: Caller, path: TinkerPath, check: str | None = None) -> AsyncGenerator[Path]:
        stored = saved.export(caller, path)
        async with AsyncExitStack() as used:
            try:
                folder = await used.enter_async_context(core.runs.folder(caller, export=stored, check=check))
            except ServiceError as error:
                if error.code in (pb.ERROR_CODE_INTERNAL, pb.ERROR_CODE_CHECKPOINT_CORRUPT):  # these say what to do
                    raise
                raise unknown_checkpoint(str(path)) from None
            yield folder

    return router


def _files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))


def _age_recipients(recipients: Sequence[str]) -> list[Any]:
    """Recipients as age has them.

    Raises:
        ServiceError: INVALID_ARGUMENT for a text that is no key; UNSUPPORTED without pyrage.
    """
    if not recipients:
        return []
    try:
        pyrage: Any = importlib.import_module("pyrage")
    except ImportError:
        message = "this server cannot encrypt to age recipients: pip install 'gradwire[http]'"
        raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="age_encryption_recipients") from None
    parsed = []
    for each in recipients:
        kind = pyrage.ssh if each.startswith("ssh-") else pyrage.x25519
        try:
            parsed.append(kind.Recipient.from_str(each))
        except pyrage.RecipientError as error:
            raise invalid(f"{each[:100]!r} is no age recipient: {error}", "age_encryption_recipients") from error
    return parsed


def _encrypt(folder: Path, to: Path, recipients: Sequence[str]) -> None:
    """Write the files of a folder to another, encrypted; those that are encrypted already are copied."""
    keys = _age_recipients(recipients)
    pyrage: Any = importlib.import_module("pyrage")
    for name in _files(folder):
        if name.endswith(AGE):
            link_or_copy(str(folder / name), str(to / name))
            continue
        pyrage.encrypt_file(str(folder / name), str(to / f"{name}{AGE}"), keys)
