"""The version of the code, which a server and the engines on other machines must share."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("gradwire_server", "gradwire_losses", "gradwire_proto")


@functools.cache
def code_version() -> str:
    """Version of gradwire, with a digest of its modules: between two commits the version is the same."""
    state = hashlib.blake2b(digest_size=6)
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec is not None else None) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                state.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return f"{version('gradwire')} ({state.hexdigest()})"
