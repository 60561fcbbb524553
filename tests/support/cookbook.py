"""Programs on the unmodified `tinker` SDK and `tinker-cookbook`, in an environment of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.recording_proxy import RecordingProxy
from support.server import free_port
from support.tinker import HttpServer

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("GRADWIRE_TINKER_PYTHON", ROOT / ".venv-tinker" / "bin" / "python"))
LIMIT_S = 900
ROLES, AGAIN = "renderer_name=role_colon", "behavior_if_log_dir_exists=delete"
MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is made by `make tinker`"),
]


def served(folder: Path, name: str) -> Iterator[HttpServer]:
    """A server of the model that lies in this folder under its name on the hub."""
    server = HttpServer(folder / name, folder / "state", free_port(), "--threads", "1", name=name)
    server.start()
    try:
        yield server
    finally:
        server.end()


def environment(server: HttpServer | RecordingProxy, folder: Path) -> dict[str, str]:
    """A program's environment, without a network."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    own = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any", "TINKER_TELEMETRY": "0"}
    return os.environ | offline | own | {"HF_HOME": str(folder / "hf"), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}


def ran(
    server: HttpServer | RecordingProxy, folder: Path, *command: str, python: Path = PYTHON, **more: str
) -> subprocess.CompletedProcess[str]:
    """What became of a program; ``more`` is added to its environment."""
    return subprocess.run(
        [str(python), *command], cwd=folder, env=environment(server, folder) | more, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def run_program(
    server: HttpServer | RecordingProxy, folder: Path, *command: str, python: Path = PYTHON, **more: str
) -> str:
    """What a program that ended well printed."""
    done = ran(server, folder, *command, python=python, **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout
