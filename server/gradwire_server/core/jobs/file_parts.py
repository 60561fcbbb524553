"""Files that arrive in parts, as OpenAI's uploads do; what is not complete within an hour, or at a restart, is gone."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.config import CHUNK_BYTES
from gradwire_server.core.jobs.files import Arrival, Files, chunks_of, new_id
from gradwire_server.durable_files import make_folder
from gradwire_server.errors import ServiceError, invalid, limit_exceeded, unknown_file
from gradwire_server.limits import Limits

LIFE_S = 3600.0
MAX_PART_BYTES = 64 << 20
MAX_PARTS = 1024
MAX_OF_KEY = 16
"""Uploads that a key may have under way."""
MAX_ENDED_OF_KEY = 64
"""Uploads of a key that have ended and can be asked for; older ones are forgotten."""
PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"


@dataclass
class Upload:
    """A file that arrives in parts.

    Attributes:
        described: The file as it will be.
        size_bytes: Bytes that it will have.
        arrival: Its bytes, all of which count from its beginning on.
        parts: Id of a part -> its bytes, those that have arrived of one that is under way.
        file: The file, once it is complete.
        expiry: Ends the counting of its bytes, if nothing else does.
    """

    upload_id: str
    owner: str
    described: jobs.File
    size_bytes: int
    created_at: float
    arrival: Arrival
    expiry: asyncio.TimerHandle
    status: str = PENDING
    parts: dict[str, int] = field(default_factory=dict)
    file: jobs.File | None = None

    @property
    def expires_at(self) -> float:
        """When what has arrived is deleted."""
        return self.created_at + LIFE_S


@dataclass(frozen=True)
class FilePart:
    """A part that arrives."""

    upload: Upload
    part_id: str

    def reach(self, size: int) -> None:
        """Count this many bytes of the part, unless more of them are counted already.

        Raises:
            ServiceError: LIMIT_EXCEEDED, INVALID_ARGUMENT.
        """
        parts, announced = self.upload.parts, self.upload.size_bytes
        parts[self.part_id] = max(size, parts.get(self.part_id, 0))
        if size > MAX_PART_BYTES:
            raise _too_much(f"the part has more than {MAX_PART_BYTES} bytes")
        if sum(parts.values()) > announced:
            raise invalid(f"the parts have more than the announced {announced} bytes", "data")


class FileParts:
    """The uploads under way.

    Args:
        folder: Where parts wait.
    """

    def __init__(self, files: Files, folder: Path, limits: Limits) -> None:
        self._files, self._folder, self._limits = files, folder, limits
        self._known: dict[str, Upload] = {}

    def clean(self) -> None:
        """Delete what an earlier server left."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def create(self, caller: Caller, described: jobs.File, size_bytes: int) -> Upload:
        """Begin an upload.

        Raises:
            ServiceError: INVALID_ARGUMENT, LIMIT_EXCEEDED.
        """
        await self._expire()
        self._files.check(described)
        most = self._limits.max_file_bytes
        if size_bytes > most:
            raise limit_exceeded(f"the file will have {size_bytes} bytes", "max_file_bytes", most, "bytes")
        if sum(each.owner == caller.name and each.status == PENDING for each in self._known.values()) >= MAX_OF_KEY:
            raise _too_much(f"this key has {MAX_OF_KEY} uploads under way: complete or cancel one")
        arrival = self._files.arrival(caller)
        expiry = asyncio.get_running_loop().call_later(LIFE_S, arrival.end)
        upload = Upload(new_id("upload_"), caller.name, described, size_bytes, time.time(), arrival, expiry)
        try:
            arrival.reach(size_bytes)
            await asyncio.to_thread(make_folder, self._folder, 0o700)
            await asyncio.to_thread(make_folder, self._folder / upload.upload_id, 0o700)
        except BaseException:
            expiry.cancel()
            arrival.end()
            raise
        self._known[upload.upload_id] = upload
        return upload

    def get(self, caller: Caller, upload_id: str) -> Upload:
        """An upload.

        Raises:
            ServiceError: UNKNOWN_FILE, also for one of another key.
        """
        upload = self._known.get(upload_id)
        if upload is None or upload.owner != caller.name:
            raise unknown_file(upload_id, "upload_id")
        return upload

    @contextmanager
    def part(self, caller: Caller, upload_id: str) -> Iterator[FilePart]:
        """A new part of an upload, which is forgotten if the context ends with an error.

        Raises:
            ServiceError: UNKNOWN_FILE, UNSUPPORTED, LIMIT_EXCEEDED.
        """
        upload = self._pending(caller, upload_id)
        if len(upload.parts) >= MAX_PARTS:
            raise _too_much(f"the upload has {MAX_PARTS} parts: make them larger")
        part = FilePart(upload, new_id("part_"))
        part.reach(0)
        try:
            yield part
        except BaseException:
            upload.parts.pop(part.part_id, None)
            raise

    async def add(self, caller: Caller, part: FilePart, chunks: AsyncIterable[bytes]) -> float:
        """Take over the bytes of a part; the time.

        Raises:
            ServiceError: UNKNOWN_FILE, UNSUPPORTED, LIMIT_EXCEEDED, INVALID_ARGUMENT.
        """
        upload = self._pending(caller, part.upload.upload_id)
        path, size = self._folder / upload.upload_id / part.part_id, 0
        stream = await asyncio.to_thread(path.open, "wb")
        try:
            async for chunk in chunks:
                size += len(chunk)
                part.reach(size)
                await asyncio.to_thread(stream.write, chunk)
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise
        finally:
            stream.close()
        return time.time()

    async def complete(self, caller: Caller, upload_id: str, part_ids: list[str], md5: str = "") -> Upload:
        """Put the parts together, in this order, and check the file; a complete one again changes nothing.

        Raises:
            ServiceError: UNKNOWN_FILE, UNSUPPORTED, INVALID_ARGUMENT, LIMIT_EXCEEDED, STORAGE_FULL.
        """
        if (done := self.get(caller, upload_id)).status == COMPLETED:
            return done
        upload = self._pending(caller, upload_id)
        unknown = [each for each in part_ids if each not in upload.parts]
        if unknown or len(set(part_ids)) < len(part_ids):
            raise invalid(f"{(unknown or part_ids)[0][:100]!r} is no part of this upload, or is twice", "part_ids")
        size = sum(upload.parts[each] for each in part_ids)
        if size != upload.size_bytes:
            raise invalid(f"the parts have {size} bytes, and {upload.size_bytes} were announced", "part_ids")
        folder = self._folder / upload_id
        if md5 and md5.lower() != await asyncio.to_thread(_md5, [folder / each for each in part_ids]):
            raise invalid("the parts have another MD5", "md5")
        chunks = chunks_of([folder / each for each in part_ids])
        upload.file = await self._files.create(caller, upload.described, chunks, upload_id, upload.arrival)
        await self._drop(upload, COMPLETED)
        return upload

    async def cancel(self, caller: Caller, upload_id: str) -> Upload:
        """End an upload, and delete its parts.

        Raises:
            ServiceError: UNKNOWN_FILE, UNSUPPORTED.
        """
        upload = self._pending(caller, upload_id)
        await self._drop(upload, CANCELLED)
        return upload

    def _pending(self, caller: Caller, upload_id: str) -> Upload:
        upload = self.get(caller, upload_id)
        if upload.status == PENDING and upload.expires_at < time.time():
            upload.status = EXPIRED
        if upload.status != PENDING:
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED, f"the upload {upload_id} is {upload.status}", field="upload_id"
            )
        return upload

    async def _expire(self) -> None:
        for upload in [each for each in self._known.values() if each.expires_at < time.time()]:
            await self._drop(upload, EXPIRED)
            self._known.pop(upload.upload_id, None)

    async def _drop(self, upload: Upload, status: str) -> None:
        upload.status = status
        upload.expiry.cancel()
        upload.arrival.end()
        upload.parts.clear()
        ended = [each for each in self._known.values() if each.owner == upload.owner and each.status != PENDING]
        for each in ended[:-MAX_ENDED_OF_KEY]:
            del self._known[each.upload_id]
        await asyncio.to_thread(shutil.rmtree, self._folder / upload.upload_id, ignore_errors=True)


def _md5(paths: list[Path]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for path in paths:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _too_much(message: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, field="data")
