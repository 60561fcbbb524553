"""Files of training data: stored once by digest, checked when they arrive, owned, counted, and expiring when asked.

Every upload is a file of its own with an id of its own; files of equal content share one copy on disk. A row refers to
content that is on disk; content without a row is deleted at the next start.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from gradwire_http.child_processes import start_process
from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.key_file import Quota
from gradwire_server.access.keys import Caller
from gradwire_server.access.quotas import check_files
from gradwire_server.access.turns import Turns
from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.durable_files import is_full, make_folder, sync
from gradwire_server.errors import ServiceError, check_length, invalid, key_reused, limit_exceeded, unknown_file
from gradwire_server.journal.job_records import FileRecords

log = logging.getLogger(__name__)

T = TypeVar("T")

DATA = "fine-tune"
PURPOSES = (DATA, "fine-tune-results", "script")
CHECK_S = 600.0
"""Seconds that the check of a file's lines may take once its turn has come."""
CHECKS_AT_ONCE = 2
MAX_PAGE = 10_000
MAX_FILENAME_CHARS = 255
LATEST_S = 253_402_300_800.0


class Arrival:
    """The bytes of one upload, which count against its key's quota until it is a file or has ended.

    Args:
        grow: Counts so many more bytes, which may be negative.
    """

    def __init__(self, grow: Callable[[int], None]) -> None:
        self._grow, self._size = grow, 0

    def reach(self, size: int) -> None:
        """Count this many bytes of the upload, unless more of them are counted already.

        Raises:
            ServiceError: LIMIT_EXCEEDED.
        """
        if size > self._size:
            more, self._size = size - self._size, size
            self._grow(more)

    def end(self) -> None:
        """Count nothing any more."""
        gone, self._size = self._size, 0
        self._grow(-gone)


