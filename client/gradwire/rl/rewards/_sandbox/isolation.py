"""Isolation of an evaluation: namespaces, a file system that is read-only except for one folder, limits."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CAPABILITY_VERSION_3, MAX_CAPABILITY = 0x20080522, 63
SOMEBODY, NOBODY = 1000, 65534
# Paths below /proc that root without capabilities may still write to, because it owns the files.
KERNEL_SETTINGS = (b"acpi", b"bus", b"fs", b"irq", b"scsi", b"sys", b"sysrq-trigger")
NO_NAMESPACES = "network, processes and files of its own"

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def isolate(network: bool) -> list[str]:
    """Enter own user, PID, mount and (without network) network namespaces for later forks; return what is missing."""
    if sys.platform != "linux":
        return [NO_NAMESPACES]
    if os.getuid() == os.geteuid() == 0:
        # The limit on processes applies to the real user, and the kernel exempts root from it.
        with contextlib.suppress(OSError):  # in a user namespace without such a user
            os.setresuid(NOBODY, 0, 0)
        die_with_parent()
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | (0 if network else CLONE_NEWNET)
    if not unshare(flags):
        return [NO_NAMESPACES]
    map_user(uid, gid)
    return []


def unshare(flags: int) -> bool:
    """Enter new namespaces; False if the kernel refuses."""
    return bool(_libc.unshare(flags) == 0)


def map_user(uid: int, gid: int) -> None:
    """Name the user that this process was in its new user namespace."""
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or the files below are root's
    try:
        # Not as 0: from there, a process without capabilities cannot create a user namespace.
        users, groups = f"{uid or SOMEBODY} {uid} 1", f"{gid or SOMEBODY} {gid} 1"
        for name, line in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    except OSError:
        # Unmapped ids can still read and compute, which is enough for a reward function.
        pass


def enclose(folder: str) -> list[str]:
    """In the first process of a PID namespace: show only its own processes and make only this folder writable.

    Returns:
        What is missing.
    """
    place, flags = os.fsencode(folder), MS_NOSUID | MS_NODEV | MS_NOEXEC
    if _libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return ["hidden processes", "read-only files"]
    missing = []
    # If the host masks parts of its /proc, as containers do, the kernel refuses a new one: use an empty one.
    if (
        _libc.mount(b"proc", b"/proc", b"proc", flags, None) != 0
        and _libc.mount(b"none", b"/proc", b"tmpfs", flags, b"size=4096") != 0
    ):
        missing.append("hidden processes")
    if not (
        _libc.mount(place, place, None, MS_BIND, None) == 0
        and set_read_only(b"/", AT_RECURSIVE, on=True)
        and set_read_only(place, 0, on=False)
        and _open_process_files()
    ):
        missing.append("read-only files (Linux 5.12 and later)")
    return missing


def _open_process_files() -> bool:
    """Make ``/proc`` writable again, as a nested user namespace needs, except for the kernel's settings."""
    for name in KERNEL_SETTINGS:
        place = b"/proc/" + name
        if os.path.exists(place) and not (
            _libc.mount(place, place, None, MS_BIND | MS_REC, None) == 0 and set_read_only(place, AT_RECURSIVE, on=True)
        ):
            return False
    return set_read_only(b"/proc", 0, on=False)


def set_read_only(path: bytes, flags: int, *, on: bool) -> bool:
    attributes = struct.pack("<4Q", MOUNT_ATTR_RDONLY * on, MOUNT_ATTR_RDONLY * (not on), 0, 0)
    size = ctypes.c_size_t(len(attributes))
    return int(_libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, size)) == 0


def see_only(folders: Sequence[str], root: str, size_bytes: int, empty: Sequence[str] = ()) -> bool:
    """Enter a new root in an empty folder: these folders read-only, four devices, a writable ``/tmp``, no ``/proc``.

    The process is left in ``/tmp``. Returns whether it succeeded.

    Args:
        empty: Folders directly in those that are shown without what they contain.
    """
    top = os.fsencode(root)

    def bind(path: str) -> bool:
        place = top + os.fsencode(path)
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
            return True
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            # Never through a folder that is already bound: that would write to the real file.
            os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
        bound = _libc.mount(os.fsencode(path), place, None, MS_BIND | MS_REC, None) == 0
        covered = (top + os.fsencode(each) for each in empty if os.path.dirname(each) == path)
        return bound and all(
            _libc.mount(b"none", each, b"tmpfs", MS_NOSUID | MS_NODEV, b"size=4096") == 0 for each in covered
        )

    if _libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return False
    if _libc.mount(b"none", top, b"tmpfs", MS_NOSUID | MS_NODEV, b"size=65536") != 0:
        return False
    tmp = top + b"/tmp"
    try:
        os.makedirs(tmp)  # first, as some of the folders may lie in it
        if _libc.mount(b"none", tmp, b"tmpfs", MS_NOSUID | MS_NODEV, b"size=%d,nr_inodes=1024" % size_bytes) != 0:
            return False
        paths = [*folders, "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
        bound = all(bind(path) for path in paths if os.path.lexists(path))
    except OSError:
        return False
    return bool(bound and set_read_only(top, AT_RECURSIVE, on=True) and set_read_only(tmp, 0, on=False) and _enter(top))


def _enter(root: bytes) -> bool:
    os.chdir(root)
    number = SYS_PIVOT_ROOT.get(os.uname().machine)
    # The old root is stacked below the new one; detach it.
    if number is None or _libc.syscall(number, b".", b".") != 0 or _libc.umount2(b".", MNT_DETACH) != 0:
        return False
    os.chdir("/tmp")
    return True


def drop_capabilities() -> None:
    """Drop every capability permanently: started programs cannot regain any, not even as root."""
    if sys.platform != "linux":
        return
    for capability in range(MAX_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header, none = struct.pack("<Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    if _libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "the capabilities could not be dropped")


def restrict(limits: dict[str, Any], evaluations: int, namespaced: bool) -> None:
    """Set the limits of this process and its children."""

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


def forbid_new_privileges() -> None:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
