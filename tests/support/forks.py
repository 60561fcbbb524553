"""Our programs as forks of a process that has imported all they import: nine tenths of a start's processor time.

A process of pytest starts such a *stem* with its first program, and asks it for each. The stem has one thread and has
computed nothing, so that a fork of it differs from a new process only in what is imported. A fork is a child of the
process that asks; it has the command line, environment, folder and descriptors that it would have, and
runs its module as ``python -m`` does. So do a server's children and an engine's, which a stem of its own forks.

Whatever starts one of :data:`FORKED` by :mod:`subprocess` gets a fork, in the code under test as well. A program starts
for real with ``GRADWIRE_TEST_REAL_START=1``, as in the slow lanes, where its test says so, and where its environment
differs from the stem's in more than :data:`FREE`: libraries read theirs when they are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import itertools
import json
import os
import platform
import queue
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

FREE = (
    "GRADWIRE_", "PYTEST_", "GRPC_", "TORCHINDUCTOR_CACHE_DIR", "PYGAME_", "TRL_", "COLUMNS", "CUDA_VISIBLE_DEVICES",
    "PYTHONUNBUFFERED",
)  # fmt: skip
"""How variables begin that no program reads as it is imported, gRPC for example with the first channel. What tests and
libraries set for the rest of the suite belongs here, or every later server starts for real."""
MACHINES = ("x86_64", "aarch64")
FRONT, ENGINE, CLIENT = "gradwire_server.cli", "gradwire_server.engine.process", "gradwire.cli"
JOBS = ("gradwire_jobs", "gradwire_jobs.grade", "gradwire_jobs.check")
FORKED = (FRONT, ENGINE, CLIENT, *JOBS)
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

    def fork(self, words: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], cwd: str, **more: bool) -> int:
        """Have a process forked; its id.

        Args:
            words: Those after ``python -m``.
            fds: Its file descriptors, and which of this process they are.
            cwd: Its folder.
            more: ``session``: it begins one; ``group``: it is the first of a process group.
        """
        told = {"words": words, "env": dict(env), "fds": list(fds), "cwd": cwd, "umask": _umask(), **more}
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
        process = _lasting(words, pass_fds=[fd], env=OF_ENGINES | ENVIRONMENT, stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return Stem(ours)


def _umask() -> int:
    """This process's mask of file modes; to ask the system for it changes it, also for other threads."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Umask:")[2].split()[0], 8)


def _lasting(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a thread that does not end: its forks are that thread's children, and may die with it."""
    started: queue.SimpleQueue[subprocess.Popen[Any]] = queue.SimpleQueue()

    def run() -> None:
        started.put(subprocess.Popen(words, **options))
        threading.Event().wait()

    threading.Thread(target=run, name="parent of the stem", daemon=True).start()
    return started.get()


class RealProcess(subprocess.Popen[Any]):
    """A process that starts as it would without :func:`install`."""

    _execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class ForkedProcess(subprocess.Popen[Any]):
    """A process that the stem forks for this one. It heeds Popen's ``cwd``, ``env``, descriptors, session and group."""

    def _execute_child(
        self, args: Sequence[Any], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Sequence[int], cwd: Any,
        env: Mapping[str, str] | None, *more: Any,
    ) -> None:  # fmt: skip
        pipes = more[3:9]  # the child's end and ours for stdin, ours and the child's for stdout and for stderr; or -1
        fds = {fd: fd if end == -1 else end for fd, end in enumerate((pipes[0], pipes[3], pipes[5]))}
        fds |= {fd: fd for fd in pass_fds}
        words, folder = [os.fspath(word) for word in args[2:]], os.fspath(cwd) if cwd else os.getcwd()
        environment = os.environ if env is None else env
        self.pid = stem().fork(words, environment, fds, folder, session=more[14], group=more[15] == 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def install() -> None:
    """Have this process's children forked where that does the same."""
    if platform.machine() not in MACHINES or os.environ.get("GRADWIRE_TEST_REAL_START"):
        return
    from support.blocking import DETECTOR

    def execute_child(
        process: subprocess.Popen[Any], args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, *more: Any,
    ) -> None:  # fmt: skip
        plain = executable is preexec_fn is None and not more[2] and more[10:13] == (None, None, None)
        forks = plain and close_fds and more[15] in (-1, 0) and forkable(args, os.environ if env is None else env)
        how = ForkedProcess if forks else RealProcess
        with DETECTOR.excused() if forks else contextlib.nullcontext():  # the stem's start
            how._execute_child(process, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def changed(env: Mapping[str, str], before: Mapping[str, str] = ENVIRONMENT) -> set[str]:
    """Variables that differ from the stem's, and that an import may read."""
    different = {name for name in {*env, *before} if env.get(name) != before.get(name)}
    return {name for name in different if not name.startswith(FREE) or name in READ_AT_IMPORT}


def forkable(command: Any, env: Mapping[str, str]) -> bool:
    """Whether a fork does the same as a process of its own."""
    if not isinstance(command, (list, tuple)) or not all(isinstance(word, (str, Path)) for word in command):
        return False
    return [*command[:2]] == [sys.executable, "-m"] and command[2] in FORKED and not changed(env)


BOUNDED = ("gradwire_server.tokenizing.process", "gradwire_server.doors.http.tinker.batch_process")
IMPORTED = [
    f"{FRONT}.app", "gradwire_server.server", f"{ENGINE}.__main__", *BOUNDED, f"{CLIENT}.app", f"{FRONT}.estimate",
    "gradwire_jobs.worker", *JOBS[1:],
]  # fmt: skip
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
    for main in (f"{ENGINE}.__main__", *BOUNDED, *JOBS[1:]):  # so that it runs as a main program that nobody imported
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
    os.umask(told["umask"])
    if told.get("session"):
        os.setsid()
    if told.get("group"):
        os.setpgid(0, 0)
    if "PYTHONUNBUFFERED" in told["env"]:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
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
        forked = forked or (module in JOBS and not changed(options.get("env") or os.environ, before))
        return (ForkedProcess if forked else subprocess.Popen)(command, **options)

    _stem, before = own, dict(os.environ)
    child_processes.Popen = start  # type: ignore[assignment,misc]
    ranks.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
