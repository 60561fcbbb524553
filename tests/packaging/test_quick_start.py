"""The README and the pages of the quick start, followed word by word in an empty environment.

A copy of the checkout, a fresh virtual environment and an empty home; nothing is installed but what the page says. The
model that the pages name lies in the cache of downloads, as a tiny one of that name, because tests download nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.chats import chat_model
from support.server import free_port

ROOT = Path(__file__).parents[2]
MODEL = "Qwen/Qwen3-0.6B"
PORT = 50051
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
PATIENCE_S = 900
KEPT = ("PATH", "LANG", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
"""What an empty environment still has of this one, with the settings of pip."""

pytestmark = [pytest.mark.slow, pytest.mark.install, pytest.mark.timeout(2400)]


def blocks(page: str, kind: str, section: str = "") -> list[str]:
    """The code blocks of a page, or of one of its sections."""
    text = (ROOT / page).read_text()
    if section:
        text = text.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(page: str, section: str = "") -> list[str]:
    """The commands of a page's console blocks, without their comments."""
    lines = [line for block in blocks(page, "console", section) for line in block.splitlines()]
    return [re.sub(r"\s+# .*", "", line[2:]) for line in lines if line.startswith("$ ")]


@dataclass(frozen=True)
class Newcomer:
    """Someone with a checkout, a virtual environment and nothing else."""

    home: Path
    port: int

    @property
    def checkout(self) -> Path:
        return self.home / "gradwire"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")}
        kept["PATH"] = f"{self.home / 'venv' / 'bin'}:{kept['PATH']}"
        return kept | {"HOME": str(self.home), "HF_HUB_OFFLINE": "1"}

    def here(self, text: str) -> str:
        """The text with a free port instead of the usual one, if another server listens on that."""
        return text.replace(str(PORT), str(self.port))

    def start(self, command: str) -> subprocess.Popen[str]:
        words = ["bash", "-c", f"exec {self.here(command)}"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words, cwd=self.checkout, env=self.environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def run(self, command: str) -> str:
        if command == CPU_TORCH and not reachable(CPU_TORCH.split()[-1]):
            (command,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
            command = f"pip install {command}"  # where a mirror has the build for the CPU, in that version
        done = subprocess.run(
            ["bash", "-c", self.here(command)], cwd=self.checkout, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}"
        print(f"$ {command}\n{done.stdout[-2000:]}")
        return done.stdout

    def script(self, *code: str) -> str:
        """Run Python as the pages say for scripts: inside ``async def main()``, by ``asyncio.run(main())``."""
        body = textwrap.indent("\n".join(code), "    ")
        (self.checkout / "script.py").write_text(
            f"import asyncio\n\n\nasync def main():\n{body}\n\n\nasyncio.run(main())\n"
        )
        return self.run("python script.py")


def usual_port() -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return free_port()
    return PORT


def copy_of_the_checkout(to: Path) -> None:
    """Copy what git has, or would have."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    someone = Newcomer(tmp_path_factory.mktemp("newcomer"), usual_port())
    copy_of_the_checkout(someone.checkout)
    subprocess.run([sys.executable, "-m", "venv", someone.home / "venv"], check=True)
    cached = someone.home / ".cache" / "huggingface" / "hub" / f"models--{MODEL.replace('/', '--')}"
    chat_model(cached / "snapshots" / "0", "marked")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    yield someone
    shutil.rmtree(someone.home)


def listening(server: subprocess.Popen[str]) -> None:
    """Wait until a server listens."""
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if line.startswith("gradwire: listening on "):
            return
    raise AssertionError(f"the server ended with {server.wait()}:\n{''.join(said)}")


def serve_and_look(newcomer: Newcomer, serve: str, status: str) -> None:
    with newcomer.start(serve) as server:
        try:
            listening(server)
            assert MODEL in newcomer.run(status)
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


def test_the_readme(newcomer: Newcomer) -> None:
    assert CPU_TORCH in (ROOT / "README.md").read_text()
    newcomer.run(CPU_TORCH)
    (install,) = commands("README.md", "The loop")
    newcomer.run(install)
    (loop,) = blocks("README.md", "python", "The loop")
    losses_and_norms = [line.split() for line in newcomer.script(loop).splitlines()[:3]]
    assert all(float(loss) > 0 and float(norm) > 0 for loss, norm in losses_and_norms)
    doctor, serve, status = commands("README.md", "The server")
    assert "is free" in newcomer.run(doctor)
    serve_and_look(newcomer, serve, status if newcomer.port == PORT else f"{status} --address 127.0.0.1:{PORT}")
    (programs, _) = blocks("README.md", "python", "Reinforcement learning")
    (newcomer.checkout / "fifteen.py").write_text(programs)
    (cached,) = newcomer.home.glob(".cache/huggingface/hub/models--*/snapshots/0")
    assert "reward" in newcomer.run(f"python fifteen.py {cached} 1")


def test_the_pages_on_installation_and_the_quick_start(newcomer: Newcomer) -> None:
    *installs, doctor, serve, status = commands("docs/install.md")
    for command in installs:
        newcomer.run(command)
    newcomer.run(doctor)
    serve_and_look(newcomer, serve, status)
    printed = newcomer.script(*blocks("docs/quick_start.md", "python"))
    assert re.search(r"^3 [\d.]+ [\d.]+$", printed, re.MULTILINE)
    assert (newcomer.checkout / "out" / "capitals" / "adapter_model.safetensors").exists()


def test_a_recipe_from_its_example(newcomer: Newcomer) -> None:
    """The commands of docs/recipes.md, on a small data set in the place of the page's."""
    rows = "".join(f'{{"question": "What is {n} and {n}?", "answer": "{2 * n}"}}\n' for n in range(200))
    (newcomer.checkout / "train.jsonl").write_text(rows)
    newcomer.run("pip install '.[server]'")
    example, estimate, train = commands("docs/recipes.md", "`gradwire train`")
    newcomer.run(example)
    assert "196 rows" in newcomer.run(estimate)
    assert "report.html" in newcomer.run(train)
    assert (newcomer.checkout / "runs" / "sft" / "report.html").exists()


def test_make_demo(newcomer: Newcomer) -> None:
    demo, *_ = commands("README.md", "Try it")
    assert "NOT improved" not in newcomer.run(demo)
    assert (newcomer.checkout / "out" / "three_stage_rlhf" / "report.html").exists()


def test_make_notebook_opens_jupyterlab_on_the_notebook(newcomer: Newcomer) -> None:
    (notebook,) = [command for command in commands("README.md", "Try it") if command == "make notebook"]
    port = free_port()
    flags = f"--no-browser --allow-root --port={port} --IdentityProvider.token=own"
    with newcomer.start(f"{notebook} ARGS='{flags}'") as lab:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (page := reachable(f"http://127.0.0.1:{port}/lab/tree/train_across_cells.ipynb?token=own")):
                assert lab.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
            assert "JupyterLab" in page
        finally:
            lab.send_signal(signal.SIGTERM)


def reachable(address: str) -> str:
    """The page at an address, empty if there is none."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
