"""Atomic files: written to a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def whole_file(path: Path | str) -> Iterator[BinaryIO]:
    """Yield a file that gets its name when the block ends, and is removed if the block fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_tar(folder: Path, to: Path) -> None:
    """Write the files below a folder to a tar file: the same files give the same bytes."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o644
        return entry

    with whole_file(to) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            archive.add(path, path.relative_to(folder).as_posix(), filter=plain)


def replace_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON file such that a crash leaves the old or the new one."""
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=indent).encode())


def replace_state(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON object with its checksum, as :func:`replace_json` writes."""
    plain = json.loads(json.dumps(content))
    replace_json(path, plain | {"checksum": _checksum(plain)}, indent)


def read_state(path: Path) -> dict[str, Any]:
    """Read what :func:`replace_state` wrote, or a JSON object without a checksum.

    Raises:
        ValueError: It is neither; names the file.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON, {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is no JSON object")
    if "checksum" in content and content.pop("checksum") != _checksum(content):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