class Files:
    """The files of a state folder.

    Args:
        quota_of: Returns the present quota of a key.
        in_use: Returns the id of a job that still needs a file; "" if none does.
    """

    def __init__(
        self,
        config: ServerConfig,
        records: FileRecords,
        quota_of: Callable[[str], Quota],
        in_use: Callable[[str], str],
    ) -> None:
        self._folder, self._limits = config.state_dir / "files", config.limits
        self._records, self._quota_of, self._in_use = records, quota_of, in_use
        self._known: dict[str, jobs.File] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._damaged: set[bytes] = set()
        self._arriving: Counter[str] = Counter()
        self._storing = asyncio.Lock()
        self._checks = Turns(of_key=1, total=CHECKS_AT_ONCE)

    async def load(self) -> None:
        """Read the rows, and delete content that belongs to none."""
        for file, key in await self._records.load():
            self._add(file, key)
        await asyncio.to_thread(self._sweep)
        await self._expire()

    def arrival(self, caller: Caller) -> Arrival:
        """A new upload of a key's; its caller ends it."""

        def grow(more: int) -> None:
            self._arriving[caller.name] += more
            if more > 0:
                self._check_room(caller)

        return Arrival(grow)

    @contextlib.contextmanager
    def arriving(self, caller: Caller) -> Iterator[Arrival]:
        """A new upload of a key's, which ends with the context."""
        arrival = self.arrival(caller)
        try:
            yield arrival
        finally:
            arrival.end()

    async def create(
        self,
        caller: Caller,
        described: jobs.File,
        chunks: AsyncIterable[bytes],
        idempotency_key: str = "",
        arrival: Arrival | None = None,
    ) -> jobs.File:
        """Store a file and check its lines, or return the one that this idempotency key has already made.

        It is on disk when this returns.

        Args:
            arrival: The upload that brings it; by default a new one.

        Raises:
            ServiceError: INVALID_ARGUMENT, LIMIT_EXCEEDED, STORAGE_FULL; ALREADY_EXISTS if the key made a file with
                other content, name or purpose.
        """
        self.check(described, idempotency_key)
        await self._expire()
        if (known := self._made(caller, idempotency_key)) is not None:
            digest = hashlib.sha256()
            async for chunk in chunks:  # the client is still sending
                await asyncio.to_thread(digest.update, chunk)
            return _same(known, described, digest.digest())
        file = jobs.File(
            file_id=new_id("file-"), owner=caller.name, filename=described.filename, purpose=described.purpose,
            created_at=time.time(), expires_at=described.expires_at,
        )  # fmt: skip
        partial = self._folder / f".{file.file_id}"
        arrival = arrival or self.arrival(caller)
        try:
            await self._receive(file, partial, chunks, arrival)
            if file.purpose == DATA:
                async with self._checks.turn(caller.name):
                    await _check_lines(partial, file)
            async with self._storing:
                if (known := self._made(caller, idempotency_key)) is not None:
                    return _same(known, described, file.digest)
                self._check_room(caller)  # of the number of files as well
                await asyncio.to_thread(_keep, partial, self._content(file))
                if file.digest in self._damaged:
                    self._damaged.remove(file.digest)
                    for each in self._of_digest(file.digest):
                        each.num_problems -= 1
                        del each.problems[-1]
                await self._records.insert(file, idempotency_key)
                self._add(file, idempotency_key)
                arrival.end()
        finally:
            arrival.end()
            await asyncio.to_thread(partial.unlink, missing_ok=True)
        return file

    def get(self, caller: Caller, file_id: str, field: str = "file_id") -> jobs.File:
        """Return a file.

        Raises:
            ServiceError: UNKNOWN_FILE, also for one of another key.
        """
        file = self._known.get(file_id)
        if file is None or _expired(file) or (caller.name != file.owner and not caller.sees_all):
            raise unknown_file(file_id, field)
        return file

    def page(
        self, caller: Caller, limit: int, after: str = "", purpose: str = "", *, oldest_first: bool = False
    ) -> tuple[list[jobs.File], bool]:
        """List files behind the file ``after``, newest first unless asked otherwise, and whether there are more."""
        mine = [
            file
            for file in self._known.values()
            if file.owner == caller.name and not _expired(file) and purpose in ("", file.purpose)
        ]
        if not oldest_first:
            mine.reverse()
        return page_of(mine, [file.file_id for file in mine], limit or MAX_PAGE, after, "after")

    async def delete(self, caller: Caller, file_id: str) -> None:
        """Delete a file.

        Raises:
            ServiceError: UNKNOWN_FILE; UNSUPPORTED while a job needs it.
        """
        file = self.get(caller, file_id)
        if job_id := self._in_use(file_id):
            message = f"the job {job_id} trains on {file_id}: cancel it, or wait for its end"
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="file_id")
        async with self._storing:
            await self._drop([file])

    async def content(self, caller: Caller, file_id: str) -> AsyncGenerator[bytes]:
        """Yield a file's content in chunks, all of which is checked first.

        Raises:
            ServiceError: As :meth:`check_content` does.
        """
        file = await self.check_content(caller, file_id)
        async with contextlib.aclosing(chunks_of([self._content(file)])) as chunks:
            async for chunk in chunks:
                yield chunk

    async def check_content(self, caller: Caller, file_id: str) -> jobs.File:
        """Check that a file is what was uploaded, by its SHA-256, and return it; one that is not has a problem then.

        Raises:
            ServiceError: UNKNOWN_FILE; CHECKPOINT_CORRUPT if it is not.
        """
        file = self.get(caller, file_id)
        if reason := await asyncio.to_thread(damage, self._content(file), file):
            if file.digest not in self._damaged:
                self._damaged.add(file.digest)
                for each in self._of_digest(file.digest):
                    each.num_problems += 1
                    each.problems.add(reason=reason)
                log.error("%s is damaged on the server's disk: %s", self._content(file), reason)
            message = f"{file.filename} ({file_id}) is damaged on the server's disk: {reason}; upload it again"
            raise ServiceError(pb.ERROR_CODE_CHECKPOINT_CORRUPT, message, field="file_id")
        return file

    def check(self, described: jobs.File, key: str = "") -> None:
        """Check what is said of a file that is to come.

        Raises:
            ServiceError: INVALID_ARGUMENT, LIMIT_EXCEEDED.
        """
        if described.purpose not in PURPOSES:
            raise invalid(f"purpose is {described.purpose[:50]!r}; it must be one of {', '.join(PURPOSES)}", "purpose")
        name = described.filename
        if not name or len(name) > MAX_FILENAME_CHARS:
            raise invalid(f"a file has a name of 1 to {MAX_FILENAME_CHARS} characters", "file")
        if not name.isprintable():
            raise invalid("a file's name has no control characters", "file")
        if described.expires_at and not time.time() < described.expires_at < LATEST_S:
            raise invalid("expires_at is in the past, or beyond the year 9999", "expires_after")
        check_length(key, "max_name_chars", self._limits.max_name_chars, "idempotency_key")

    # ---- internals ----

    def _check_room(self, caller: Caller) -> None:
        """Check that what a key is sending fits beside what it has."""
        if len(self._known) >= self._limits.max_files:
            raise limit_exceeded(
                f"the server has {len(self._known)} files", "max_files", self._limits.max_files, "file"
            )
        size = sum(file.size_bytes for file in self._known.values() if file.owner == caller.name)
        check_files(size, self._arriving[caller.name], self._quota_of(caller.name), self._limits)

    async def _receive(self, file: jobs.File, to: Path, chunks: AsyncIterable[bytes], arrival: Arrival) -> None:
        await asyncio.to_thread(make_folder, self._folder, 0o700)
        digest, size, most = hashlib.sha256(), 0, self._limits.max_file_bytes
        stream = await asyncio.to_thread(to.open, "wb")
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > most:
                    raise limit_exceeded(f"the file has more than {most} bytes", "max_file_bytes", most, "file")
                arrival.reach(size)
                digest.update(chunk)
                await asyncio.to_thread(stream.write, chunk)
            await asyncio.to_thread(_flush, stream)
        except OSError as error:
            if not is_full(error):
                raise
            message = "the server's disk is full: the file was not stored"
            raise ServiceError(pb.ERROR_CODE_STORAGE_FULL, message) from error
        finally:
            stream.close()
        if not size:
            raise invalid("the file is empty", "file")
        file.size_bytes, file.digest = size, digest.digest()

    def _of_digest(self, digest: bytes) -> list[jobs.File]:
        return [file for file in self._known.values() if file.digest == digest]

    def _content(self, file: jobs.File) -> Path:
        return self._folder / file.digest.hex()

    def _add(self, file: jobs.File, key: str) -> None:
        self._known[file.file_id] = file
        if key:
            self._by_key[file.owner, key] = file.file_id

    def _made(self, caller: Caller, key: str) -> jobs.File | None:
        file = self._known.get(self._by_key.get((caller.name, key), "")) if key else None
        return None if file is None or _expired(file) else file

    async def _expire(self) -> None:
        """Delete the files whose time is over and which no job needs."""
        if any(map(_expired, self._known.values())):
            async with self._storing:
                over = filter(_expired, self._known.values())
                await self._drop([file for file in over if not self._in_use(file.file_id)])

    async def _drop(self, files: list[jobs.File]) -> None:
        await self._records.delete([file.file_id for file in files])
        for file in files:
            self._known.pop(file.file_id, None)
        self._by_key = {key: file_id for key, file_id in self._by_key.items() if file_id in self._known}
        used = {file.digest for file in self._known.values()}
        for file in files:
            if file.digest not in used:
                await asyncio.to_thread(self._content(file).unlink, missing_ok=True)

    def _sweep(self) -> None:
        used = {file.digest.hex() for file in self._known.values()}
        for path in self._folder.glob("*") if self._folder.exists() else ():
            if path.name not in used:
                path.unlink()


