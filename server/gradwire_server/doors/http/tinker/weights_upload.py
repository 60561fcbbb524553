"""Adapters that clients upload: files by signed URLs, which become a model with one checkpoint.

An upload is of two files, in peft's format, as exports have them; pickles have no URL. Until it is finished, it is in
memory and in ``tinker_uploads`` of the state folder, for an hour at most, or until the server ends. Then the core's
uploads check the files, and take them over.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.calls import CallKind
from gradwire_server.access.keys import Caller
from gradwire_server.config import CHUNK_BYTES
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.audit import note
from gradwire_server.doors.http.tinker.models import Models, writer_of
from gradwire_server.doors.http.tinker.names import TinkerPath, model_id_of
from gradwire_server.doors.http.tinker.signed_urls import VALID_S, SignedUrls
from gradwire_server.doors.http.tinker.store import ModelRecord, Name, SessionRecord, TinkerStore
from gradwire_server.doors.http.tinker.training_requests import LoraConfig
from gradwire_server.durable_files import is_full
from gradwire_server.errors import ServiceError, invalid, limit_exceeded, unknown_upload
from gradwire_server.limits import Limits

SIGNED = "/external_weights_upload/"
"""Beginning of the signed paths, relative to the protocol's prefix."""
MOST_UPLOADS = 8
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
UPLOADED = "uploaded"
"""Name of the checkpoint."""


class StartRequest(BoundedModel):
    """An adapter to upload."""

    base_model: Name
    lora_config: LoraConfig
    destination_project_id: Name | None = None


class FinishUploadRequest(BoundedModel):
    """An upload whose files have arrived."""

    upload_id: Name


