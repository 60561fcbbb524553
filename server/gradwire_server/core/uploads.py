"""Uploaded weights that runs can start from: PEFT adapters, and whole models of a served architecture.

A run that starts from an upload has its own copy of the upload's checkpoint, as a fork has of its source's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath

from gradwire_proto.v1 import engine_pb2, journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.key_file import Quota
from gradwire_server.access.keys import Caller
from gradwire_server.access.model_names import ModelNames
from gradwire_server.access.quotas import check_uploads
from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.errors import ServiceError, invalid, limit_exceeded, unknown_upload
from gradwire_server.journal.checkpoint_records import store_failed
from gradwire_server.journal.upload_folders import UploadFolders
from gradwire_server.stores.store import Store, StoreError

log = logging.getLogger(__name__)

KINDS = {"adapter": {"adapter_config.json", "adapter_model.safetensors"}, "model": {"config.json"}}
"""The files that each kind of upload has at least."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(json|safetensors)")
MAX_FILES = 1000
ABANDONED_S = 24 * 3600.0
"""An unfinished upload to which nothing was added for this long is deleted."""

Ask = Callable[[str, str, engine_pb2.EngineRequest, str], Awaitable[engine_pb2.EngineReply]]


class Uploads:
    """The uploads of a state folder. Each belongs to the key that began it; others do not see it, except admins.

    Args:
        quota_of: Returns the present quota of a key.
        ask: Sends a request to an engine with a model when it is a key's turn; see :meth:`.Scheduler.ask`.
    """

    def __init__(
        self, config: ServerConfig, store: Store, models: ModelNames, quota_of: Callable[[str], Quota], ask: Ask
    ) -> None:
        self._store, self._folders, self._limits = store, UploadFolders(config.state_dir, store), config.limits
        self._models, self._quota_of, self._ask = models, quota_of, ask
        self._known: dict[str, journal_pb2.UploadDescription] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._finishing: dict[str, asyncio.Task[None]] = {}

    def load(self) -> None:
        """Read the uploads of the folder, and delete abandoned and unreadable ones."""
        self._known = {described.upload.upload_id: described for described in self._folders.load()}
        for upload_id, known in self._known.items():
            if known.upload.ready:  # a crash may have left them
                self._folders.drop_files(upload_id)
        for upload_id in self._abandoned():
            self._forget(upload_id)
            self._folders.remove(upload_id)

    async def begin(self, caller: Caller, request: pb.BeginUploadRequest) -> pb.Upload:
        """Check what is to be uploaded, and return the upload to write to; the same content again is the same upload.

        Raises:
            ServiceError: INVALID_ARGUMENT or UNSUPPORTED for files that do not fit the base model; UNKNOWN_MODEL,
                LIMIT_EXCEEDED.
        """
        asked = pb.BeginUploadRequest()
        asked.CopyFrom(request)
        self._check(asked)
        upload = pb.Upload(kind=asked.kind, size_bytes=sum(file.size_bytes for file in asked.files))
        upload.base_model, warnings = self._base_model(asked)
        upload.warnings.extend(warnings)
        asked.base_model = upload.base_model
        content = hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=16).hexdigest()
        await self._collect()
        if (known := await self._begun(caller, content)) is not None:
            return self._described(known)
        if upload.size_bytes > self._limits.max_upload_bytes:
            what = f"the files have {upload.size_bytes} bytes"
            raise limit_exceeded(what, "max_upload_bytes", self._limits.max_upload_bytes, "path")
        self._check_quota(caller, upload.size_bytes)
        checking = engine_pb2.EngineRequest(check_upload=engine_pb2.EngineCheckUpload(request=asked))
        checked = (await self._ask(caller.name, upload.base_model, checking, "checked the upload")).upload
        if (known := await self._begun(caller, content)) is not None:  # by another call meanwhile
            return self._described(known)
        self._check_quota(caller, upload.size_bytes)
        if checked.HasField("lora"):
            upload.lora.CopyFrom(checked.lora)
        upload.upload_id = "upload-" + base64.b32encode(secrets.token_bytes(10)).decode().lower()
        upload.files.extend(
            pb.UploadFile(name=file.name, size_bytes=file.size_bytes, digest=file.digest) for file in asked.files
        )
        upload.created_at, upload.owner = time.time(), caller.name
        described = journal_pb2.UploadDescription(upload=upload, owner=caller.name, content=content)
        async with self._lock(upload.upload_id):
            self._known[upload.upload_id] = described
            try:
                await asyncio.to_thread(self._folders.create, described)
            except BaseException:
                del self._known[upload.upload_id]
                raise
        return self._described(described)

    async def write(self, caller: Caller, upload_id: str, name: str, offset: int, chunk: bytes) -> int:
        """Add a chunk to a file, and return how many bytes of the file have arrived; one that had arrived adds nothing.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT; INVALID_ARGUMENT for a chunk that leaves a gap or exceeds the file.
        """
        described = self._find(caller, upload_id)
        file = next((file for file in described.upload.files if file.name == name), None)
        if file is None:
            raise _invalid(f"the upload {upload_id} has no file {name[:200]!r}")
        if len(chunk) > CHUNK_BYTES or offset + len(chunk) > file.size_bytes:
            raise _invalid(f"a chunk of {len(chunk)} bytes at {offset} does not fit {name} of {file.size_bytes} bytes")
        async with self._lock(upload_id):
            if self._find(caller, upload_id).upload.ready:
                return file.size_bytes
            received = await asyncio.to_thread(self._folders.append, upload_id, name, offset, chunk)
        if received < offset:
            raise _invalid(f"a chunk at {offset} leaves a gap: {received} bytes of {name} have arrived")
        return received

    async def finish(self, caller: Caller, upload_id: str) -> pb.Upload:
        """Check the files' digests, and make the checkpoint from which runs start; durable when it returns.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT; INVALID_ARGUMENT if files are incomplete or do not hold the weights;
                PAYLOAD_CORRUPT for a digest that does not match: the file is to be sent again.
        """
        described = self._find(caller, upload_id)
        if not described.upload.ready:
            if upload_id not in self._finishing:
                task = self._finishing[upload_id] = asyncio.create_task(self._finish(described))
                task.add_done_callback(lambda done: self._finished(upload_id, done))
            await asyncio.shield(self._finishing[upload_id])
        return self._described(described)

    def of(self, caller: Caller) -> list[pb.Upload]:
        """The uploads that a caller may use, oldest first."""
        mine = [self._described(known) for known in self._known.values() if _may_use(caller, known)]
        return sorted(mine, key=lambda upload: upload.created_at)

    async def delete(self, caller: Caller, upload_id: str) -> None:
        """Delete an upload. Runs that were created from it stay as they are.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT.
        """
        self._find(caller, upload_id)
        async with self._lock(upload_id):
            self._find(caller, upload_id)
            del self._known[upload_id]
            await self._store.in_thread(self._folders.remove, upload_id)
        self._locks.pop(upload_id, None)

    def ready(self, caller: Caller, upload_id: str) -> pb.Upload:
        """A finished upload.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT; INVALID_ARGUMENT for one that is not finished.
        """
        upload = self._find(caller, upload_id).upload
        if not upload.ready:
            raise _invalid(f"the upload {upload_id} is not complete: upload the folder again, which continues it")
        return upload

    # ---- internals ----

    def _check(self, asked: pb.BeginUploadRequest) -> None:
        if asked.kind not in KINDS:
            raise _invalid(f'kind is {asked.kind[:50]!r}; it is "adapter" or "model"', "kind")
        names = [file.name for file in asked.files]
        if len(names) > MAX_FILES or len(set(names)) < len(names):
            raise _invalid(f"an upload has {MAX_FILES} files at most, each once")
        for file in asked.files:
            if not FILE_NAME.fullmatch(file.name) or len(file.digest) != 32:
                raise _invalid(f"{file.name[:200]!r} cannot be uploaded: .json and .safetensors, with BLAKE2b-256")
        missing = KINDS[asked.kind] - set(names)
        if missing or not any(name.endswith(".safetensors") for name in names):
            lacking = ", ".join(sorted(missing)) or "*.safetensors"
            raise _invalid(f"the folder lacks {lacking}")

    def _base_model(self, asked: pb.BeginUploadRequest) -> tuple[str, list[str]]:
        """The model that weights are for, asked for or else named by the adapter, and warnings."""
        if asked.kind == "model":
            return self._models.find_or_only(asked.base_model, "base_model"), []
        head = next(file.head for file in asked.files if file.name == "adapter_config.json")
        try:
            trained_on = str(json.loads(head).get("base_model_name_or_path") or "")
        except (ValueError, AttributeError):
            raise _invalid("adapter_config.json holds no JSON object") from None
        fitting = [name for name, path in self._models.paths.items() if _is_same(trained_on, name, path)]
        if asked.base_model:
            name = self._models.find(asked.base_model, "base_model")
            if trained_on and name not in fitting:
                return name, [f"the adapter says that it was trained on {trained_on!r}; it is used on {name!r}"]
            return name, []
        if len(fitting) != 1 and trained_on:
            raise _invalid(
                f"the adapter was trained on {trained_on[:200]!r}, and this server has"
                f" {', '.join(fitting or sorted(self._models.paths))}: base_model= says which one to use it on",
                "base_model",
            )
        return fitting[0] if trained_on else self._models.find_or_only("", "base_model"), []

    def _lock(self, upload_id: str) -> asyncio.Lock:
        """Held by whoever makes, adds to, finishes or deletes an upload."""
        return self._locks.setdefault(upload_id, asyncio.Lock())

    async def _begun(self, caller: Caller, content: str) -> journal_pb2.UploadDescription | None:
        """The caller's upload of the same content, once it is durable; None if there is none."""
        while (known := self._same(caller, content)) is not None:
            async with self._lock(known.upload.upload_id):
                if self._known.get(known.upload.upload_id) is known:
                    return known
        return None

    def _same(self, caller: Caller, content: str) -> journal_pb2.UploadDescription | None:
        mine = (known for known in self._known.values() if known.owner == caller.name)
        return next((known for known in mine if known.content == content), None)

    def _check_quota(self, caller: Caller, more: int) -> None:
        size = sum(known.upload.size_bytes for known in self._known.values() if known.owner == caller.name)
        check_uploads(size, more, self._quota_of(caller.name), self._limits)

    async def _finish(self, described: journal_pb2.UploadDescription) -> None:
        upload = described.upload
        async with self._lock(upload.upload_id):
            if upload.upload_id not in self._known:
                raise unknown_upload(upload.upload_id)
            await asyncio.to_thread(self._folders.check, upload)
            try:
                await self._store.in_thread(self._folders.offer, upload.upload_id)
            except StoreError as error:
                raise store_failed(error) from error
            importing = engine_pb2.EngineRequest(import_upload=engine_pb2.EngineImportUpload(upload=upload))
            await self._ask(described.owner, upload.base_model, importing, "took the upload over")
            finished = journal_pb2.UploadDescription()
            finished.CopyFrom(described)
            finished.upload.ready = True
            await asyncio.to_thread(self._folders.describe, finished)
            upload.ready = True
            await self._store.in_thread(self._folders.drop_files, upload.upload_id)

    def _finished(self, upload_id: str, task: asyncio.Task[None]) -> None:
        del self._finishing[upload_id]
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a caller that still waits gets it

    def _find(self, caller: Caller, upload_id: str) -> journal_pb2.UploadDescription:
        known = self._known.get(upload_id)
        if known is None or not _may_use(caller, known):
            raise unknown_upload(upload_id)
        return known

    def _described(self, known: journal_pb2.UploadDescription) -> pb.Upload:
        upload = pb.Upload()
        upload.CopyFrom(known.upload)
        for file in upload.files:
            received = file.size_bytes if upload.ready else self._folders.received_bytes(upload.upload_id, file.name)
            file.received_bytes = received
        return upload

    async def _collect(self) -> None:
        """Delete abandoned uploads."""
        for upload_id in await asyncio.to_thread(self._abandoned):
            async with self._lock(upload_id):
                if upload_id in self._known and upload_id in self._abandoned():
                    self._forget(upload_id)
                    await self._store.in_thread(self._folders.remove, upload_id)

    def _abandoned(self) -> list[str]:
        """Unfinished uploads to which nothing was added for long."""
        oldest = time.time() - ABANDONED_S
        unfinished = [upload_id for upload_id, known in list(self._known.items()) if not known.upload.ready]
        return [
            upload_id
            for upload_id in unfinished
            if upload_id not in self._finishing and self._folders.last_change(upload_id) < oldest
        ]

    def _forget(self, upload_id: str) -> None:
        log.warning("the upload %s is deleted: it was not finished", upload_id)
        del self._known[upload_id]


def _may_use(caller: Caller, known: journal_pb2.UploadDescription) -> bool:
    return caller.sees_all or caller.name == known.owner


def _is_same(trained_on: str, name: str, path: str) -> bool:
    """Whether a model is the one that an adapter names: by its name or path, or by the last part of either."""
    last = PurePosixPath(trained_on).name
    return bool(last) and (trained_on in (name, path) or last in (PurePosixPath(name).name, PurePosixPath(path).name))


def _invalid(message: str, field: str = "path") -> ServiceError:
    return invalid(message, field)
