"""The machine and the commit of a measurement, and what a server's processes take of it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import ROOT


def describe() -> dict[str, Any]:
    """Return the CPU, cores, threads, versions, load average and commit."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def in_words(machine: dict[str, Any]) -> str:
    load = ", ".join(f"{value:g}" for value in machine["load_average"])
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['memory_gib']:g} GiB; "
        f"torch {machine['torch']}, Python {machine['python']}; load average at start {load}; "
        f"commit {machine['commit']}, {machine['time']}"
    )


def engine_process() -> psutil.Process:
    """The engine of the newest server that this process started.

    Raises:
        ProcessLookupError: where there is none.
    """
    children = psutil.Process().children(recursive=True)
    running = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]  # a zombie has no command line
    engines = [child for child in running if "gradwire_server.engine.process" in child.cmdline()]
    if not engines:
        raise ProcessLookupError("this process has started no engine")
    return max(engines, key=lambda engine: engine.create_time())


def front_process() -> int:
    """The process id of the front of the embedded server that this process runs."""
    return int(engine_process().ppid())


class Spent(NamedTuple):
    """Milliseconds that a thread was busy, and waited for a core; how often it went to sleep."""

    busy: float
    waited: float
    slept: int


def spent(pid: int) -> dict[str, Spent]:
    """What each thread of a process has spent so far."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        busy, waited, _ = map(int, (task / "schedstat").read_text().split())
        (slept,) = (line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary"))
        threads[task.name] = Spent(busy / 1e6, waited / 1e6, int(slept.split()[1]))
    return threads


def cpu_and_switches(pid: int) -> tuple[float, int]:
    """Milliseconds of processor time and voluntary context switches of a process's threads so far."""
    threads = spent(pid).values()
    return sum(thread.busy for thread in threads), sum(thread.slept for thread in threads)


def memory_bytes(process: psutil.Process, field: str) -> int:
    """``VmRSS``, the current resident memory, or ``VmHWM``, its peak."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"the kernel tells no {field} of process {process.pid}")


def wait_for(device: str) -> None:
    """Wait until a GPU has done what it was told to; a CPU has."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    return f"{commit} and changes" if git("status", "--porcelain", "--untracked-files=no") else commit or "unknown"
