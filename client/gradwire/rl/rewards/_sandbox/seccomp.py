"""System calls that are denied to the policy's code: new processes, namespaces, mounts, other processes' memory."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
CLONE_THREAD = 0x00010000
LOAD, JUMP_IF_EQUAL, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF
X32 = 0x40000000  # x86-64's second table of system calls

# Numbers of linux/unistd.h; from 424 on they are the same on all architectures.
EVERYWHERE = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "pidfd_open": 434,
    "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip
ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        {
            "fork": 57, "vfork": 58, "ptrace": 101, "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166,
            "init_module": 175, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
            "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
            "process_vm_writev": 311, "finit_module": 313, "bpf": 321, "userfaultfd": 323,
        },
        {"clone": 56, "clone3": 435},
    ),
    "aarch64": (
        0xC00000B7,
        {
            "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "unshare": 97, "init_module": 105,
            "ptrace": 117, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241,
            "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
            "finit_module": 273, "bpf": 280, "userfaultfd": 282,
        },
        {"clone": 220, "clone3": 435},
    ),
}  # fmt: skip


def program(machine: str) -> bytes | None:
    """Build the BPF filter; None for a machine whose system calls are not listed.

    ``clone`` is allowed for threads only; ``clone3``, whose flags a filter cannot see, is reported as missing, so that
    libc falls back to ``clone``.
    """
    if machine not in ARCHITECTURES:
        return None
    architecture, refused, cloning = ARCHITECTURES[machine]
    numbers = sorted((refused | EVERYWHERE).values())

    def line(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    no_such_call, not_permitted = ERRNO | errno.ENOSYS, ERRNO | errno.EPERM
    body = [
        line(LOAD, 0, 0, 4),
        line(JUMP_IF_EQUAL, 1, 0, architecture),
        line(RETURN, 0, 0, not_permitted),
        line(LOAD, 0, 0, 0),
        line(JUMP_IF_SET, 0, 1, X32),
        line(RETURN, 0, 0, not_permitted),
        line(JUMP_IF_EQUAL, 0, 1, cloning["clone3"]),
        line(RETURN, 0, 0, no_such_call),
    ]
    for number in numbers:
        body += [line(JUMP_IF_EQUAL, 0, 1, number), line(RETURN, 0, 0, not_permitted)]
    body += [
        line(JUMP_IF_EQUAL, 0, 3, cloning["clone"]),
        line(LOAD, 0, 0, 16),  # low half of its first argument
        line(JUMP_IF_SET, 1, 0, CLONE_THREAD),
        line(RETURN, 0, 0, not_permitted),
        line(RETURN, 0, 0, ALLOW),
    ]
    return b"".join(body)


def install() -> bool:
    """Apply the filter to this process and its threads permanently; False if impossible. Needs no-new-privs."""
    content = program(os.uname().machine)
    if content is None:
        return False
    instructions = ctypes.create_string_buffer(content, len(content))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(content) // 8, ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0)
