"""Atomic files: written to a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
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


def replace_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON file such that a crash leaves the old or the new one."""
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=indent).encode())
