"""Servers and Tinker programs as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from support.server import free_port

from benchmarks import ROOT
from benchmarks.rivals.workload import BETAS, EPS, LEARNING_RATE, RANK, WORKS

HERE = Path(__file__).parent
KEY = "tml-rivals"
MODEL_NAME = "qwen3"
START_S = 180.0
SKYRL_RUNS = 1 + sum(work.runs for work in WORKS)
"""Adapters that SkyRL has room for; one is the base model's."""

TUFT_PYTHON = ROOT / ".venv-tuft/bin/python"
SKYRL_PYTHON = ROOT / ".venv-skyrl/bin/python"
TINKER_PYTHON = Path(os.environ.get("GRADWIRE_TINKER_PYTHON", ROOT / ".venv-tinker/bin/python"))
"""Of the environment with the SDK that our Tinker door is made for."""


class Server:
    """A server process and its children; ended with the context.

    Args:
        name: For errors.
        command: Starts it.
        url: Where it answers ``/api/v1/healthz`` once it is ready.
        model: Its name for the model.
        folder: For its output.
        env: In addition to this process's environment.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        url: str,
        model: str,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.url, self.model = name, url, model
        self._command, self._env = list(map(str, command)), dict(env or {})
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._log = folder / "log"

    def __enter__(self) -> Server:
        with self._log.open("wb") as log:
            # A session of its own, so that nothing it has started is left when it ends.
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=os.environ | self._env, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.end_of_log()}")
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not answer after {START_S:g} s:\n{self.end_of_log()}")

    def end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def __exit__(self, *error: object) -> None:
        family = []
        if self._process.poll() is None:
            family = self.process.children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for process in psutil.wait_procs(family, timeout=5)[1]:
            process.kill()


def ours(model: Path, folder: Path, *settings: str) -> tuple[Server, str]:
    """Our server with its defaults, but for these settings, and the Tinker door; and the address for our own SDK."""
    address, url = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gradwire_server.cli", "serve", "--address", address, "--http", url]
    command += ["--model", f"{MODEL_NAME}={model}", "--state-dir", str(folder / "state"), *settings]
    return Server("gradwire", command, f"http://{url}", MODEL_NAME, folder), address


def tuft(model: Path, folder: Path) -> Server:
    """TuFT, with one micro-batch for a batch: its default is one for each row."""
    folder.mkdir(parents=True)
    port = free_port()
    config = {
        "checkpoint_dir": str(folder / "checkpoints"),
        "supported_models": [
            {"model_name": MODEL_NAME, "model_path": str(model), "max_model_len": 1024, "micro_batch_size": 64}
        ],
        "authorized_users": {KEY: "rivals"},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [TUFT_PYTHON, HERE / "tuft_server.py", "launch", "--config", file, "--port", str(port)]
    command += ["--log-level", "warning"]
    env = {"TUFT_HOME": str(folder), "RIVALS_RAY_FOLDER": str(folder / "ray"), "RAY_USAGE_STATS_ENABLED": "0"}
    return Server("TuFT", command, f"http://127.0.0.1:{port}", MODEL_NAME, folder, env | _threads())


def skyrl(model: Path, folder: Path) -> Server:
    """SkyRL's jax backend, with room for as many runs as there are and no more: its steps go over all of them."""
    port = free_port()
    config = {
        "base_model": str(model),
        "backend": "jax",
        "backend_config": {"max_lora_adapters": SKYRL_RUNS, "max_lora_rank": RANK},
        "checkpoints_base": str(folder / "checkpoints"),
        "database_url": f"sqlite:///{folder}/tinker.db",
    }
    command = [SKYRL_PYTHON, HERE / "skyrl_server.py", str(port), json.dumps(config)]
    return Server("SkyRL", command, f"http://127.0.0.1:{port}", str(model), folder, {"JAX_PLATFORMS": "cpu"})


def _threads() -> dict[str, str]:
    """As many threads as cores, which is what the others take: Ray gives an actor one."""
    return {"OMP_NUM_THREADS": str(os.cpu_count())}


class TinkerProgram:
    """``tinker_client.py`` against a server, by the interpreter of an environment that has the SDK."""

    def __init__(self, python: Path, server: Server) -> None:
        adam = {"learning_rate": LEARNING_RATE, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS}
        plan = json.dumps({"model": server.model, "rank": RANK, "adam": adam})
        env = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
        self._server = server
        self._log = server.folder / f"{python.parent.parent.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, HERE / "tinker_client.py", plan], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env=os.environ | env, bufsize=1,
            )  # fmt: skip

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._ask, json.dumps({"do": do, **arguments}))

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        for answer in self._process.stdout:
            if answer.startswith("{"):
                found: dict[str, Any] = json.loads(answer)
                return found
        server, errors = self._server, self._log.read_text(errors="replace")[-4000:]
        raise RuntimeError(
            f"the output of {server.name}'s server:\n{server.end_of_log()}\nits program ended:\n{errors}"
        )

    def __enter__(self) -> TinkerProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
