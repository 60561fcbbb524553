"""The folders of uploads on disk.

An upload is a folder ``uploads/ID`` of the state folder. While it is received it holds ``upload.json`` and ``files/``,
whose sizes say how much has arrived; when it is finished the engine makes a checkpoint of the files, in the store, and
they go.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import json_format
from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.checkpoint_files import DamagedCheckpoint, StoredFile, read_sealed, sealed
from gradwire_server.durable_files import is_full, make_folder, replace_text, sync, sync_tree
from gradwire_server.errors import ServiceError, invalid
from gradwire_server.stores.store import Store, StoreError, upload_files

log = logging.getLogger(__name__)

DESCRIPTION, FILES = "upload.json", "files"


class UploadFolders:
    """The uploads of a state folder."""

    def __init__(self, state_dir: Path, store: Store) -> None:
        self._place, self._store = state_dir / "uploads", store

    def load(self) -> Iterator[journal_pb2.UploadDescription]:
        """Read the descriptions, and delete the folders whose description is missing or damaged."""
        for folder in sorted(self._place.glob("*")):
            try:
                content = read_sealed(folder / DESCRIPTION)
                described = json_format.ParseDict(content, journal_pb2.UploadDescription())
            except (OSError, ValueError, KeyError, TypeError, json_format.ParseError) as error:
                log.warning("the upload %s is deleted: its description cannot be read: %s", folder.name, error)
                self._delete(folder)
                continue
            yield described

    def create(self, described: journal_pb2.UploadDescription) -> None:
        """Make the folder of an upload; durable when it returns."""
        make_folder(self._place / described.upload.upload_id / FILES)
        self.describe(described)

    def describe(self, described: journal_pb2.UploadDescription) -> None:
        """Write the description of an upload; durable when it returns."""
        text = sealed(json_format.MessageToDict(described, preserving_proto_field_name=True))
        replace_text(self._place / described.upload.upload_id / DESCRIPTION, text)

    def received_bytes(self, upload_id: str, name: str) -> int:
        """Bytes of a file that have arrived."""
        return _size(self._place / upload_id / FILES / name)

    def append(self, upload_id: str, name: str, offset: int, chunk: bytes) -> int:
        """Add to a file what it does not have of a chunk, and return its size; a chunk behind its end adds nothing.

        Raises:
            ServiceError: STORAGE_FULL.
        """
        file = self._place / upload_id / FILES / name
        size = _size(file)
        try:
            if offset <= size < offset + len(chunk):
                with file.open("ab") as stream:
                    stream.write(chunk[size - offset :])
        except OSError as error:
            if not is_full(error):
                raise
            message = f"the server's disk is full: {name!r} was not written"
            raise ServiceError(pb.ERROR_CODE_STORAGE_FULL, message) from error
        return _size(file)

    def check(self, upload: pb.Upload) -> None:
        """Read the files, and put them on disk; one that is not what was announced is deleted, to be sent again.

        Raises:
            ServiceError: INVALID_ARGUMENT for incomplete files, PAYLOAD_CORRUPT for a digest that does not match.
        """
        folder = self._place / upload.upload_id / FILES
        for file in upload.files:
            try:
                StoredFile(file.size_bytes, file.digest.hex()).check(folder / file.name)
            except DamagedCheckpoint as error:
                if _size(folder / file.name) < file.size_bytes:
                    raise invalid(f"the upload is not complete: {file.name} has not arrived", "path") from error
                (folder / file.name).unlink(missing_ok=True)
                message = f"{file.name} did not arrive as it was announced; upload the folder again"
                raise ServiceError(pb.ERROR_CODE_PAYLOAD_CORRUPT, message, field="path") from error
        sync_tree(folder)

    def offer(self, upload_id: str) -> None:
        """Put the files, which were checked, where the engines read them.

        Raises:
            StoreError: The store cannot be used.
        """
        self._store.take(upload_files(upload_id), self._place / upload_id / FILES)

    def drop_files(self, upload_id: str) -> None:
        """Delete the files as they arrived, here and in the store."""
        shutil.rmtree(self._place / upload_id / FILES, ignore_errors=True)
        try:
            self._store.delete(upload_files(upload_id))
        except StoreError as error:
            log.error("the files of %s are no longer needed and still in the store: %s", upload_id, error)

    def last_change(self, upload_id: str) -> float:
        """Unix time at which the upload was begun or added to; now if it is being made or deleted."""
        folder = self._place / upload_id
        try:
            return max(place.stat().st_mtime for place in (folder / DESCRIPTION, *(folder / FILES).glob("*")))
        except FileNotFoundError:
            return time.time()

    def remove(self, upload_id: str) -> None:
        """Delete an upload; what a crash leaves of it is deleted at the next start."""
        folder = self._place / upload_id
        (folder / DESCRIPTION).unlink(missing_ok=True)
        self._delete(folder)
        sync(self._place)

    def _delete(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            self._store.delete_all(f"uploads/{folder.name}")
        except StoreError as error:
            log.error("%s was deleted and is still in the store (`gradwire repair` finds it): %s", folder.name, error)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