def page_of(items: list[T], ids: list[str], limit: int, after: str, field: str) -> tuple[list[T], bool]:
    """Return at most ``limit`` items behind the one with the id ``after``, and whether there are more.

    Raises:
        ServiceError: INVALID_ARGUMENT for an id that is not in the list.
    """
    start = 0
    if after:
        if after not in ids:
            raise invalid(f"after is {after[:100]!r}, which is not in this list", field)
        start = ids.index(after) + 1
    return items[start : start + limit], len(items) > start + limit


async def _check_lines(path: Path, file: jobs.File) -> None:
    """Fill in what a process of bounded memory says of a file's lines."""
    process = await start_process(
        sys.executable, "-m", "gradwire_jobs.check", str(path), file.filename,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(CHECK_S):
            report, _ = await process.communicate()
        found = json.loads(report)
        file.num_lines, file.num_problems = found["lines"], found["num_problems"]
        for line, reason in found["problems"]:
            file.problems.add(line=line, reason=reason)
    except (ValueError, KeyError, TypeError, TimeoutError):
        log.warning("the file %s could not be checked: exit code %s", file.file_id, process.returncode)
        file.num_problems = 1
        file.problems.add(line=0, reason="the file could not be read within the server's limits of time and memory")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _flush(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _keep(partial: Path, content: Path) -> None:
    """Give received content its name, in place of an earlier copy, which may be damaged; it is on disk then."""
    partial.rename(content)
    sync(content.parent)


def damage(content: Path, file: jobs.File) -> str:
    """Describe the damage to a file's content; "" if there is none."""
    try:
        with content.open("rb") as stream:
            same = hashlib.file_digest(stream, "sha256").digest() == file.digest
    except FileNotFoundError:
        return "its content is missing"
    return "" if same else "its SHA-256 is not that of what was uploaded"


def _same(known: jobs.File, described: jobs.File, digest: bytes) -> jobs.File:
    """The file that a key has made, if it is asked for again; when it expires is counted from its first request."""
    if (known.digest, known.filename, known.purpose) != (digest, described.filename, described.purpose):
        raise key_reused(f"the file {known.file_id}", "content")
    return known


def _expired(file: jobs.File) -> bool:
    return 0 < file.expires_at <= time.time()


def new_id(prefix: str) -> str:
    """A random id."""
    return prefix + base64.b32encode(secrets.token_bytes(15)).decode().lower()


async def chunks_of(paths: list[Path]) -> AsyncGenerator[bytes]:
    """Yield the content of files, one after the other."""
    for path in paths:
        stream = await asyncio.to_thread(path.open, "rb")
        try:
            while chunk := await asyncio.to_thread(stream.read, CHUNK_BYTES):
                yield chunk
        finally:
            stream.close()
