"""A real agent process, as an operator starts it, and a relay of TCP that can be cut on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

from support.blocking import DETECTOR
from support.child import children


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
        return next(iter(children(self.process.pid)), None)

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
        self._carrying: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accepted, "127.0.0.1", 0))
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
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _stop(self) -> None:
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        await self._turns()  # asyncio leaves a connection open whose server is closed while it is being accepted
        self._server.close()
        while self._carrying or self._writers:
            for task in self._carrying:
                task.cancel()
            for writer in self._writers:
                writer.transport.abort()
            self._writers.clear()
            await self._turns()

    async def _turns(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = self._loop.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        ends, pipes = [writer], list[asyncio.Future[None]]()
        try:
            there, back = await asyncio.open_connection(host, int(port))
            ends.append(back)
            self._writers.add(back)
            pipes += [asyncio.ensure_future(self._pipe(*pair)) for pair in ((reader, back), (there, writer))]
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # nobody listens there: this end is reset, too
        finally:
            for pipe in pipes:
                pipe.cancel()
            for end in ends:
                end.transport.abort()
            self._writers -= {*ends}

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
