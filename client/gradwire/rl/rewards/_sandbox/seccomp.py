"""The system calls that others' code may use; every other one is refused, also those of later kernels.

They compute, keep time, run threads, and use the files that can be opened. There are no other processes, signals to
them, namespaces, mounts, keys, devices' controls, and no sockets but a stream's connected pair, which event loops need.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
CLONE_THREAD = 0x00010000
LOAD, AND, JUMP_IF_EQUAL, JUMP_IF_SET, RETURN = 0x20, 0x54, 0x15, 0x45, 0x06  # of classic BPF
X32 = 0x40000000  # x86-64's second table of system calls
IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
"""Whether a file is a terminal, what can be read of it, and whether it blocks and is inherited."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, SOCK_STREAM, SOCK_KINDS = 1, 2, 10, 16, 1, 0xF

# Name -> its number on x86-64 and on aarch64, of linux/unistd.h; None where there is none.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "lseek": (8, 62), "open": (2, None), "openat": (257, 56), "close": (3, 57), "close_range": (436, 436),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "fcntl": (72, 25),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "getdents": (78, None),
    "getdents64": (217, 61), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "symlink": (88, None), "symlinkat": (266, 36), "ftruncate": (77, 46), "truncate": (76, 45), "fsync": (74, 82),
    "fdatasync": (75, 83), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88),
    "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44), "fadvise64": (221, 223), "fallocate": (285, 47),
    "copy_file_range": (326, 285), "sendfile": (40, 71), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226),
    "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214), "msync": (26, 227), "mincore": (27, 232),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "futex": (202, 98), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "set_tid_address": (218, 96), "rseq": (334, 293), "membarrier": (324, 283),
    "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94), "gettid": (186, 178),
    "getpid": (39, 172), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "capget": (125, 90), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "getpriority": (140, 141), "getcpu": (309, 168), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "uname": (63, 160), "sysinfo": (99, 179),
    "getrandom": (318, 278), "wait4": (61, 260), "waitid": (247, 95), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204), "getsockopt": (55, 209),
}  # fmt: skip
NETWORK: dict[str, tuple[int | None, int | None]] = {
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "getpeername": (52, 205), "setsockopt": (54, 208), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "sendmmsg": (307, 269), "recvmmsg": (299, 243),
}  # fmt: skip
CONDITIONAL: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "clone3": (435, 435), "tgkill": (234, 131), "ioctl": (16, 29), "prlimit64": (302, 261),
    "socket": (41, 198), "socketpair": (53, 199),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its place in the pairs above, and its number in a filter."""


def program(machine: str, pid: int, network: bool = False) -> bytes | None:
    """Build the BPF filter of a process; None for a machine whose system calls are not listed.

    ``clone`` is allowed for threads only; ``clone3``, whose flags a filter cannot see, is reported as missing, so that
    libc falls back to ``clone``. A thread may send signals to its own process, as ``abort`` does.

    Args:
        network: Allow sockets of the internet, too.
    """
    if machine not in ARCHITECTURES:
        return None
    place, architecture = ARCHITECTURES[machine]

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    allow, refuse = line(RETURN, ALLOW), line(RETURN, ERRNO | errno.EPERM)

    def argument(number: int) -> bytes:
        return line(LOAD, 16 + 8 * number)  # its low half, on both machines

    def one_of(*values: int) -> list[bytes]:
        return [part for value in values for part in (line(JUMP_IF_EQUAL, value, 0, 1), allow)] + [refuse]

    def call(name: str, *body: bytes) -> list[bytes]:
        return [line(JUMP_IF_EQUAL, CONDITIONAL[name][place], 0, len(body)), *body]

    stream_pair = [line(JUMP_IF_EQUAL, AF_UNIX, 1, 0), refuse, argument(1), line(AND, SOCK_KINDS), *one_of(SOCK_STREAM)]
    families = (AF_INET, AF_INET6, AF_NETLINK) if network else ()
    lines = [
        line(LOAD, 4), line(JUMP_IF_EQUAL, architecture, 1, 0), refuse,
        line(LOAD, 0), line(JUMP_IF_SET, X32, 0, 1), refuse,
        *call("clone3", line(RETURN, ERRNO | errno.ENOSYS)),
        *call("clone", argument(0), line(JUMP_IF_SET, CLONE_THREAD, 0, 1), allow, refuse),
        *call("tgkill", argument(0), *one_of(pid)),
        *call("prlimit64", argument(0), *one_of(0)),
        *call("ioctl", argument(1), *one_of(*IOCTLS)),
        *call("socketpair", argument(0), *stream_pair),
        *call("socket", argument(0), *one_of(*families)),
    ]  # fmt: skip
    for numbers in (CALLS | NETWORK if network else CALLS).values():
        if (number := numbers[place]) is not None:
            lines += [line(JUMP_IF_EQUAL, number, 0, 1), allow]
    return b"".join([*lines, refuse])


def install(network: bool = False) -> bool:
    """Apply the filter to this process and its threads permanently; False if impossible. Needs no-new-privs."""
    content = program(os.uname().machine, os.getpid(), network)
    if content is None:
        return False
    instructions = ctypes.create_string_buffer(content, len(content))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(content) // 8, ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0)
