"""Upload of weights from a local folder: a PEFT adapter, or a whole Hugging Face model."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import InvalidArgumentError, PayloadCorruptError
from gradwire.wire.streams import CHUNK_BYTES
from gradwire.wire.transport import Transport

logger = logging.getLogger("gradwire")

ATTEMPTS = 3
"""Times that a file is sent which arrives damaged."""
BLOCK = 8 << 20
MAX_HEADER_BYTES = 100 << 20
"""Limit of a file's header in safetensors itself."""
NAMES = {
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "model": ("config.json", "model*.safetensors", "model.safetensors.index.json"),
}
"""The files of each kind that are sent; the first two patterns are required."""
PICKLED = {"adapter": "adapter_model.bin", "model": "pytorch_model*.bin"}

Kind = Literal["adapter", "model"]


@dataclass(frozen=True)
class Upload:
    """Weights on the server that runs can start from; ``create_run(from_adapter=upload)``.

    Attributes:
        upload_id: Its id.
        kind: ``"adapter"`` or ``"model"``.
        base_model: The model of the server that the weights are for.
        lora: ``rank``, ``alpha``, ``dropout`` and ``target_modules`` of an adapter; None for a whole model.
        size_bytes: Size of its files.
        received_bytes: Bytes that have arrived.
        ready: Whether it is complete.
        created_at: Unix time in seconds.
        owner: Name of the key that began it; empty on a server without keys.
        warnings: Warnings for people, one sentence each.
    """

    upload_id: str
    kind: str
    base_model: str
    lora: Mapping[str, Any] | None
    size_bytes: int
    received_bytes: int
    ready: bool
    created_at: float
    owner: str = ""
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_message(upload: pb.Upload) -> Upload:
        lora = None
        if upload.HasField("lora"):
            lora = {
                "rank": upload.lora.rank,
                "alpha": upload.lora.alpha,
                "dropout": upload.lora.dropout,
                "target_modules": list(upload.lora.target_modules),
            }
        return Upload(
            upload_id=upload.upload_id,
            kind=upload.kind,
            base_model=upload.base_model,
            lora=lora,
            size_bytes=upload.size_bytes,
            received_bytes=sum(file.received_bytes for file in upload.files),
            ready=upload.ready,
            created_at=upload.created_at,
            owner=upload.owner,
            warnings=tuple(upload.warnings),
        )


async def upload(transport: Transport, kind: Kind, path: str | os.PathLike[str], base_model: str) -> Upload:
    """Send a folder, or the rest of it if a part has arrived before; nothing if all of it has.

    Raises:
        InvalidArgumentError: The folder lacks a file, or does not fit the base model.
    """
    folder = Path(path)
    files = await asyncio.to_thread(_files, kind, folder)
    request = pb.BeginUploadRequest(kind=kind, base_model=base_model, files=files)
    for attempt in range(ATTEMPTS):
        begun = await transport.unary(lambda stub: stub.BeginUpload, request, timeout_s=None)
        if not attempt:
            for warning in begun.warnings:
                logger.warning("%s: %s", folder, warning)
        for file in begun.files:
            await _send(transport, begun.upload_id, folder, file)
        try:
            finish = pb.FinishUploadRequest(upload_id=begun.upload_id)
            return Upload.from_message(await transport.unary(lambda stub: stub.FinishUpload, finish, timeout_s=None))
        except PayloadCorruptError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the loop returns or raises")


def as_upload_id(source: str | os.PathLike[str] | Upload) -> str | None:
    """The id of an upload that was given as such; None for a path."""
    if isinstance(source, Upload):
        return source.upload_id
    named = isinstance(source, str) and source.startswith("upload-") and not Path(source).exists()
    return str(source) if named else None


def _files(kind: Kind, folder: Path) -> list[pb.UploadFile]:
    if not folder.is_dir():
        raise _wrong(f"there is no folder {str(folder)!r}")
    first, weights, *others = NAMES[kind]
    required = [(pattern, sorted(folder.glob(pattern))) for pattern in (first, weights)]
    for pattern, matching in required:
        if not matching:
            hint = ""
            if pattern == first and any((folder / NAMES[other][0]).exists() for other in NAMES):
                hint = f": from_{'checkpoint takes whole models' if kind == 'adapter' else 'adapter takes adapters'}"
            elif pattern == weights and any(folder.glob(PICKLED[kind])):
                hint = f"; {PICKLED[kind]} is a pickle, which is never loaded: save it again with safetensors"
            raise _wrong(f"{folder} has no {pattern}{hint}")
    names = [file for _, matching in required for file in matching]
    return [_describe(file) for file in names + [file for name in others for file in folder.glob(name)]]


def _describe(file: Path) -> pb.UploadFile:
    if not file.is_file():
        raise _wrong(f"{file} is no file, nor a link to one")
    digest, size = hashlib.blake2b(digest_size=32), 0
    with file.open("rb") as stream:
        if file.suffix == ".json":
            head = stream.read()
        else:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise _wrong(f"{file} is no safetensors file")
            head = stream.read(length)
        stream.seek(0)
        while block := stream.read(BLOCK):
            digest.update(block)
            size += len(block)
    return pb.UploadFile(name=file.name, size_bytes=size, digest=digest.digest(), head=head)


async def _send(transport: Transport, upload_id: str, folder: Path, file: pb.UploadFile) -> None:
    if file.received_bytes >= file.size_bytes:
        return
    with (folder / file.name).open("rb") as stream:
        offset = file.received_bytes
        while offset < file.size_bytes:
            stream.seek(offset)
            chunk = await asyncio.to_thread(stream.read, min(CHUNK_BYTES, file.size_bytes - offset))
            if not chunk:
                raise _wrong(f"{folder / file.name} has become shorter while it was sent")
            request = pb.WriteUploadRequest(upload_id=upload_id, file=file.name, offset=offset, chunk=chunk)
            offset = (await transport.unary(lambda stub: stub.WriteUpload, request)).received_bytes


def _wrong(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, field="path")
