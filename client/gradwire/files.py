"""Files of the server that jobs train on: ``service.files``."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradwire_proto.v1 import jobs_pb2 as pb

from gradwire.errors import InvalidArgumentError
from gradwire.wire.streams import CHUNK_BYTES
from gradwire.wire.transport import Transport

PathLike = os.PathLike[str]


@dataclass(frozen=True)
class FileInfo:
    """A file of training data on the server.

    Attributes:
        file_id: The file's id.
        filename: Name of the file that was uploaded.
        purpose: ``"fine-tune"``, or ``"fine-tune-results"`` for what a job made.
        size_bytes: Size of its content.
        sha256: Of its content, in hex.
        created_at: Unix time in seconds.
        expires_at: Unix time at which it is deleted; 0: never.
        num_lines: Rows of a data set.
        num_problems: Rows that no recipe can use.
        problems: The first of them, by line, with the reason; 20 at most.
    """

    file_id: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: float
    expires_at: float
    num_lines: int
    num_problems: int
    problems: Mapping[int, str] = field(default_factory=dict)
    sha256: str = ""

    @property
    def problems_text(self) -> str:
        """How many rows no recipe can use, and the first of them with the reason; empty if all can be used."""
        if not self.num_problems:
            return ""
        first = list(self.problems.items())[:3]
        said = "; ".join(f"line {line}: {reason}" if line else reason for line, reason in first)
        return f"{self.num_problems} of {self.num_lines} rows cannot be used: {said}" if self.num_lines else said

    @staticmethod
    def from_message(file: pb.File) -> FileInfo:
        return FileInfo(
            file_id=file.file_id,
            filename=file.filename,
            purpose=file.purpose,
            size_bytes=file.size_bytes,
            created_at=file.created_at,
            expires_at=file.expires_at,
            num_lines=file.num_lines,
            num_problems=file.num_problems,
            problems={problem.line: problem.reason for problem in file.problems},
            sha256=file.digest.hex(),
        )


class Files:
    """The files of your key on a server: ``service.files``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def upload(
        self,
        path: str | PathLike,
        purpose: str = "fine-tune",
        expires_after: float | None = None,
        idempotency_key: str = "",
    ) -> FileInfo:
        """Upload a file; the server checks its lines, and says in ``problems`` which ones no recipe can use.

        Args:
            path: A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file.
            purpose: ``"fine-tune"`` for data; ``"fine-tune-results"`` and ``"script"`` are not checked.
            expires_after: Seconds after which the server deletes it; None: never.
            idempotency_key: The same key again, with the same content, name and purpose, returns the file that it made.

        Raises:
            AlreadyExistsError: The key made another file.
            InvalidArgumentError: There is no such file.
            LimitExceededError: It is larger than the server or the key's quota allows.
        """
        source = Path(path)
        if not await asyncio.to_thread(source.is_file):
            raise InvalidArgumentError(f"there is no file {str(source)!r}", field="path")
        described = pb.File(filename=source.name, purpose=purpose)
        if expires_after is not None:
            described.expires_at = time.time() + expires_after
        first = pb.UploadFileFrame(file=described, idempotency_key=idempotency_key or secrets.token_hex(16))

        async def frames() -> AsyncIterator[pb.UploadFileFrame]:
            yield first
            with await asyncio.to_thread(source.open, "rb") as stream:
                while chunk := await asyncio.to_thread(stream.read, CHUNK_BYTES):
                    yield pb.UploadFileFrame(chunk=chunk)

        return FileInfo.from_message(await self._transport.upload_file(frames))

    async def get(self, file_id: str) -> FileInfo:
        """Fetch what the server says of a file."""
        answer = await self._transport.job_call(lambda stub: stub.GetFile, pb.GetFileRequest(file_id=file_id))
        return FileInfo.from_message(answer)

    async def list(self) -> Sequence[FileInfo]:
        """List the files of your key, newest first."""
        request = pb.ListFilesRequest()
        answer = await self._transport.job_call(lambda stub: stub.ListFiles, request)
        return [FileInfo.from_message(file) for file in answer.files]

    async def delete(self, file_id: str) -> None:
        """Delete a file; one that a job needs is refused."""
        await self._transport.job_delete(lambda stub: stub.DeleteFile, pb.DeleteFileRequest(file_id=file_id))

    async def download(self, file_id: str, path: str | PathLike) -> Path:
        """Write a file's content to ``path``."""
        target = Path(path)
        with await asyncio.to_thread(target.open, "wb") as stream:
            async for frame in self._transport.read_file(file_id):
                await asyncio.to_thread(stream.write, frame.chunk)
        return target
