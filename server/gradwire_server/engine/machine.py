"""Readings of the machine by this process: its memory, how much of that is free, and how long work takes.

``machine_memory`` and ``total_memory`` do not change. The others do, and from one process to another: what is chosen by
them is chosen in :mod:`.operations.decisions` or by an :class:`.agreement.Agreement`, and everything else only reports
them.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


def total_memory(device: torch.device) -> int:
    """Bytes of a device's memory; of the machine's, for the CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else machine_memory()


def free_memory(device: torch.device) -> int:
    """Bytes that may be allocated at present."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = [line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")]
    return min([machine_memory() - resident_bytes(), *(int(kib) << 10 for kib in available)])


def seconds_on(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of work on a GPU, after a first time that does not count."""
    work()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Share:
    """The share of the machine that an engine has beside others with the same state folder.

    Attributes:
        number: Its number, from 0.
    """

    number: int = 0
    engines: int = 1

    def device_memory(self, device: torch.device) -> int:
        """Bytes of a device's memory for this engine, of the machine's for the CPU."""
        gpus = torch.cuda.device_count() if device.type == "cuda" else 1
        return total_memory(device) // math.ceil(self.engines / gpus)

    def host_memory(self) -> int:
        """Bytes of the machine's memory for this engine."""
        return machine_memory() // self.engines

    def steady_memory(self) -> int:
        """The same, of a power of two: a few bytes more or less for the kernel change no plan."""
        return (1 << (machine_memory().bit_length() - 1)) // self.engines


def sampling_cache(device_bytes: int) -> int:
    """Bytes of the sampling cache of a device of this memory, where nothing else is asked for: an eighth or less."""
    return 1 << (device_bytes.bit_length() - 4)


def machine_memory() -> int:
    """Bytes of the machine's memory, or of the control group's limit if that is lower."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits()])


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: peak memory instead, in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _group_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Limits of this process's control group and its ancestors, versions 1 and 2."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        own = top / name.lstrip("/")
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # no such folder in this container, or "max"
                yield int((folder / file).read_text())
            if folder == top:
                break


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # not Linux
        return ""
