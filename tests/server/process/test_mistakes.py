"""The table of ordinary mistakes with `gradwire serve`: one sentence each, status 2, no log and no traceback."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradwire_server.cli.saying import MISTAKE, NOT_NOW

pytestmark = pytest.mark.long

LOOPBACK = ("--address", "127.0.0.1:0")
MISTAKES = {
    "beyond loopback without keys": (
        "--model tiny --address 0.0.0.0:0",
        "without API keys the server listens on loopback only, not on 0.0.0.0:0; make one with"
        " `gradwire keys create NAME --state-dir {here}/state`, or let anyone in with --insecure-bind",
    ),
    "certificate missing": (
        "--model tiny --tls-cert none.pem --tls-key server.key",
        "--tls-cert {here}/none.pem cannot be read: No such file or directory",
    ),
    "no GPU": (
        "--model tiny --device cuda",
        "--device cuda: torch * finds no CUDA device here; `gradwire doctor` looks for the reason, and --device cpu"
        " trains without one",
    ),
    "device misspelt": (
        "--model tiny --device cuad",
        "--device cuad: there is no such device; give cpu, cuda or cuda:N",
    ),
    "device of another kind": (
        "--model tiny --device mps",
        "--device mps: there is no such device; give cpu, cuda or cuda:N",
    ),
    "losses missing": (
        "--model tiny --losses none.py",
        "--losses {here}/none.py cannot be read: No such file or directory",
    ),
    "losses broken": (
        "--model tiny --losses broken.py",
        "--losses {here}/broken.py, line 2: ValueError: no such scale",
    ),
    "another server's option": (
        "--model tiny --port=8000",
        "there is no --port: write --address HOST:PORT",
    ),
    "no model": (
        "",
        "name at least one model: --model NAME_OR_FOLDER, or `models` in a file of settings",
    ),
    "model misspelt": (
        "--model tinny",
        "--model tinny: there is no such folder, the model is not in the cache of the Hugging Face hub, and the hub"
        " cannot be reached; did you mean tiny?",
    ),
    "folder misspelt": (
        "--model {here}/tinny",
        "--model {here}/tinny: there is no such folder; did you mean {here}/tiny?",
    ),
    "folder without a model": (
        "--model {here}/empty",
        "--model {here}/empty: the folder has no config.json, so it is no Hugging Face model",
    ),
    "file of quantized weights": (
        "--model {here}/model.gguf",
        "--model {here}/model.gguf: a GGUF file has quantized weights, which are not trained: name the Hugging Face"
        " folder that it was made of, or write one with `python scripts/make_models.py FILE.gguf FOLDER` of gradwire's"
        " repository",
    ),
    "folder of an impossible model": (
        "--model m={here}/impossible",
        "model 'm' cannot be used: its config.json gives hidden_size as -4, and it is at least 1",
    ),
    "port in use": (
        "--model tiny --address 127.0.0.1:{port}",
        "--address 127.0.0.1:{port}: address already in use; give another with --address HOST:PORT",
    ),
    "state folder below a file": (
        "--model tiny --state-dir {here}/server.key/state",
        "--state-dir {here}/server.key/state cannot be used: {here}/server.key is no folder",
    ),
    "state folder in use": (
        "--model tiny --state-dir {here}/taken",
        "the state folder {here}/taken is in use by process {pid}",
    ),
    "state folder of a newer version": (
        "--model tiny --state-dir {here}/newer",
        "{here}/newer/gradwire.db cannot be used: a newer gradwire wrote it (version 999 of the state folder; * Install"
        " that gradwire, or restore a backup from before",
    ),
    "a quantized base beside vLLM": (
        "--model tiny --quantize nf4 --sampler vllm",
        "--quantize nf4 and --sampler vllm do not go together",
    ),
    "settings unreadable": (
        "--config broken.yaml",
        "broken.yaml, line 2: * expected ',' or ']', but got '<stream end>'",
    ),
    "settings missing": (
        "--config none.yaml",
        "none.yaml: the file of settings cannot be read: No such file or directory",
    ),
}


@pytest.fixture(scope="module")
def here(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to make mistakes in; its state folder ``taken`` is locked."""
    folder = tmp_path_factory.mktemp("mistakes").resolve()
    (folder / "tiny").symlink_to(tiny_model_path)
    (folder / "empty").mkdir()
    (folder / "model.gguf").touch()
    (folder / "impossible").mkdir()
    given = json.loads((tiny_model_path / "config.json").read_text())
    (folder / "impossible" / "config.json").write_text(json.dumps(given | {"hidden_size": -4}))
    (folder / "server.key").touch()
    (folder / "broken.py").write_text("import math\nraise ValueError('no such scale')\n")
    (folder / "broken.yaml").write_text("address: [1\n")
    (folder / "newer").mkdir()
    with contextlib.closing(sqlite3.connect(folder / "newer" / "gradwire.db")) as database:
        database.execute("PRAGMA user_version = 999")
    (folder / "taken").mkdir()
    with (folder / "taken" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(os.getpid(), end="", file=lock, flush=True)
        yield folder


SLOW = ("device misspelt", "device of another kind", "folder of an impossible model")
"""As "no GPU", the engine says them."""


MAY_PASS = (
    "certificate missing", "losses missing", "model misspelt", "folder misspelt", "folder without a model",
    "file of quantized weights", "port in use", "state folder below a file", "state folder in use",
)  # fmt: skip
"""What may be there, or free, a moment later: a folder of a disk that is not mounted yet is missing or empty."""


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in MISTAKES]
)
def test_a_mistake_costs_one_sentence(mistake: str, here: Path) -> None:
    arguments, sentence = MISTAKES[mistake]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        facts = {"here": here, "port": listening.getsockname()[1], "pid": os.getpid()}
        given = arguments.format(**facts).split()
        address = () if "--address" in given else LOOPBACK
        state = () if "--state-dir" in given else ("--state-dir", str(here / "state"))
        result = subprocess.run(
            [sys.executable, "-m", "gradwire_server.cli", "serve", *given, *address, *state],
            capture_output=True, text=True, timeout=120, check=False, cwd=here,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    assert (result.returncode, result.stdout) == (NOT_NOW if mistake in MAY_PASS else MISTAKE, ""), result.stderr
    (line,) = result.stderr.splitlines()
    start, _, end = f"gradwire: {sentence.format(**facts)}".partition("*")
    assert line.startswith(start) and line.endswith(end), line
