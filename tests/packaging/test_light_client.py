"""`pip install gradwire` without extras is a light client: it imports fast, and never torch."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pydantic", "gradwire_losses", "gradwire_server")
BASE_LACKS = (
    "torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "pydantic_settings",
    "prometheus_client", "grpc_health", "fastapi", "sqlalchemy", "alembic", "nicegui", "uvicorn", "jsonschema",
    "matplotlib", "datasets", "opentelemetry", "huggingface_hub",
)  # fmt: skip
if not any(need.startswith("pydantic") for need in importlib.metadata.requires("typer") or ()):
    BASE_LACKS += ("pydantic",)  # a typer newer than the one of the base install is of no use without it
PROBE = f"""
import json, sys, time
start = time.process_time()
import gradwire, gradwire.sync
print(json.dumps([time.process_time() - start, sorted(set({HEAVY!r}) & set(sys.modules))]))
"""


def import_client(python: str | Path) -> tuple[float, list[str]]:
    """CPU seconds that the import took in a fresh interpreter, and which heavy packages it drew in."""
    probe = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, cwd="/")
    assert probe.returncode == 0, probe.stderr
    seconds, heavy = json.loads(probe.stdout)
    return seconds, heavy


def test_import_is_fast_and_draws_in_nothing_heavy() -> None:
    tries = [import_client(sys.executable) for _ in range(3)]
    assert [heavy for _, heavy in tries] == [[], [], []]
    assert min(seconds for seconds, _ in tries) < 1.0


ELSEWHERE = """
import asyncio, concurrent.futures, importlib, multiprocessing, pkgutil, ssl, subprocess, sys, uuid
import grpc.aio, numpy, pydantic, rich.console, typer
if sys.argv[1] == "win32":
    for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
        sys.modules[name] = None
sys.platform = sys.argv[1]
import gradwire
LEFT_OUT = ("gradwire.fleet", "gradwire.router", "gradwire.rl.rewards._sandbox")  # extras; processes of Linux
for each in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
    if not each.name.startswith(LEFT_OUT):
        importlib.import_module(each.name)
print(len(sys.modules))
"""


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_client_is_imported_without_what_only_linux_has(platform: str) -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, platform], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


BLOCK = f"""
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {BASE_LACKS!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
from gradwire.cli.app import main
main()
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--version"], 0, "gradwire "),
        (["--help"], 0, "serve"),
        (["status", "--address", "127.0.0.1:1"], 1, "no answer from 127.0.0.1:1"),
        (["top", "--help"], 0, "Ctrl-C"),
        (["runs", "--help"], 0, "delete"),
        (["render", "nowhere.jsonl"], 2, "there is no file nowhere.jsonl"),
        (["trajectories", "view", "--help"], 0, "--html"),
        (["doctor"], 0, "only the client is installed"),
        (["router", "--help"], 0, "explain"),
        (["train", "--example", "sft"], 0, "learning_rate"),
        (["serve"], 2, "gradwire[server]"),
        (["keys", "list"], 0, "no keys in gradwire-state"),
        (["feedback", "keys"], 2, "gradwire[feedback]"),
    ],
)
def test_the_base_install_has_the_commands(words: list[str], status: int, said: str, tmp_path: Path) -> None:
    """The packages of all extras are hidden from the interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", BLOCK, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == status, result.stdout + result.stderr
    assert said in result.stdout + result.stderr and "Traceback" not in result.stderr
    if status == 2:
        assert result.stderr.count("\n") == 1


OF_THE_COMMANDS = (
    "typer",
    "rich",
    "Pygments",
    "markdown-it-py",
    "mdurl",
    "shellingham",
    "annotated-doc",
    "Jinja2",
    "MarkupSafe",
)
SIZES = """
import importlib.metadata, json, os
print(json.dumps({
    each.name: sum(os.path.getsize(file.locate()) for file in each.files or () if file.suffix != ".pyc")
    for each in importlib.metadata.distributions()
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plain_installation_imports(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", ROOT], check=True)
    seconds, heavy = import_client(python)
    assert heavy == []
    assert seconds < 3.0  # the first import also compiles
    command = tmp_path / "venv/bin/gradwire"
    assert subprocess.run([command, "--version"], capture_output=True, text=True).stdout.startswith("gradwire ")
    serve = subprocess.run([command, "serve"], capture_output=True, text=True)
    assert serve.returncode == 2 and "pip install 'gradwire[server]'" in serve.stderr
    for heavy in ("torch", "pydantic"):
        there = subprocess.run([python, "-c", f"import {heavy}"], capture_output=True)
        assert there.returncode != 0, f"the plain client must not bring {heavy}"
    sizes = json.loads(subprocess.run([python, "-c", SIZES], capture_output=True, text=True, check=True).stdout)
    print({name: f"{size / 1e6:.2f} MB" for name, size in sizes.items()})
    assert set(OF_THE_COMMANDS) <= set(sizes)
    assert sum(sizes[name] for name in OF_THE_COMMANDS) < 10e6
