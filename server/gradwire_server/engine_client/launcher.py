"""Launch of an engine as a child process on this machine, with a link and a page of marks shared with it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from gradwire_http.child_processes import start_process
from gradwire_proto.v1 import engine_pb2

from gradwire_server.config import EngineSettings
from gradwire_server.engine_client.client import EngineAnswer
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.engine_link.frames import AsyncEngineLink
from gradwire_server.engine_link.pulses import MAX_PULSE_BYTES

log = logging.getLogger(__name__)

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""Default environment variables of the engine's process.

OpenMP's threads spin ten thousand times, some 150 to 500 us, before they sleep: most operations of a model follow the
one before within that time, and waking a thread that sleeps takes as long as many of them. While others want the
processors, the engine lets them sleep at once (:mod:`gradwire_server.engine.process.setup`).

Blocks of 4 MiB or more are mapped and go back at once when they are freed: glibc before 2.38 hardly reuses an aligned
block within its heap. A new mapping costs the kernel its pages: a training step on 5 M weights took 1.35 times the
processor time of glibc's own choice with blocks of a MiB mapped, and takes 1.11 times now. With blocks of up to 16 MiB
in the heap, LoRA on experts took 1.75 times the memory that is estimated. Smaller blocks stay, up to 64 MiB: with
glibc's 128 KiB, an engine that only samples got its pages from the kernel for each token anew, and drawing one for 128
rows of a vocabulary of 4,096 took 2 to 4 times the processor time.
"""


class LocalLauncher:
    """Launcher of an engine's processes on this machine.

    Args:
        number: Its number; no two engines with one state folder have the same.
        engines: Number of engines, which share the machine's memory and processors.
    """

    machine = folder = ""
    is_away = False
    pauses_s = (0.0, 0.5, 2.0, 5.0, 15.0, 30.0)

    def __init__(self, settings: EngineSettings, number: int, engines: int) -> None:
        self.settings, self._number, self._engines = settings, number, engines
        self.models = settings.allow_models.keys() | settings.models.keys()
        self._ways = ways(settings)

    @property
    def num_ways(self) -> int:
        return len(self._ways)

    async def launch(self, failed_starts: int) -> LocalLife:
        """Start a process, of fewer ranks if it has to be and may be."""
        ranks, first = self._ways[failed_starts % len(self._ways)]
        if ranks == self.settings.num_ranks:
            return await launch(self.settings, self._number, self._engines)
        log.warning(
            "engine %d has not started %d times, and is tried with %d of %d ranks; a restart of the server tries all",
            self._number, failed_starts, ranks, self.settings.num_ranks,
        )  # fmt: skip
        fewer = self.settings.model_copy(update={"ranks": ranks, "min_ranks": 0})
        return await launch(fewer, self._number, self._engines, gpus=range(first, first + ranks))


def ways(settings: EngineSettings) -> list[tuple[int, int]]:
    """Numbers of ranks to start with, and the first of the GPUs, one after another as long as the start fails.

    All twice, then halves: a block of GPUs without the one that fails is among them.
    """
    ranks = settings.num_ranks
    if not 0 < settings.min_ranks < ranks:
        return [(ranks, 0)]
    pairs = [(ranks, 0)] * 2
    while (ranks := ranks // 2) >= settings.min_ranks:
        blocks = range(1) if settings.device == "cpu" else range(settings.num_ranks // ranks)
        pairs += [(ranks, block * ranks) for block in blocks]
    return pairs


class LocalLife:
    """A process on this machine.

    Attributes:
        process, link, marks: The process, the link to it, and the page of marks that is shared with it.

    Args:
        pulses: Where its ranks send their pulses.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, link: AsyncEngineLink, marks: CrashMarks, pulses: socket.socket
    ) -> None:
        self.process, self.link, self.marks, self._pulses = process, link, marks, pulses
        self.send, self.answered, self.stop = link.send, marks.answered, marks.stop

    async def receive(self) -> EngineAnswer:
        return await self.link.receive(engine_pb2.EngineReply)

    async def withdraw(self, request_id: int) -> bool:
        return self.marks.withdraw(request_id)

    def suspects(self, unanswered: Sequence[int]) -> Collection[int]:
        """The requests that the engine marked as begun; the oldest unanswered one if it marked none."""
        return self.marks.begun or set(unanswered[:1])

    async def pulse(self) -> engine_pb2.EnginePulse | None:
        message = await asyncio.get_running_loop().sock_recv(self._pulses, MAX_PULSE_BYTES)
        return engine_pb2.EnginePulse.FromString(message) if message else None

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def exited(self) -> None:
        await self.process.wait()

    async def end(self) -> str:
        self.kill()
        code = await self.process.wait()
        self.link.close()
        self._pulses.close()
        return f"process {self.process.pid} ended with code {code}"

    def close(self) -> None:
        self.marks.close()


async def launch(
    settings: EngineSettings,
    number: int,
    engines: int,
    staging: Path | None = None,
    lease_ns: int = 0,
    gpus: Sequence[int] | None = None,
) -> LocalLife:
    """Start an engine's process; its first frame says hello, or what stopped its start.

    Args:
        number: The engine's number; no two engines with one state folder have the same.
        engines: Number of engines, which share the machine's memory and processors.
        staging: Folder through which it writes all that others are to find; by default beside the places themselves.
        lease_ns: End of its lease, as in :class:`.CrashMarks`; 0 for an engine that needs none.
        gpus: Indices of the visible GPUs that it uses; by default all.

    Raises:
        OSError: The process cannot be started.
    """
    ours, theirs = socket.socketpair()
    listening, pulses = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.setblocking(False)
    marks = CrashMarks()
    marks.lease_ns = lease_ns
    words = [] if staging is None else ["--staging", str(staging)]
    try:
        with theirs, pulses:
            process = await start_process(
                *command(settings, number, engines, theirs.fileno(), marks.fd, pulses.fileno()),
                *words,
                pass_fds=[theirs.fileno(), marks.fd, pulses.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                env=environment(gpus),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        listening.close()
        marks.close()
        raise
    return LocalLife(process, AsyncEngineLink(ours), marks, listening)


def environment(gpus: Sequence[int] | None = None) -> dict[str, str]:
    """Variables of the engine's process: this process's own, and of :data:`ENVIRONMENT` what nobody has set.

    Args:
        gpus: Indices of the visible GPUs that it uses; by default all.
    """
    ours = dict(ENVIRONMENT)
    if "OMP_WAIT_POLICY" in os.environ:
        del ours["GOMP_SPINCOUNT"]  # it would take precedence over the policy that somebody chose
    variables = ours | os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if gpus is not None:
        visible = variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if variables.get("CUDA_VISIBLE_DEVICES") else []
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)
    return variables


def command(settings: EngineSettings, number: int, engines: int, fd: int, marks_fd: int, pulses_fd: int) -> list[str]:
    """The command line of an engine's process."""
    words = [sys.executable, "-m", "gradwire_server.engine.process", str(os.getpid()), "--fd", str(fd)]
    words += ["--marks", str(marks_fd), "--pulses", str(pulses_fd), "--number", str(number), "--engines", str(engines)]
    return [*words, "--settings", settings.model_dump_json()]
