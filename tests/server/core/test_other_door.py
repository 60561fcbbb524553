"""The core can be entered without gRPC: a door of a hundred lines trains, samples, and loses nothing to kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROWS = [[5, 6, 7, 8], [9, 10, 11]]
TESTS = Path(__file__).parents[2]


class LineClient:
    """The door's process, and one connection to it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._path = folder / "door.sock"
        self._words = [sys.executable, "-m", "support.line_door", str(self._path), str(folder / "state"), str(model)]
        self.start()

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "examples")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self._words, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None and self.process.stdout.readline() == "open\n"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(120)
        self._socket.connect(str(self._path))
        self._lines = self._socket.makefile("rw")

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        self._lines.write(json.dumps({"do": do, **values}) + "\n")
        self._lines.flush()
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self._socket.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def client(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    client = LineClient(tmp_path_factory.mktemp("door"), tiny_model_path)
    yield client
    client.kill()


def test_a_door_without_grpc_trains_samples_and_recovers(client: LineClient) -> None:
    plain, killed = (client.ask("create", model="tiny", rank=4)["run_id"] for _ in range(2))
    losses = [client.ask("train", run_id=plain, rows=ROWS)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    assert client.ask("train", run_id=killed, rows=ROWS) == {"loss": losses[0], "step": 1}
    seq = client.ask("accept", run_id=killed, rows=ROWS)["seq"]
    client.kill()

    client.start()
    client.ask("open", run_id=killed)
    assert client.ask("result", run_id=killed, seq=seq) == {"step": 2}
    assert client.ask("train", run_id=killed, rows=ROWS) == {"loss": losses[2], "step": 3}
    assert client.ask("result", run_id=killed, seq=seq) == {"step": 2}  # also once the session has read past it
    client.ask("open", run_id=plain)
    tokens = [client.ask("sample", run_id=run_id, prompt=[5, 6])["tokens"] for run_id in (plain, killed)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 4
    assert client.ask("modules") == {"modules": []}


def test_an_error_says_what_and_where(client: LineClient) -> None:
    for do, values in (("crate", {}), ("create", {"models": "tiny"})):
        error = client.ask(do, **values)  # and the connection goes on
        assert error["error"] == "ERROR_CODE_INVALID_ARGUMENT" and "create, open, train" in error["message"]
    error = client.ask("create", model="tinny", rank=4)
    assert (error["error"], error["field"]) == ("ERROR_CODE_UNKNOWN_MODEL", "base_model") and "tiny" in error["message"]
    run_id = client.ask("create", model="tiny", rank=4)["run_id"]
    error = client.ask("train", run_id=run_id, rows=[[5, 10_000]])
    assert error["error"] == "ERROR_CODE_INVALID_BATCH" and error["field"] == "input_ids"
    assert client.ask("train", run_id=run_id, rows=ROWS)["step"] == 1  # the failed batch and its step cost nothing else
