"""Checkpoints on disk: folders of safetensors files with a manifest to verify them.

A folder exists completely or not at all (:mod:`.folders`). The manifest holds each file's size and BLAKE2b-256, the
run's configuration, and its progress. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format
from gradwire_proto.v1 import training_pb2
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradwire_server.crash_points import crash_point
from gradwire_server.durable_files import make_folder
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.placement import whole_tensors
from gradwire_server.engine.state.folders import replacing

MANIFEST = "manifest.json"
FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BLOCK = 8 << 20


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and BLAKE2b-256 (hex) of a checkpoint's file."""

    size: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint.

    Attributes:
        run_id: The run that saved it.
        name: Its name within the run.
        step: Optimizer steps taken.
        seq: Newest operation that it includes, which is the save itself.
        created_at: Unix time in seconds.
        note: The user's note.
        config: The run's configuration.
        versions: Versions of the code that wrote it.
        files: Stored files by name.
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
        )


def versions() -> dict[str, str]:
    """Versions of the packages on which a bit-for-bit continuation depends."""
    found = {"torch": str(torch.__version__)}
    for package in ("gradwire", "transformers", "peft"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


class CheckpointStore:
    """The checkpoints and exports in a state folder.

    Args:
        state_dir: Checkpoints are in ``runs/RUN_ID/checkpoints/NAME``, exports in ``runs/RUN_ID/exports/NAME``.
    """

    def __init__(self, state_dir: Path) -> None:
        self._runs = state_dir / "runs"

    def folder(self, path: str) -> Path:
        """The folder of ``"RUN_ID/NAME"``.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, for anything that is not such a path.
        """
        run_id, _, name = path.partition("/")
        if not (NAME.fullmatch(run_id) and NAME.fullmatch(name)):
            raise _unknown(path)
        return self._runs / run_id / "checkpoints" / name

    def export_folder(self, run_id: str, name: str) -> Path:
        """The folder of an export; its parent is created."""
        return self._named(run_id, "exports", name)

    def has(self, path: str) -> bool:
        """Whether the folder of ``"RUN_ID/NAME"`` exists, valid or not."""
        try:
            return self.folder(path).is_dir()
        except OperationError:
            return False

    def manifest(self, path: str) -> Manifest:
        """The manifest of ``"RUN_ID/NAME"``.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT or CHECKPOINT_CORRUPT.
        """
        file = self.folder(path) / MANIFEST
        try:
            raw = json.loads(file.read_bytes())
            content = raw["content"]
            if raw["blake2b"] != _content_digest(content):
                raise ValueError("its checksum does not match")
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
            )
        except FileNotFoundError:
            if file.parent.exists():
                raise _corrupt(path, MANIFEST, "is missing") from None
            raise _unknown(path) from None
        except (ValueError, KeyError, TypeError, json_format.ParseError) as error:
            raise _corrupt(path, MANIFEST, f"cannot be read: {error}") from error

    def verify(self, path: str) -> Manifest:
        """Verify every byte of a checkpoint.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, or CHECKPOINT_CORRUPT naming the torn or changed file.
        """
        manifest, folder = self.manifest(path), self.folder(path)
        for name, stored in manifest.files.items():
            _verify_file(path, folder / name, stored)
        return manifest

    def load(self, path: str, name: str, manifest: Manifest) -> dict[str, Tensor]:
        """Verify and load the tensors of one file on the CPU; empty if the checkpoint has no such file.

        Raises:
            OperationError: CHECKPOINT_CORRUPT.
        """
        stored = manifest.files.get(name)
        if stored is None:
            return {}
        file = self.folder(path) / name
        _verify_file(path, file, stored)
        return load_file(file)

    def save(
        self,
        run_id: str,
        name: str,
        files: Mapping[str, Mapping[str, Tensor]],
        *,
        config: training_pb2.RunConfig,
        step: int,
        seq: int,
        note: str = "",
        overwrite: bool = False,
    ) -> Manifest:
        """Write a checkpoint.

        Args:
            files: File name -> tensor name -> tensor; files without tensors are left out.

        Raises:
            OperationError: INVALID_ARGUMENT for a bad name, ALREADY_EXISTS, or STORAGE_FULL; no partial files remain.
        """
        place = self._named(run_id, "checkpoints", name)
        if place.exists() and not overwrite:
            raise OperationError(
                training_pb2.ERROR_CODE_ALREADY_EXISTS,
                f"run {run_id} has a checkpoint {name!r} already; choose another name, or save with overwrite=True",
                field="name",
            )
        with replacing(place) as folder:
            stored = {}
            for file, tensors in files.items():
                if tensors:
                    save_file(whole_tensors(tensors), folder / file)
                    stored[file] = _stored(folder / file)
                    crash_point("engine.inside_checkpoint")
            content = {
                "format": FORMAT,
                "run_id": run_id,
                "name": name,
                "step": step,
                "seq": seq,
                "created_at": time.time(),
                "note": note,
                "config": json_format.MessageToDict(config, preserving_proto_field_name=True),
                "versions": versions(),
                "files": {file: asdict(one) for file, one in stored.items()},
            }
            text = json.dumps({"content": content, "blake2b": _content_digest(content)}, indent=1)
            (folder / MANIFEST).write_text(text)
        return self.manifest(f"{run_id}/{name}")

    def _named(self, run_id: str, kind: str, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"{name!r} is no name for {kind}: letters, digits, '.', '_' and '-', at most 100, "
                "beginning with a letter or digit",
                field="name",
                rule=NAME.pattern,
            )
        parent = self._runs / run_id / kind
        make_folder(parent)
        return parent / name


def _stored(file: Path) -> StoredFile:
    state, size = hashlib.blake2b(digest_size=32), 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            state.update(block)
            size += len(block)
    return StoredFile(size, state.hexdigest())


def _content_digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


def _verify_file(path: str, file: Path, stored: StoredFile) -> None:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise _corrupt(path, file.name, "is missing") from None
    if size != stored.size:
        raise _corrupt(path, file.name, f"has {size} bytes and had {stored.size} when it was saved")
    if _stored(file) != stored:
        raise _corrupt(path, file.name, "has changed since it was saved: its checksum does not match")


def _unknown(path: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_UNKNOWN_CHECKPOINT,
        f"there is no checkpoint {path!r}; a checkpoint is named 'RUN_ID/NAME'",
        field="checkpoint",
        rule="RUN_ID/NAME of a saved checkpoint",
    )


def _corrupt(path: str, file: str, what: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_CHECKPOINT_CORRUPT,
        f"checkpoint {path!r} is damaged and was not loaded: {file} {what}",
        field="checkpoint",
    )
