"""The setup of every process of an engine before it computes.

Operations of a model follow one another within some 100 us, and waking a thread that sleeps takes as long as many of
them: with threads that spin, a token of 32 samples of SmolLM2-135M took 114 ms on two idle cores instead of 165. Beside
a busy program they take the processor from the thread that is waited for: 355 ms instead of 165.

GCC's OpenMP decides it by the number of its threads: where they outnumber the processors, they wait as briefly as the
policy says (libgomp's manual, ``GOMP_SPINCOUNT``), which is not at all with ``OMP_WAIT_POLICY=PASSIVE``. So
:class:`IdleThreads` lets them sleep by threads that do nothing."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from gradwire_losses.registry import load_builtin_losses, load_loss_file, load_plugin_losses
from gradwire_proto.v1 import training_pb2

from gradwire_server.config import EngineSettings
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.machine import Share
from gradwire_server.engine.model.layers.cpu_kernels import cpu_kernels
from gradwire_server.observability import logs


def check_settings(settings: EngineSettings) -> None:
    """Register the losses of the files, and look for the device.

    Raises:
        OperationError: INVALID_ARGUMENT or UNSUPPORTED, naming the flag.
    """
    if settings.device:
        _check_device(settings.device)
    if settings.deterministic and (reason := why_not_exact(settings)):
        raise OperationError(training_pb2.ERROR_CODE_UNSUPPORTED, f"--deterministic: {reason}")
    if settings.num_ranks > 1 or settings.shard == "on":
        _check_ranks(settings)
    for file in settings.losses:
        try:
            load_loss_file(file)
        except Exception as error:  # a user's file may raise anything
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"--losses {file}{_line(error, file)}: {type(error).__name__}: {error}",
            ) from error


def _check_device(name: str) -> None:
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or (device.type != "cuda" and name != "cpu"):  # torch knows more kinds, the engine does not
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"--device {name}: there is no such device; give cpu, cuda or cuda:N",
        )
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        devices = "no CUDA device" if count == 0 else f"{count} CUDA devices, numbered from 0"
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"--device {name}: torch {torch.__version__} finds {devices} here; `gradwire doctor` looks for the reason,"
            " and --device cpu trains without one",
        )


def why_not_exact(settings: EngineSettings) -> str:
    """What keeps an engine from computing deterministic runs; empty if it can."""
    if settings.device.startswith("cuda") or (not settings.device and torch.cuda.is_available()):
        return "no kernels of a GPU have the same bits in sampling and training yet; give --device cpu"
    if settings.dtype not in (None, "float32", "bfloat16"):
        return f"--dtype {settings.dtype} is not computed so; give float32 or bfloat16"
    if settings.kernels == "plain" or settings.compile or settings.quantize or settings.shard == "on":
        return "leave out --kernels plain, --compile, --quantize and --shard on, which compute in other ways"
    if settings.sampler != "local":
        return "vLLM computes in other ways; leave out --sampler"
    if cpu_kernels() is None:
        return "it needs a C compiler (install gcc or clang, or name one by CC)"
    return ""


def _check_ranks(settings: EngineSettings) -> None:
    count = torch.cuda.device_count() if settings.device in ("", "cuda") else 0
    if settings.num_ranks & (settings.num_ranks - 1):
        reason = "the work is divided in halves; give a power of two"
    elif settings.device not in ("", "cpu", "cuda"):
        reason = f"--device {settings.device}: with several ranks, each has a GPU of its own; give cuda or cpu"
    elif settings.device != "cpu" and 0 < count < settings.num_ranks:
        reason = f"torch finds {count} CUDA devices here; give at most as many ranks, or --device cpu"
    elif settings.sampler != "local":
        reason = "--sampler vllm works with one rank only; leave one of the two out"
    elif settings.shard == "on" and settings.quantize:
        reason = f"weights held as {settings.quantize} cannot be divided among ranks; leave out --shard or --quantize"
    elif settings.shard == "on" and settings.ranks == 1:
        reason = "--shard on divides weights among several ranks; give more of them, or leave it out"
    else:
        return
    raise OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, f"--ranks {settings.ranks}: {reason}")


def _line(error: Exception, file: Path) -> str:
    """The line of the file at which it failed, as ", line N"."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


