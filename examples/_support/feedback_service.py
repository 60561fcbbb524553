"""`gradwire feedback serve` as a child process, and its API over plain HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANNOUNCEMENT = "gradwire feedback: listening on "
POLL_S = 1.0


class FeedbackService:
    """The API of one agent. An error of the service ends the program with its message.

    Args:
        address: ``http://HOST:PORT``.
        agent: The agent's id.
    """

    def __init__(self, address: str, agent: str) -> None:
        self._address, self._agent = address, agent

    def generate(self, prompt: str, user: str, max_new_tokens: int, seed: int) -> dict[str, Any]:
        """Return ``version``, ``response`` and ``runId`` of an answer of the version deployed for this user."""
        body = {"prompt": prompt, "userId": user, "maxNewTokens": max_new_tokens, "seed": seed}
        return self._call("POST", f"{self._agent}/generate", body)

    def rate(self, ratings: list[dict[str, Any]]) -> None:
        self._call("POST", f"feedback/{self._agent}", ratings)

    def train(self, settings: Mapping[str, Any], show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Train and return the new version; ``show`` receives the progress each second."""
        job = self._call("POST", f"train_policy/{self._agent}", settings, {"Prefer": "respond-async"})
        while job["status"] in ("queued", "running"):
            time.sleep(POLL_S)
            job = self._call("GET", f"jobs/{job['id']}")
            if job["progress"]:
                show(job["progress"])
        if job["result"] is None:
            raise SystemExit(f"the training {job['status']}: {job['error']}")
        result: dict[str, Any] = job["result"]
        return result

    def deploy(self, weights: Mapping[str, float]) -> None:
        self._call("PUT", f"{self._agent}/deployment", weights)

    def comparison(self) -> dict[str, Any]:
        return self._call("GET", f"{self._agent}/comparison")

    def _call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self._address}/api/policies/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{method} {path}: {error.code}: {error.read().decode(errors='replace')}") from None


@contextmanager
def feedback_service(base_model: Path, folder: Path, agent: str) -> Iterator[FeedbackService]:
    """Start a service and its gradwire server; both stop with the block."""
    command = [sys.executable, "-m", "gradwire_feedback.cli", "serve", "--address", "127.0.0.1:0"]
    command += ["--base-model", f"start={base_model}", "--models-dir", str(folder / "models")]
    command += ["--database", f"sqlite:///{folder / 'feedback.db'}"]
    with (folder / "service.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(ANNOUNCEMENT):
                yield FeedbackService(line.removeprefix(ANNOUNCEMENT).strip(), agent)
                return
        raise SystemExit(f"the feedback service did not start:\n{(folder / 'service.log').read_text()}")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
