"""What keeps an evaluation to itself: namespaces, a file system that is read-only but for one folder, limits."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def isolate(network: bool, folder: str) -> bool:
    """Own user, PID, mount and (without network) network namespaces for what is forked next; False where refused."""
    if sys.platform != "linux":
        return False
    if os.geteuid() == 0:
        # The limit on processes is of the real user, and the kernel excuses root from it.
        os.setresuid(NOBODY, 0, 0)
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        die_with_parent()
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | (0 if network else CLONE_NEWNET)
    if _libc.unshare(flags) != 0:
        return False
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError:
        # Unmapped ids can still read and compute, which is what a reward function does.
        pass
    write_only_to(folder)
    return True


def write_only_to(folder: str) -> None:
    """Makes every file system read-only but this folder, as far as the kernel (5.12 and later) lets it."""

    def read_only(path: bytes, flags: int, *, on: bool) -> int:
        attributes = struct.pack("<4Q", MOUNT_ATTR_RDONLY * on, MOUNT_ATTR_RDONLY * (not on), 0, 0)
        size = ctypes.c_size_t(len(attributes))
        return int(_libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, size))

    place = os.fsencode(folder)
    if (
        _libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and _libc.mount(place, place, None, MS_BIND, None) == 0
        and read_only(b"/", AT_RECURSIVE, on=True) == 0
    ):
        read_only(place, 0, on=False)


def restrict(limits: dict[str, Any], evaluations: int, namespaced: bool) -> None:
    """Limits of the worker, and of each process that it forks."""

    def limit(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, math.ceil(limits["time_s"] * evaluations) + 1)
    limit(resource.RLIMIT_AS, limits["memory_bytes"])
    limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    limit(resource.RLIMIT_NOFILE, limits["open_files"])
    if namespaced:
        limit(resource.RLIMIT_NPROC, limits["max_processes"] + 3)
    if sys.platform == "linux":
        _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
