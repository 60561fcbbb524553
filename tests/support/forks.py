"""Servers as forks of a process that has imported all they import: that is nine tenths of a start's processor time.

A process of pytest starts such a *stem* with its first server, and asks it for each. The stem has one thread and has
computed nothing, so that a fork of it differs from a new process only in what is imported. A fork is a child of the
process that asks; it has the command line, environment, folder and descriptors that it would have, and
runs its module as ``python -m`` does. So do a server's children and an engine's, which a stem of its own forks.

A server starts for real with ``GRADWIRE_TEST_REAL_START=1``, as in the slow lanes, where its test says so, and where
its environment differs from the stem's in more than :data:`FREE`: libraries read theirs when they are loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib.util
import itertools
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

FREE = ("GRADWIRE_", "PYTEST_", "GRPC_", "TORCHINDUCTOR_CACHE_DIR", "PYGAME_", "TRL_")
"""How variables begin that no server reads as it is imported, gRPC for example with the first channel. What tests and
libraries set for the rest of the suite belongs here, or every later server starts for real."""
MACHINES = ("x86_64", "aarch64")
FORKED = ("gradwire_server.cli", "gradwire_server.engine.process")
READ_AT_IMPORT = ("GRADWIRE_CRASH_FILE",)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
"""Of stems, whatever a test sets meanwhile."""
COMMAND_BYTES = 1 << 14
"""Room for a fork's command line, which is written over the stem's own."""
BOOT = "import sys; sys.path[0] = sys.argv[1]; from support.forks import be_a_stem; be_a_stem(int(sys.argv[2]))"


class Stem:
    """The asking end of a stem. Thread-safe."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()

    def fork(self, words: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], **more: bool) -> int:
        """Have a process forked; its id.

        Args:
            words: Those after ``python -m``.
            fds: Its file descriptors, and which of this process they are.
            more: ``session``: it begins one.
        """
        told = {"words": words, "env": dict(env), "fds": list(fds), "cwd": os.getcwd(), **more}
        with self._lock:
            socket.send_fds(self._link, [json.dumps(told).encode()], list(fds.values()))
            answer = self._link.recv(32)
        if not answer:
            raise RuntimeError("the process that servers are forked from ended; its traceback is in this test's stderr")
        return int(answer)


_stem: Stem | None = None
_starting = threading.Lock()


def stem() -> Stem:
    """The one of this process."""
    global _stem
    with _starting:
        _stem = _stem or _started()
    return _stem


