"""``gradwire doctor``: check what a client and a server need on this machine, and say what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from gradwire import __version__
from gradwire.cli.service import ADDRESS
from gradwire.cli.text import size

MIN_PYTHON = (3, 11)
LOW_MEMORY_BYTES, LOW_DISK_BYTES = 4 << 30, 10 << 30
PROBE_S = 120
SERVER_PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "pydantic_settings")
PROBE_TORCH = """
import json, torch
devices = []
for index in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(index)
    devices.append([torch.cuda.get_device_name(index), free, total])
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda or "", "devices": devices}))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        state: "ok"; "note": works, but not as one may expect; "problem": does not work.
        subject: The thing that was checked.
        words: The finding.
        advice: How to mend it; empty if there is nothing to mend.
    """

    state: Literal["ok", "note", "problem"]
    subject: str
    words: str
    advice: str = ""


def doctor(
    state_dir: Annotated[Path, typer.Option(envvar="GRADWIRE_STATE_DIR", help="State folder of the server.")] = Path(
        "gradwire-state"
    ),
    address: Annotated[str, typer.Option(help="HOST:PORT that the server is to listen on.")] = ADDRESS,
) -> None:
    """Check Python, torch, CUDA, memory, disk, the port and the keys' permissions; status 1 if there is a problem."""
    console = Console(soft_wrap=True, highlight=False)
    problems = 0
    for finding in examine(state_dir.expanduser(), address):
        problems += finding.state == "problem"
        colour = {"ok": "green", "note": "yellow", "problem": "bold red"}[finding.state]
        console.print(Text.assemble((f"{finding.state:8}", colour), f"{finding.subject}: {finding.words}"))
        if finding.advice:
            console.print(Text(f"        {finding.advice}"))
    raise typer.Exit(1 if problems else 0)


def examine(state_dir: Path, address: str) -> Iterator[Finding]:
    """Make all checks."""
    yield python()
    yield from torch_and_cuda()
    yield memory()
    yield disk(state_dir)
    yield port(address)
    yield from permissions(state_dir)


def python() -> Finding:
    words = f"{platform.python_version()} with gradwire {__version__}"
    if sys.version_info < MIN_PYTHON:
        return Finding("problem", "Python", words, f"Install Python {'.'.join(map(str, MIN_PYTHON))} or newer.")
    return Finding("ok", "Python", words)


def torch_and_cuda() -> Iterator[Finding]:
    """Examine torch in a process of its own, so that a broken installation breaks nothing here."""
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        words = f"only the client is installed ({', '.join(missing)} missing)"
        yield Finding("note", "Server", words, "On the machine that serves: pip install 'gradwire[server]'")
    if "torch" in missing:
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE_TORCH], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("problem", "torch", f"did not import within {PROBE_S} s", "Reinstall it, or look at the disk.")
        return
    if probe.returncode != 0:
        last = probe.stderr.strip().splitlines()[-1:] or [f"status {probe.returncode}"]
        yield Finding(
            "problem", "torch", f"does not import: {last[0]}", "Reinstall it: pip install --force-reinstall torch"
        )
        return
    found: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    yield Finding("ok", "torch", str(found["version"]))
    yield from _cuda(found)


def _cuda(cuda: dict[str, Any]) -> Iterator[Finding]:
    for index, (name, free, total) in enumerate(cuda["devices"]):
        words = f"{name}, {size(free)} of {size(total)} free"
        if free < total / 2:
            yield Finding("note", f"CUDA device {index}", words, "Another process uses it: see nvidia-smi.")
        else:
            yield Finding("ok", f"CUDA device {index}", words)
    if cuda["devices"]:
        return
    if shutil.which("nvidia-smi") is None:
        yield Finding("note", "CUDA", "no NVIDIA driver here: training runs on the CPU")
    elif not cuda["built_for"]:
        advice = "Install a build for CUDA: see https://pytorch.org/get-started/locally/"
        yield Finding("problem", "CUDA", "there is an NVIDIA driver, but torch was built for the CPU", advice)
    else:
        advice = "Compare the driver's CUDA version in nvidia-smi, and see whether CUDA_VISIBLE_DEVICES hides the GPU."
        words = f"there is an NVIDIA driver, but torch, built for CUDA {cuda['built_for']}, finds no device"
        yield Finding("problem", "CUDA", words, advice)


def memory() -> Finding:
    """Examine the memory that can still be used; unknown outside Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return Finding("note", "Memory", "unknown on this system")
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    free, total = kibibytes["MemAvailable"] << 10, kibibytes["MemTotal"] << 10
    words = f"{size(free)} of {size(total)} available"
    if free < LOW_MEMORY_BYTES:
        return Finding("note", "Memory", words, "A model needs its weights in memory: end other programs.")
    return Finding("ok", "Memory", words)


def disk(state_dir: Path) -> Finding:
    """Examine the file system that the state folder is or would be on."""
    folder = state_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(
            "problem", "Disk", f"{folder} is not a folder that you may write to", "Give another --state-dir."
        )
    free = shutil.disk_usage(folder).free
    words = f"{size(free)} free for {state_dir}"
    if free < LOW_DISK_BYTES:
        return Finding("note", "Disk", words, "Checkpoints fill it: free some space, or give another --state-dir.")
    return Finding("ok", "Disk", words)


def port(address: str) -> Finding:
    """Examine whether a server can listen on the address."""
    host, _, number = address.rpartition(":")
    try:
        (family, kind, protocol, _, target), *_ = socket.getaddrinfo(
            host.strip("[]"), int(number), type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except ValueError:
        return Finding("problem", "Port", f"{address} is not HOST:PORT", "Give --address, for example 127.0.0.1:50051.")
    except OSError as error:
        shows = f"`gradwire status --address {address}` shows it"
        advice = f"If a server runs there, {shows}; otherwise choose another --address."
        return Finding("note", "Port", f"a server cannot listen on {address}: {error.strerror or error}", advice)
    return Finding("ok", "Port", f"{address} is free")


def permissions(state_dir: Path) -> Iterator[Finding]:
    """Examine who may read the state folder and the API keys."""
    for path in (state_dir, state_dir / "keys.json"):
        if not path.exists():
            continue
        mode = path.stat().st_mode & 0o777
        subject = "State folder" if path == state_dir else "API keys"
        if mode & 0o077:
            advice = f"chmod {'700' if path.is_dir() else '600'} {path}"
            yield Finding("problem", subject, f"other users may use {path} (mode {mode:o})", advice)
        else:
            yield Finding("ok", subject, f"{path} is yours alone")
    if not (state_dir / "keys.json").exists():
        yield Finding("ok", "API keys", f"none in {state_dir}: a server listens on loopback only")