@dataclass
class _Upload:
    """An upload that was begun."""

    owner: str
    asked: StartRequest
    folder: Path
    begun_at: float = field(default_factory=time.time)
    sizes: dict[str, int] = field(default_factory=dict)
    path: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WeightUploads:
    """The uploads that were begun.

    Args:
        folder: Where their files are; what it holds of an earlier server is deleted.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._begun: dict[str, _Upload] = {}

    async def begin(self, owner: str, asked: StartRequest) -> str:
        """Begin an upload.

        Raises:
            ServiceError: LIMIT_EXCEEDED while the key has too many.
        """
        await self.drop(*[each for each, upload in self._begun.items() if time.time() - upload.begun_at > VALID_S])
        if sum(upload.owner == owner for upload in self._begun.values()) >= MOST_UPLOADS:
            message = f"the key has begun {MOST_UPLOADS} uploads in the last hour: finish one"
            raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, rule=f"uploads = {MOST_UPLOADS}")
        if not self._begun:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        upload_id = secrets.token_hex(16)
        upload = self._begun[upload_id] = _Upload(owner, asked, self._folder / upload_id)
        await asyncio.to_thread(upload.folder.mkdir, 0o700, parents=True)
        return upload_id

    def get(self, upload_id: str, owner: str | None = None) -> _Upload:
        """An upload.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, also for one of another key.
        """
        upload = self._begun.get(upload_id)
        if upload is None or owner not in (None, upload.owner):
            raise unknown_upload(upload_id)
        return upload

    async def receive(self, upload: _Upload, name: str, size: int, body: AsyncIterator[bytes]) -> None:
        """Write a file, in place of one that arrived before.

        Raises:
            ServiceError: INVALID_ARGUMENT for a body of another size; LIMIT_EXCEEDED, STORAGE_FULL.
        """
        async with upload.lock:
            most = MAX_CONFIG_BYTES if name == CONFIG else self._limits.max_upload_bytes
            others = sum(
                sum(each.sizes.values()) for each in self._begun.values() if each.owner == upload.owner
            ) - upload.sizes.get(name, 0)
            if size > most or others + size > self._limits.max_upload_bytes:
                what = f"{name} has {size:,} bytes, and {others:,} of the key's others wait to be finished"
                raise limit_exceeded(what, "max_upload_bytes", self._limits.max_upload_bytes, name)
            upload.sizes[name] = size
            part = upload.folder / f"{name}.part"
            try:
                if await _written(part, size, body) != size:
                    raise invalid(f"{name} ended before its {size:,} bytes: send it again", name)
                await asyncio.to_thread(os.replace, part, upload.folder / name)
            except OSError as error:
                if not is_full(error):
                    raise
                message = "the server's disk is full: delete checkpoints, or ask its operator"
                raise ServiceError(pb.ERROR_CODE_STORAGE_FULL, message) from error

    async def drop(self, *upload_ids: str) -> None:
        """Forget uploads, with their files."""
        for upload_id in upload_ids:
            upload = self._begun.pop(upload_id, None)
            if upload is not None:
                await asyncio.to_thread(shutil.rmtree, upload.folder, ignore_errors=True)


def routes(core: Core, store: TinkerStore, models: Models) -> APIRouter:
    """The routes over the door's state."""
    router, signed = APIRouter(), SignedUrls(core.keys, store.url_secret, SIGNED)
    uploads = WeightUploads(core.config.state_dir / "tinker_uploads", core.config.limits)

    @router.post("/external_weights_upload_start")
    async def start(caller: CallerOf, http: Request, request: StartRequest) -> dict[str, Any]:
        """Begin an upload, with a signed URL for each file."""
        core.model_name(request.base_model)
        upload_id = await uploads.begin(caller.name, request)
        base = signed.make(http, caller.name, upload_id)
        expires = datetime.fromtimestamp(time.time() + VALID_S, UTC).isoformat()
        return {
            "upload_id": upload_id,
            "urls": {name: f"{base}/{name}" for name in (CONFIG, WEIGHTS)},
            "expires": expires,
        }

    @router.put(SIGNED + "{token}/{name}")
    async def put_file(http: Request, token: str, name: str) -> dict[str, Any]:
        """Take a file, by its signed URL."""
        upload, length = uploads.get(signed.read(http, token)), http.headers.get("content-length", "")
        if name not in (CONFIG, WEIGHTS):
            raise invalid(f"{name[:100]!r} is no file of an upload: {CONFIG} and {WEIGHTS} are", "name")
        if not length.isdigit() or len(length) > 15 or http.headers.get("content-encoding", "identity") != "identity":
            raise invalid("send the file as it is, with its Content-Length", "Content-Length")
        async with core.calls.turn(upload.owner, CallKind.HTTP), asyncio.timeout(VALID_S):
            await uploads.receive(upload, name, int(length), http.stream())
        return {}

    @router.post("/external_weights_upload_finish")
    async def finish(caller: CallerOf, request: FinishUploadRequest) -> dict[str, str]:
        """Check the files, and make a checkpoint of them."""
        upload = uploads.get(request.upload_id, caller.name)
        async with upload.lock:
            if not upload.path:
                upload.path = str(await _checkpoint(caller, request.upload_id, upload))
                upload.sizes.clear()
                await asyncio.to_thread(shutil.rmtree, upload.folder, ignore_errors=True)
        return {"tinker_path": upload.path}

    async def _checkpoint(caller: Caller, upload_id: str, upload: _Upload) -> TinkerPath:
        lacking = [name for name in (CONFIG, WEIGHTS) if not await asyncio.to_thread((upload.folder / name).exists)]
        if lacking:
            raise invalid(f"{' and '.join(lacking)} did not arrive: PUT each file to its URL", "upload_id")
        taken = await _taken_over(caller, upload)
        asked, rank = upload.asked, taken.lora.rank
        if rank != asked.lora_config.rank:
            await core.uploads.delete(caller, taken.upload_id)
            raise invalid(f"lora_config says rank {asked.lora_config.rank}, and the files have {rank}", "lora_config")
        async with core.calls.turn(caller.name, CallKind.CREATE):
            config = pb.RunConfig(from_upload=taken.upload_id, name=f"upload {upload_id}")
            run = await core.runs.create(caller, config, f"tinker-upload:{upload_id}")
        session = SessionRecord(
            owner=caller.name, session_id=str(uuid.uuid4()), ended=True, display_name="uploaded weights",
            project_id=asked.destination_project_id or "",
        )  # fmt: skip
        await store.put(store.sessions, session)
        lora = asked.lora_config
        model = ModelRecord(
            owner=caller.name, model_id=model_id_of(session.session_id, 0), session_id=session.session_id,
            run_id=run.run_id, base_model=run.config.base_model, rank=rank, alpha=run.config.lora.alpha,
            train_attn=lora.train_attn, train_mlp=lora.train_mlp, train_unembed=lora.train_unembed,
        )  # fmt: skip
        await core.open_run(caller, run.run_id, writer_of(model), takeover=True)
        await store.put(store.models, model)
        path = TinkerPath(model.model_id, "weights", UPLOADED)
        save = pb.Operation(save_checkpoint=pb.SaveCheckpoint(name=path.stored_name))
        await models.submit(caller, model.model_id, 1, "save", save)
        saved = await models.result(caller, model, 1)
        if saved.header.status != pb.STATUS_SUCCEEDED:
            raise ServiceError.of(saved.header.error)
        models.delivered(model.model_id, 1)
        await core.uploads.delete(caller, taken.upload_id)
        await note(store, caller, "checkpoint_upload", str(path))
        return path

    async def _taken_over(caller: Caller, upload: _Upload) -> pb.Upload:
        """The upload of the core that has these files."""
        files = [await asyncio.to_thread(_described, upload.folder / name) for name in (CONFIG, WEIGHTS)]
        begin = pb.BeginUploadRequest(kind="adapter", base_model=upload.asked.base_model, files=files)
        begun = await core.uploads.begin(caller, begin)
        for file in begun.files:
            for offset in range(file.received_bytes, file.size_bytes, CHUNK_BYTES):
                chunk = await asyncio.to_thread(_chunk, upload.folder / file.name, offset)
                await core.uploads.write(caller, begun.upload_id, file.name, offset, chunk)
        return await core.uploads.finish(caller, begun.upload_id)

    return router


async def _written(path: Path, most: int, body: AsyncIterator[bytes]) -> int:
    """Write a body to a new file, and return its size; at most ``most`` bytes are written."""
    size, flags = 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = await asyncio.to_thread(os.open, path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        async for part in body:
            size += len(part)
            if size > most:
                return size
            await asyncio.to_thread(file.write, part)
    return size


def _described(path: Path) -> pb.UploadFile:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        length = path.stat().st_size if path.suffix == ".json" else int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise invalid(f"{path.name} is no safetensors file", path.name)
        head = file.read(length)
        file.seek(0)
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
    return pb.UploadFile(name=path.name, size_bytes=path.stat().st_size, digest=digest.digest(), head=head)


def _chunk(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)