def _started() -> Stem:
    from gradwire_server.engine_client.launcher import ENVIRONMENT as OF_ENGINES

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        tests, fd = str(Path(__file__).parents[1]), theirs.fileno()
        words = [sys.executable, "-c", BOOT, tests, str(fd), " " * COMMAND_BYTES]
        process = subprocess.Popen(words, pass_fds=[fd], env=OF_ENGINES | ENVIRONMENT, stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return Stem(ours)


class ForkedProcess(subprocess.Popen[str]):
    """A process that the stem forks for this one. It heeds Popen's ``env``, descriptors and session."""

    def _execute_child(
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Sequence[int], cwd: Any,
        env: Mapping[str, str] | None, *more: Any,
    ) -> None:  # fmt: skip
        pipes = more[3:9]  # the child's end and ours for stdin, ours and the child's for stdout and for stderr; or -1
        fds = {fd: fd if end == -1 else end for fd, end in enumerate((pipes[0], pipes[3], pipes[5]))}
        fds |= {fd: fd for fd in pass_fds}
        self.pid = stem().fork(args[2:], os.environ if env is None else env, fds, session=more[14])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def changed(env: Mapping[str, str]) -> set[str]:
    """Variables that differ from the stem's, and that an import may read."""
    different = {name for name in {*env, *ENVIRONMENT} if env.get(name) != ENVIRONMENT.get(name)}
    return {name for name in different if not name.startswith(FREE) or name in READ_AT_IMPORT}


def kind(command: Sequence[str], env: Mapping[str, str]) -> type[subprocess.Popen[str]]:
    """What starts a command: a fork, if it does the same as a process of its own."""
    ours = [*command[:2]] == [sys.executable, "-m"] and command[2] in FORKED
    forks = platform.machine() in MACHINES and not os.environ.get("GRADWIRE_TEST_REAL_START")
    return ForkedProcess if forks and ours and not changed(env) else subprocess.Popen


FRONT, ENGINE = "gradwire_server.cli", "gradwire_server.engine.process"
BOUNDED = ("gradwire_server.tokenizing.process", "gradwire_server.doors.http.tinker.batch_process")
IMPORTED = [f"{FRONT}.app", "gradwire_server.server", f"{ENGINE}.__main__", *BOUNDED]
if importlib.util.find_spec("bitsandbytes"):
    IMPORTED.append("peft.tuners.lora.bnb")  # by an engine's first adapter
CLONE = {"x86_64": 56, "aarch64": 220}
"""Number of the system call."""
CLONE_PARENT, PR_GET_TID_ADDRESS = 0x8000, 40
MESSAGE_BYTES = 1 << 17


def be_a_stem(fd: int) -> None:
    """Import all, and fork whatever is asked for; returns in the forks only, after their program."""
    from gradwire_server.cli.event_loop import GRPC

    os.environ.update(GRPC | os.environ)  # before gRPC's import
    for module in IMPORTED:
        importlib.import_module(module)
    for main in (f"{ENGINE}.__main__", *BOUNDED):  # so that it runs as a main program that nobody imported
        del sys.modules[main]
    assert len(os.listdir("/proc/self/task")) == 1, "an import starts threads, which a fork does not have"
    gc.collect()
    gc.freeze()  # no collection writes to the pages that forks share
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the end of the link ends this process
    _serve(socket.socket(fileno=fd))


def _serve(link: socket.socket) -> None:
    while True:
        message, fds, *_ = socket.recv_fds(link, MESSAGE_BYTES, 16)
        if not message:
            os._exit(0)
        if not (pid := _fork_sibling()):
            link.close()
            return _run(json.loads(message), fds)
        link.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def _fork_sibling() -> int:
    """fork(2), but the new process is a child of this one's parent, which can wait for it as for any other child."""
    api, tid = ctypes.pythonapi, ctypes.POINTER(ctypes.c_int)()
    api.prctl(PR_GET_TID_ADDRESS, ctypes.byref(tid))
    api.PyOS_BeforeFork()
    pid: int = api.syscall(CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        api.PyOS_AfterFork_Parent()
    else:
        if tid:
            tid[0] = os.getpid()  # the C library's note of the thread's number, which its fork(3) keeps right
        api.PyOS_AfterFork_Child()
    return pid


def _run(told: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Run a module as ``python -m`` does."""
    wanted, above = told["fds"], max(told["fds"]) + 1
    for fd, moved in zip(wanted, [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds], strict=True):
        os.dup2(moved, fd)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    for low, high in itertools.pairwise([*sorted(wanted), highest + 1]):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    if told.get("session"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()
    sys.path[0] = told["cwd"]
    module, *sys.argv[1:] = told["words"]
    _show([sys.executable, "-m", *told["words"]])
    if told["words"][:2] == [FRONT, "serve"] or (module == ENGINE and '"ranks":1,' not in " ".join(sys.argv)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            ours.close()
            return _be_a_childs_stem(theirs)
        theirs.close()
        _fork_children(Stem(ours))
    _run_and_end(module)


def _run_and_end(module: str) -> NoReturn:
    """Run a program, and end without taking its modules apart, which costs over a second of a processor."""
    code: Any = 0
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show(words: Sequence[str]) -> None:
    """Write these where others read this process's command line."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = "\0".join(words).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def _be_a_childs_stem(link: socket.socket) -> None:
    """Fork children for a front or an engine, and do not hold its pipes and sockets open."""
    _show(["stem"])
    os.closerange(3, link.fileno())
    os.closerange(link.fileno() + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(link)


def _fork_children(own: Stem) -> None:
    """Have this process's children forked: of an engine its ranks, of a front engines that would have all GPUs, too."""
    global _stem
    from gradwire_http import child_processes
    from gradwire_server.engine.process import ranks
    from gradwire_server.engine_client.launcher import environment

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        module = command[2] if command[1] == "-m" else ""
        forked = module in (*BOUNDED, f"{ENGINE}.follower") or (module == ENGINE and options["env"] == environment())
        return (ForkedProcess if forked else subprocess.Popen)(command, **options)

    _stem = own
    child_processes.Popen = start  # type: ignore[assignment,misc]
    ranks.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
