"""Child processes that start beside the event loop.

The thread that starts a process waits until that executes its program: on a busy machine for a second, in which a loop
would serve nobody. asyncio and uvloop start theirs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from asyncio.base_subprocess import BaseSubprocessTransport
from asyncio.subprocess import Process, SubprocessStreamProtocol
from subprocess import Popen
from typing import IO, Any


class _Transport(BaseSubprocessTransport):
    """asyncio's transport for a process that runs already, on any loop."""

    def _start(self, *_: Any, **given: Any) -> None:
        self._proc, self._ended = given["process"], given["ended"]
        self._ended.add_done_callback(lambda ended: self._process_exited(ended.result()))

    async def _wait(self) -> int:
        """Wait for the process alone: asyncio of Python 3.11 also waits for whoever else holds its pipes."""
        code: int = await asyncio.shield(self._ended)
        return code


async def start_process(
    *command: str,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    limit: int = 1 << 16,
    **options: Any,
) -> Process:
    """Start a process as :func:`asyncio.create_subprocess_exec` does, without holding the event loop.

    If it is cancelled it waits for the start all the same, as the process needs the descriptors that it is to inherit;
    then it ends the process.

    Args:
        limit: Bytes of output that are read ahead.
        options: Options of :class:`subprocess.Popen`.

    Raises:
        OSError: The process cannot be started.
    """
    loop = asyncio.get_running_loop()
    started: asyncio.Future[Popen[bytes]] = loop.create_future()
    ended: asyncio.Future[int] = loop.create_future()

    def run() -> None:
        try:
            process = Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, **options)
        except Exception as error:
            loop.call_soon_threadsafe(started.set_exception, error)
            return
        loop.call_soon_threadsafe(started.set_result, process)
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            loop.call_soon_threadsafe(ended.set_result, code)

    # A thread that lasts as long as the process: an engine dies with the thread that started it (PR_SET_PDEATHSIG).
    threading.Thread(target=run, name=f"parent of {command[0]}", daemon=True).start()
    cancelled: asyncio.CancelledError | None = None
    while not started.done():
        try:
            await asyncio.wait([started])
        except asyncio.CancelledError as error:
            cancelled = error
    protocol, connected = SubprocessStreamProtocol(limit, loop), loop.create_future()
    transport = _Transport(
        loop, protocol, command, False, stdin, stdout, stderr, 0, connected, process=started.result(), ended=ended
    )
    try:
        if cancelled is not None:
            raise cancelled
        await connected
    except BaseException:
        transport.close()
        await transport._wait()
        raise
    return Process(transport, protocol, loop)
