"""Isolation of others' code: nothing of the machine but Python and packages, a user of its own, few system calls.

In this order, by the process that forks the code's process and by that one:

    begin     in the parent: namespaces for the next forks, as root without one of users; else Landlock's rules
    hide      in a fork, with namespaces: a root of its own
    finish    last, in the process that runs the code: the user, the capabilities, the rules, the system calls

As root, files and processes are another user's than the server's. Landlock holds where namespaces are refused, as in
most containers, and only for root, as it hides no file's name and size, which the other user then does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Mapping

from .isolation import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    NOBODY,
    die_with_parent,
    drop_capabilities,
    forbid_new_privileges,
    map_user,
    see_only,
    unshare,
)
from .seccomp import install

NAMESPACES, RULES = "namespaces", "rules"
CLONE_NEWUTS = 0x04000000
FIRST_USER = 1 << 30
"""Users from here on belong to nobody; each process of this kind draws one, whose processes are counted."""
SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446  # on all architectures
VERSION, PATH_BENEATH = 1, 1
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Version of Landlock -> the rights on files that it knows."""
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def begin(network: bool, *, rules: bool) -> str:
    """Enter what later forks are isolated by: :data:`NAMESPACES`, :data:`RULES`, or "" if the machine refuses both.

    Args:
        rules: Whether Landlock suffices, which leaves the code no file that it may write to.
    """
    if sys.platform != "linux":
        return ""
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | (0 if network else CLONE_NEWNET)
    root = os.geteuid() == 0
    if root and unshare(flags):
        return NAMESPACES
    own = root and _become_another()
    user, group = os.geteuid(), os.getegid()
    if unshare(flags | CLONE_NEWUSER):
        map_user(user, group)
        return NAMESPACES
    return RULES if rules and own and _landlock_version() else ""


def hide(places: Mapping[str, list[str]], root: str, size_bytes: int) -> bool:
    """Show only these places, in a new root on an empty folder, with a ``/tmp`` of so many bytes.

    Args:
        places: The ``shown`` folders and files, outer ones first, and the folders in them that are ``hidden``.
    """
    os.umask(0o022)
    return see_only(places["shown"], root, size_bytes, places.get("hidden", ()))


def finish(wall: str, places: Mapping[str, list[str]], *, network: bool) -> bool:
    """Give up everything that the code must not have. Returns whether that succeeded."""
    if os.geteuid() == 0:
        _become_another()  # refused where a user namespace knows one user only, whose namespaces hold alone then
    die_with_parent()  # a new user forgets it
    drop_capabilities()
    forbid_new_privileges()
    return (wall == NAMESPACES or _restrict(places, network)) and install(network)


def _become_another() -> bool:
    """Become a user that owns nothing, for ever; False if that is refused."""
    for user in (FIRST_USER + int.from_bytes(os.urandom(3)), NOBODY):
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            die_with_parent()
            return True
    return False


def _landlock_version() -> int:
    return max(int(_libc.syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), VERSION)), 0)


def _restrict(places: Mapping[str, list[str]], network: bool) -> bool:
    """Let this process read these places only; needs no-new-privs."""
    hidden, shown = places["hidden"], [*DEVICES]
    for place in places["shown"]:  # a rule holds for all that is in a folder
        holds = any(os.path.dirname(each) == place for each in hidden)
        shown += [os.path.join(place, each) for each in os.listdir(place)] if holds else [place]
    version = _landlock_version()
    rights = RIGHTS[max(each for each in RIGHTS if each <= version)]
    ports = 0 if network or version < 4 else 3
    scopes = 0 if version < 6 else 3  # abstract sockets and signals
    attributes = struct.pack("<3Q", rights, ports, scopes)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(SYS_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    try:
        for place in (each for each in shown if each not in hidden):
            with contextlib.suppress(FileNotFoundError):
                folder = os.open(place, os.O_PATH | os.O_CLOEXEC)
                allowed = READ_FILE | READ_DIR if os.path.isdir(place) else READ_FILE | (place in DEVICES) * WRITE_FILE
                rule = struct.pack("<Qi", allowed, folder)
                done = _libc.syscall(SYS_ADD_RULE, ruleset, PATH_BENEATH, rule, 0) == 0
                os.close(folder)
                if not done:
                    return False
        return bool(_libc.syscall(SYS_RESTRICT_SELF, ruleset, 0) == 0)
    except OSError:  # the packages are in a folder of the server's user alone
        return False
    finally:
        os.close(ruleset)
