"""Launch of an engine as a child process on this machine, with a link and a page of marks shared with it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from gradwire_server.config import EngineSettings
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.engine_link.frames import AsyncEngineLink

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}
"""Of the engine, where nobody says otherwise.

OpenMP's threads wait asleep, because threads that spin slow the engine several times over on a machine with other work.
But first they spin a thousand times, some 15 to 50 us, as GCC's OpenMP does where threads outnumber processors: most
operations of a small model follow the one before within that time, and waking a sleeping thread takes longer. On two
idle cores 1.1 to 1.5 times the tokens a second; beside two busy programs 0.5 to 0.7 times (benchmarks/README.md).

Blocks of 4 MiB or more are mapped and go back at once when they are freed: glibc before 2.38 hardly reuses an aligned
block within its heap. A new mapping costs the kernel its pages: a training step on 5 M weights took 1.35 times the
processor time of glibc's own choice with blocks of a MiB mapped, and takes 1.11 times now.
"""


async def launch(
    settings: EngineSettings, number: int, engines: int
) -> tuple[asyncio.subprocess.Process, AsyncEngineLink, CrashMarks, socket.socket]:
    """Start an engine's process; its first frame says hello, or what stopped its start.

    The socket is where its ranks send their pulses, if it has several.

    Args:
        number: The engine's number; no two engines with one state folder have the same.
        engines: Number of engines, which share the machine's memory and processors.

    Raises:
        OSError: The process cannot be started.
    """
    ours, theirs = socket.socketpair()
    listening, pulses = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.setblocking(False)
    marks = CrashMarks()
    try:
        with theirs, pulses:
            process = await asyncio.create_subprocess_exec(
                *command(settings, number, engines, theirs.fileno(), marks.fd, pulses.fileno()),
                pass_fds=[theirs.fileno(), marks.fd, pulses.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                env=environment(),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        listening.close()
        marks.close()
        raise
    return process, AsyncEngineLink(ours), marks, listening


def environment() -> dict[str, str]:
    """Variables of the engine's process: this process's own, and of :data:`ENVIRONMENT` what nobody has set."""
    ours = dict(ENVIRONMENT)
    if "OMP_WAIT_POLICY" in os.environ:
        del ours["GOMP_SPINCOUNT"]  # it would take precedence over the policy that somebody chose
    return ours | os.environ | {"TOKENIZERS_PARALLELISM": "false"}


def command(settings: EngineSettings, number: int, engines: int, fd: int, marks_fd: int, pulses_fd: int) -> list[str]:
    """The command line of an engine's process."""
    words = [sys.executable, "-m", "gradwire_server.engine.process", "--fd", str(fd), "--marks", str(marks_fd)]
    words += ["--pulses", str(pulses_fd), "--number", str(number), "--engines", str(engines)]
    return [*words, "--settings", settings.model_dump_json()]
