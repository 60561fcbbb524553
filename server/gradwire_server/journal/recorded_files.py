"""Recordings of runs for people to look at: batches as their losses saw them, and rollouts.

A recording is one file of ``recorded/RUN_ID/`` in the state folder: the length of its description, the description, its
content, and a digest of both, which earlier versions did not write. Nothing else depends on these files, so they are
not synced, and a backup leaves them out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.durable_files import make_folder
from gradwire_server.errors import ServiceError
from gradwire_server.journal.segments import Buffer

FOLDER = "recorded"
KINDS = ("batch", "rollouts")
LENGTH = struct.Struct("<I")
LEAST_BYTES = 16 << 10
"""Bytes that a file counts for at least: it bounds the number of files, and so the time to look through them."""


class RecordedFiles:
    """The recordings of a state folder. Its methods block.

    Args:
        most_bytes: Maximum bytes of one run's recordings; its oldest are deleted beyond that.
    """

    def __init__(self, state_dir: Path, most_bytes: int) -> None:
        self._root, self._most_bytes = state_dir / FOLDER, most_bytes
        self._lock = threading.Lock()  # two that write at once would count and delete each other's files

    def write(self, run_id: str, recording: pb.Recording, content: Sequence[Buffer]) -> bool:
        """Write a recording, in place of one of the same kind and number; False if it exceeds what a run may have."""
        recording.size_bytes = sum(memoryview(part).nbytes for part in content)
        if recording.size_bytes > self._most_bytes:
            return False
        folder = self._root / run_id
        file = folder / f"{recording.kind}-{recording.number:020d}"
        part = file.with_suffix(".part")
        head = recording.SerializeToString()
        with self._lock:
            make_folder(folder, 0o700)
            try:
                with part.open("wb") as written:
                    written.writelines([LENGTH.pack(len(head)), head, *content, _digest(head, *content)])
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
            self._bound(folder)
        return True

    def _bound(self, folder: Path) -> None:
        found = [(entry.stat(), entry.path) for entry in os.scandir(folder)]
        entries = sorted((stat.st_mtime_ns, max(stat.st_size, LEAST_BYTES), path) for stat, path in found)
        size = sum(each for _, each, _ in entries)
        for _, each, path in entries[:-1]:
            if size <= self._most_bytes:
                break
            os.unlink(path)
            size -= each

    def list(self, run_id: str) -> list[pb.Recording]:
        """The recordings of a run, the oldest first, without their tensors' descriptions."""
        recordings = []
        for file in sorted((self._root / run_id).glob("*-*")):
            if not file.suffix and (read := self._open(file, content=False)) is not None:
                recording = read[0]
                recording.ClearField("tensors")
                recording.ClearField("outputs")
                recordings.append(recording)
        return sorted(recordings, key=lambda each: (each.time, each.number))

    def read(self, run_id: str, kind: str, number: int) -> tuple[pb.Recording, bytes]:
        """A recording and its content.

        Raises:
            ServiceError: UNKNOWN_FILE if there is no such recording; CHECKPOINT_CORRUPT if it is damaged.
        """
        file = self._root / run_id / f"{kind}-{number:020d}"
        read = self._open(file) if kind in KINDS else None
        if read is None and not (kind in KINDS and file.exists()):
            message = (
                f"there is no recording {kind[:50]} {number} of {run_id}: it was not made, or a newer took its room"
            )
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_FILE, message, field="number")
        recording, head, rest = read or (pb.Recording(size_bytes=1), b"", b"")
        content, digest = rest[: recording.size_bytes], rest[recording.size_bytes :]
        if len(content) < recording.size_bytes or digest not in (b"", _digest(head, content)):
            message = f"the recording {kind} {number} of {run_id} is damaged: {FOLDER}/{run_id}/{file.name}"
            raise ServiceError(pb.ERROR_CODE_CHECKPOINT_CORRUPT, message, field="number")
        return recording, content

    @staticmethod
    def _open(file: Path, *, content: bool = True) -> tuple[pb.Recording, bytes, bytes] | None:
        """A description, its bytes and what follows; None for a file that is gone, or whose description is damaged."""
        try:
            with file.open("rb") as opened:
                (length,) = LENGTH.unpack(opened.read(LENGTH.size))
                if len(head := opened.read(length)) < length:
                    return None
                return pb.Recording.FromString(head), head, opened.read() if content else b""
        except (FileNotFoundError, struct.error, DecodeError):
            return None

    def delete(self, run_id: str) -> None:
        """Delete the recordings of a run."""
        shutil.rmtree(self._root / run_id, ignore_errors=True)


def _digest(*parts: Buffer) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.digest()