LOOK_S = 0.25
"""Seconds between two looks at how long this process's threads waited for processors."""
IDLE = 0.1
"""Share of a look in which so little is computed that there is nothing to choose."""
CONTENDED = 0.15
"""Share of the time, computing and waiting for a processor, that threads wait for one when others want it. It was at
most 0.013 on two idle cores, 0.08 beside a program that used a tenth of a core, and 0.27 to 0.54 beside busy ones."""


class IdleThreads:
    """Let the other threads of OpenMP sleep or spin.

    Args:
        threads: Number of threads that compute.

    Raises:
        OSError: This process does not use GCC's OpenMP.
    """

    def __init__(self, threads: int) -> None:
        self._openmp = ctypes.CDLL(_library())
        self._more = max(0, len(os.sched_getaffinity(0)) - threads) + 1
        self._end: threading.Event | None = None
        self._computed = time.process_time()
        self._times: dict[str, tuple[int, int]] | None = None

    @property
    def asleep(self) -> bool:
        """Whether they sleep as soon as they have nothing to do."""
        return self._end is not None

    def sleep(self) -> None:
        """Let them sleep as soon as they have nothing to do."""
        if self._end is not None:
            return
        self._end, begun = threading.Event(), threading.Event()
        threading.Thread(target=self._outnumber, args=(self._end, begun), name="outnumber", daemon=True).start()
        begun.wait()

    def spin(self) -> None:
        """Let them spin for a while before they sleep, from a moment on."""
        if self._end is not None:
            self._end.set()
            self._end = None

    def watch(self) -> None:
        """Choose between the two from now on, in a thread of its own."""
        threading.Thread(target=self._watch, name="idle-threads", daemon=True).start()

    def look(self) -> None:
        """Choose by what happened since the look before."""
        computed_before, self._computed = self._computed, time.process_time()
        if self._computed - computed_before < IDLE * LOOK_S:
            self._times = None
            return
        before, self._times = self._times, processor_times()
        if before is not None:
            self.sleep() if contended(before, self._times) else self.spin()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look()

    def _outnumber(self, end: threading.Event, begun: threading.Event) -> None:
        """Have more threads of OpenMP than processors until the end; they end with the thread that has them."""
        nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
        self._openmp.GOMP_parallel(nothing, None, ctypes.c_uint(self._more + 1), ctypes.c_uint(0))
        begun.set()
        end.wait()


def contended(before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> bool:
    """Whether others want the processors, given two looks at the times of this process's threads."""
    both = [(*before[thread], *now[thread]) for thread in before.keys() & now.keys()]
    ran = sum(ran_now - ran for ran, _, ran_now, _ in both)
    waited = sum(waited_now - waited for _, waited, _, waited_now in both)
    return waited > CONTENDED * (ran + waited)


def processor_times() -> dict[str, tuple[int, int]]:
    """Nanoseconds in which each of this process's threads ran, and waited for a processor."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            ran, waited, _ = map(int, (task / "schedstat").read_text().split())
        except OSError:  # it has ended
            continue
        times[task.name] = ran, waited
    return times


def _library() -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if Path(name).name.startswith("libgomp"):
            return name
    raise OSError("no library of GCC's OpenMP is loaded")


logger = logging.getLogger(__name__)


def set_up(settings: EngineSettings, name: str, share: Share) -> None:
    """Set up logs, signals and threads.

    Args:
        name: The process's in the log.
    """
    logs.configure(settings.log_level, settings.log_format, name)
    # peft asks transformers by a name that transformers has renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front shuts us down in order
    # Also where nobody says how many: once torch has been told, MKL no longer takes fewer as it likes.
    threads = settings.threads or max(1, torch.get_num_threads() // share.engines)
    torch.set_num_threads(threads)
    if threads > 1 and os.environ.get("OMP_WAIT_POLICY") == "PASSIVE":
        try:
            IdleThreads(threads).watch()
        except OSError as error:
            logger.info("idle threads wait in one way, whatever else the machine does: %s", error)


def load_losses(settings: EngineSettings) -> None:
    """Register all losses, and check what only a process with torch can check.

    Raises:
        OperationError: A setting is wrong; it names the flag.
    """
    load_builtin_losses()
    load_plugin_losses()
    check_settings(settings)
