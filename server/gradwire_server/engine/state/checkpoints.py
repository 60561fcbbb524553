"""Checkpoints: folders of safetensors files with a manifest to verify them, in a store. Nothing is ever unpickled."""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch
from google.protobuf import json_format
from gradwire_proto.v1 import training_pb2
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradwire_server.checkpoint_files import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    StoredFile,
    read_manifest,
    sealed,
    write_sums,
)
from gradwire_server.crash_points import crash_point
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.placement import whole_tensors
from gradwire_server.stores.store import CHECKPOINTS, EXPORTS, PASSED, Place, Store, passing_place, saved_place

T = TypeVar("T")

FORMAT = 2
"""Until 1 the tensors of a run's own head were called ``head.``, as those of a model may be."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def versions() -> dict[str, str]:
    """Versions of the packages on which a bit-for-bit continuation depends."""
    by_package = {"torch": str(torch.__version__)}
    for package in ("gradwire", "transformers", "peft"):
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_package[package] = "unknown"
    return by_package


class CheckpointStore:
    """The checkpoints and exports in a store, as an engine reads and writes them.

    Attributes:
        fences: Number under which each run is written, by run id (:meth:`.Store.fence`).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.fences: dict[str, int] = {}

    def place(self, path: str) -> Place:
        """The place of ``"RUN_ID/NAME"``.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, for anything that is not such a path.
        """
        run_id, _, name = path.partition("/")
        if not (NAME.fullmatch(run_id) and NAME.fullmatch(name)):
            raise _unknown(path)
        return saved_place(run_id, CHECKPOINTS, name)

    @contextmanager
    def exporting(self, run_id: str, name: str) -> Iterator[Path]:
        """Provide an empty folder that becomes an export, as :meth:`.Store.replacing`."""
        with self._replacing(_named(run_id, EXPORTS, name)) as folder:
            yield folder
            write_sums(folder)

    def has(self, path: str) -> bool:
        """Whether ``"RUN_ID/NAME"`` exists, valid or not."""
        try:
            return self._store.has(self.place(path))
        except OperationError:
            return False

    def manifest(self, path: str) -> Manifest:
        """The manifest of ``"RUN_ID/NAME"``."""
        for again in (True, False):  # it may be replaced at this moment
            try:
                with self._store.reading(self.place(path), MANIFEST) as folder:
                    return read_manifest(folder)
            except FileNotFoundError:
                raise _unknown(path) from None
            except DamagedCheckpoint as error:
                if not again:
                    raise _corrupt(path, error) from error
        raise AssertionError

    def read(self, path: str, read: Callable[[Manifest], T]) -> T:
        """Return what ``read`` makes of the manifest of ``"RUN_ID/NAME"`` and the files that it describes.

        ``read`` is called again with the new manifest if another save replaced the checkpoint meanwhile.
        """
        while True:
            manifest = self.manifest(path)
            try:
                return read(manifest)
            except OperationError as error:
                corrupt = error.code == training_pb2.ERROR_CODE_CHECKPOINT_CORRUPT
                if not corrupt or self.manifest(path) == manifest:
                    raise

    def verify(self, path: str) -> Manifest:
        """Verify every byte of a checkpoint.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, or CHECKPOINT_CORRUPT naming the torn or changed file.
        """

        def check(manifest: Manifest) -> Manifest:
            try:
                for name, stored in manifest.files.items():
                    self._store.check(self.place(path), name, stored)
            except DamagedCheckpoint as error:
                raise _corrupt(path, error) from error
            return manifest

        return self.read(path, check)

    def passed(self, owner: str) -> dict[str, Tensor]:
        """The weights that another engine has put in the store, on the CPU.

        Raises:
            StoreError, FileNotFoundError: They cannot be read.
        """
        with self._store.reading(passing_place(owner)) as folder:
            return load_file(folder / PASSED)

    def load(self, path: str, name: str, manifest: Manifest) -> dict[str, Tensor]:
        """Verify and load the tensors of one file on the CPU; empty if the checkpoint has no such file."""
        stored = manifest.files.get(name)
        if stored is None:
            return {}
        try:
            with self._store.reading(self.place(path), name) as folder:
                stored.check(folder / name)
                tensors = load_file(folder / name)
                return tensors if manifest.format >= FORMAT else _with_names_of_heads(tensors, manifest.config)
        except FileNotFoundError:  # deleted at this moment
            raise _unknown(path) from None
        except DamagedCheckpoint as error:
            raise _corrupt(path, error) from error

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
        weights_only: bool = False,
    ) -> Manifest:
        """Write a checkpoint.

        Args:
            files: File name -> tensor name -> tensor; files without tensors are left out.
            weights_only: Whether ``files`` hold weights alone.

        Raises:
            OperationError: INVALID_ARGUMENT for a bad name, or ALREADY_EXISTS.
            StoreError: It cannot be written; no partial files remain.
        """
        place = _named(run_id, CHECKPOINTS, name)
        if not overwrite and self._store.has(place):
            raise OperationError(
                training_pb2.ERROR_CODE_ALREADY_EXISTS,
                f"run {run_id} has a checkpoint {name!r} already; choose another name, or save with overwrite=True",
                field="name",
            )
        with self._replacing(place) as folder:
            write_checkpoint(
                folder, files, run_id=run_id, name=name, config=config, step=step, seq=seq, note=note,
                weights_only=weights_only,
            )  # fmt: skip
        return self.manifest(f"{run_id}/{name}")

    @contextmanager
    def _replacing(self, place: Place) -> Iterator[Path]:
        with self._store.replacing(place, self.fences.get(place.owner.partition("/")[2], 0)) as folder:
            yield folder


def _with_names_of_heads(tensors: dict[str, Tensor], config: training_pb2.RunConfig) -> dict[str, Tensor]:
    """Tensors of a checkpoint of format 1 with the present names of the run's own head."""
    if not config.head:
        return tensors
    parted = ((key.rpartition("|"), tensor) for key, tensor in tensors.items())
    return {f"{of}{bar}{'.' * name.startswith('head.')}{name}": tensor for (of, bar, name), tensor in parted}


def _named(run_id: str, kind: str, name: str) -> Place:
    if not (NAME.fullmatch(run_id) and NAME.fullmatch(name)):
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"{run_id[:100]}/{name!r} is no name for {kind}: letters, digits, '.', '_' and '-', at most 100, "
            "beginning with a letter or digit",
            field="name",
            rule=NAME.pattern,
        )
    return saved_place(run_id, kind, name)


def write_checkpoint(
    folder: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    *,
    run_id: str,
    name: str,
    config: training_pb2.RunConfig,
    step: int = 0,
    seq: int = 0,
    note: str = "",
    weights_only: bool = False,
) -> None:
    """Write a checkpoint's files and manifest into an empty folder; arguments as for :meth:`CheckpointStore.save`."""
    stored = {}
    for file, tensors in files.items():
        if tensors:
            save_file(whole_tensors(tensors), folder / file)
            stored[file] = StoredFile.of(folder / file)
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
    } | ({"weights_only": True} if weights_only else {})
    (folder / MANIFEST).write_text(sealed(content))


def _unknown(path: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_UNKNOWN_CHECKPOINT,
        f"there is no checkpoint {path!r}; a checkpoint is named 'RUN_ID/NAME'",
        field="checkpoint",
        rule="RUN_ID/NAME of a saved checkpoint",
    )


def _corrupt(path: str, damage: DamagedCheckpoint) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_CHECKPOINT_CORRUPT,
        f"checkpoint {path!r} is damaged and was not loaded: {damage}",
        field="checkpoint",
    )
