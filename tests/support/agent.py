"""A real agent process, as an operator starts it, and a relay of TCP that can be cut on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from support.blocking import DETECTOR


class Agent:
    """`gradwire engine` as a child process."""

    def __init__(self, address: str, *flags: str, name: str = "other") -> None:
        self._command = [sys.executable, "-m", "gradwire_server.cli", "engine", "--front", f"http://{address}"]
        self._command += ["--name", name, *flags]

    def start(self) -> Agent:
        with DETECTOR.excused():
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=environment)
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            sys.stderr.write(line)

    @property
    def engine_pid(self) -> int | None:
        """The process of the present engine; None while there is none."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.wait()

    def wait(self) -> int:
        with DETECTOR.excused():
            code = self.process.wait(120)
            self._reader.join(120)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


class Wire:
    """A relay of TCP on loopback, in a thread of its own.

    Attributes:
        address: ``HOST:PORT`` where it listens.
    """

    def __init__(self, target: str) -> None:
        self._target = target.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._carry, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def cut(self) -> None:
        """Carry nothing more, without telling either end."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """Reset every connection, and carry new ones."""
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._open.set()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._reset)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._server.close()
        if carried := asyncio.all_tasks(self._loop):  # they end, as their connections are reset
            self._loop.run_until_complete(asyncio.wait(carried))
        self._loop.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        pipes = [asyncio.ensure_future(self._pipe(*ends)) for ends in ((reader, back), (there, writer))]
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            pipe.cancel()
        for end in (writer, back):
            end.transport.abort()
        self._writers -= {writer, back}

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
