"""A checkpoint's name, and its manifest: what its folder holds, and the checks that it still does.

The manifest holds each file's size and BLAKE2b-256, the run's configuration, and its progress.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from gradwire_proto.v1 import training_pb2

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ORIGIN = "fork-origin"
"""Folder name, among a fork's checkpoints, of its copy of the checkpoint from which it started."""
AUTOMATIC = "auto-"
"""Name prefix of automatic checkpoints."""
SNAPSHOT = "snapshot."
"""Name prefix of weights that a door keeps for a sampler and deletes itself; they are counted apart."""
MANIFEST = "manifest.json"
SUMS = ".checksums.json"
"""Size and checksum of each file of an export, beside them."""
_BLOCK = 8 << 20


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing, torn or changed; says which, and how."""


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and BLAKE2b-256 (hex) of a checkpoint's file."""

    size: int
    blake2b: str

    @classmethod
    def of(cls, file: Path) -> StoredFile:
        """Read a file."""
        state, size = hashlib.blake2b(digest_size=32), 0
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                state.update(block)
                size += len(block)
        return cls(size, state.hexdigest())

    def check(self, file: Path) -> None:
        """Compare a file with what was stored, byte by byte.

        Raises:
            DamagedCheckpoint: It differs.
        """
        try:
            size = file.stat().st_size
            if size != self.size:
                raise DamagedCheckpoint(f"{file.name} has {size} bytes and had {self.size} when it was saved")
            same = StoredFile.of(file) == self
        except FileNotFoundError:  # also of a checkpoint that is deleted at this moment
            raise DamagedCheckpoint(f"{file.name} is missing") from None
        if not same:
            raise DamagedCheckpoint(f"{file.name} has changed since it was saved: its checksum does not match")


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint.

    Attributes:
        name: Its name within the run.
        step: Optimizer steps taken.
        seq: Newest operation that it includes, which is the save itself.
        created_at: Unix time in seconds.
        versions: Versions of the code that wrote it.
        weights_only: Whether it holds weights alone, and not the whole state of the run.
        format: Number of the form that it is written in.
    """

    run_id: str
    name: str
    step: int
    seq: int
    created_at: float
    note: str
    config: training_pb2.RunConfig
    versions: Mapping[str, str]
    files: Mapping[str, StoredFile]
    weights_only: bool = False
    format: int = 1

    @property
    def path(self) -> str:
        return f"{self.run_id}/{self.name}"

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_proto(self) -> training_pb2.Checkpoint:
        return training_pb2.Checkpoint(
            path=self.path,
            name=self.name,
            step=self.step,
            seq=self.seq,
            size_bytes=self.size_bytes,
            created_at=self.created_at,
            note=self.note,
            weights_only=self.weights_only,
        )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint's folder.

    Raises:
        FileNotFoundError: There is no such folder.
        DamagedCheckpoint: The manifest is missing or cannot be read.
    """
    file = folder / MANIFEST
    try:
        content = read_sealed(file)
        return Manifest(
            run_id=content["run_id"],
            name=content["name"],
            step=content["step"],
            seq=content["seq"],
            created_at=content["created_at"],
            note=content["note"],
            config=json_format.ParseDict(content["config"], training_pb2.RunConfig()),
            versions=content["versions"],
            files={name: StoredFile(**stored) for name, stored in content["files"].items()},
            weights_only=content.get("weights_only", False),
            format=content.get("format", 1),
        )
    except FileNotFoundError:
        if folder.exists():
            raise DamagedCheckpoint(f"{MANIFEST} is missing") from None
        raise
    except (ValueError, KeyError, TypeError, AttributeError, json_format.ParseError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from error


def write_sums(folder: Path) -> None:
    """Write the sizes and checksums of an export's files beside them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    (folder / SUMS).write_text(sealed({str(path.relative_to(folder)): asdict(StoredFile.of(path)) for path in files}))


def check_files(folder: Path, kind: str, only: str = "") -> None:
    """Compare the files of a checkpoint's or an export's folder with what was stored, byte by byte.

    Args:
        kind: ``"checkpoints"`` or ``"exports"``. Without a manifest, or checksums, which exports of earlier versions do
            not have, there is nothing to compare with.
        only: A file that is enough.

    Raises:
        DamagedCheckpoint: One differs, or is missing.
    """
    if not (folder / (MANIFEST if kind == "checkpoints" else SUMS)).exists():
        return
    if kind == "checkpoints":
        files = read_manifest(folder).files
    else:
        try:
            files = {name: StoredFile(**stored) for name, stored in read_sealed(folder / SUMS).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{SUMS} cannot be read: {error}") from error
    for name, stored in files.items():
        if only in ("", name):
            stored.check(folder / name)


def sealed(content: Any) -> str:
    """JSON of a content with its digest, as :func:`read_sealed` reads it."""
    return json.dumps({"content": content, "blake2b": _digest(content)}, indent=1)


def read_sealed(file: Path) -> Any:
    """The content of a file that was written with :func:`sealed`.

    Raises:
        ValueError, KeyError, TypeError: It is not what was written.
    """
    return unsealed(file.read_bytes())


def unsealed(content: bytes) -> Any:
    """The content of what :func:`sealed` gave.

    Raises:
        ValueError, KeyError, TypeError: It is not.
    """
    raw = json.loads(content)
    if raw["blake2b"] != _digest(raw["content"]):
        raise ValueError("its checksum does not match")
    return raw["content"]


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()
