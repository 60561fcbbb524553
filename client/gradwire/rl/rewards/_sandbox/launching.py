"""Start the process of a policy's program: the commands to try, and the parts of the machine it may see."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = "import sys; sys.path.insert(0, sys.argv[2]); from _sandbox.program_main import main; main()"
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
START_COMMAND = "import sys; sys.path.insert(0, sys.argv[2]); from _sandbox.command_main import main; main()"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Command:
    """One way to start the process.

    Attributes:
        words: The command line.
        isolated: Whether it isolates the program; it fails where it cannot.
        before: Called first in the new process.
    """

    words: list[str]
    isolated: bool
    before: Callable[[], None] | None = None


def commands(limits: Mapping[str, Any]) -> Iterator[Command]:
    """List the commands, best first: bubblewrap if installed, our own namespaces, no isolation."""
    if sys.platform == "linux":
        bubblewrap = shutil.which("bwrap")
        if bubblewrap is not None:
            before = _one_user if os.getuid() != os.geteuid() else None
            yield Command(_in_bubblewrap(bubblewrap, limits), isolated=True, before=before)
        yield Command(_python(limits, isolate=True), isolated=True)
    yield Command(_python(limits), isolated=False)


def in_folder(command: Sequence[str], folder: str, work: str) -> list[str]:
    """Return the command line that runs a command in the sandbox: it can write to the folder alone.

    Args:
        work: The folder in which it starts, in that folder.
    """
    setup = {"command": list(command), "folder": folder, "work": work}
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", START_COMMAND, json.dumps(setup), package]


def _python(limits: Mapping[str, Any], *, isolate: bool = False, isolated: bool = False) -> list[str]:
    setup = {
        "limits": dict(limits),
        "isolate": isolate,
        "isolated": isolated,
        "folders": _folders(),
        "sys_path": _python_path(),
    }
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", START, json.dumps(setup), package]


def _in_bubblewrap(bubblewrap: str, limits: Mapping[str, Any]) -> list[str]:
    binds: list[str] = []
    for folder in _folders():
        if os.path.islink(folder):
            binds += ["--symlink", os.readlink(folder), folder]
        elif os.path.exists(folder):
            binds += ["--ro-bind", folder, folder]
    return [
        bubblewrap, "--unshare-all", "--unshare-user", *(["--share-net"] if limits["network"] else []),
        "--die-with-parent", "--cap-drop", "ALL",
        "--size", str(limits["file_bytes"]), "--tmpfs", "/tmp",  # first, as some of the folders may lie in it
        *binds, "--dev", "/dev", "--chdir", "/tmp", "--",
        *_python(limits, isolated=True),
    ]  # fmt: skip


def _python_path() -> list[str]:
    """Return the standard library and installed packages, without the project's own folders."""
    standard = os.path.dirname(os.__file__)
    return [
        path for path in sys.path
        if path in (standard, os.path.join(standard, "lib-dynload")) or path.endswith(".zip")
        or os.path.basename(path) in ("site-packages", "dist-packages")
    ]  # fmt: skip


def _folders() -> list[str]:
    """List what a program may read: the system's programs and libraries, Python and its packages, this package."""
    kept = list(SYSTEM_FOLDERS)
    for path in sorted({sys.base_prefix, *_python_path(), os.path.dirname(os.path.abspath(__file__))}, key=len):
        if not any(Path(path).is_relative_to(folder) for folder in kept if not os.path.islink(folder)):
            kept.append(path)
    return kept


def _one_user() -> None:
    """Set all user ids to one before bubblewrap starts: it refuses a real user id of root that differs from the
    others."""
    os.setresuid(os.geteuid(), os.geteuid(), os.geteuid())
