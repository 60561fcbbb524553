"""Processes of bounded memory as the front sees them.

Requests go to processes of their own, so that neither their time nor their memory is the front's. Short ones have
theirs, so that a caller who asks for two words never waits for a book. The processes for long ones end when they are
idle, and with them goes their memory; the other stays. API keys take turns: a key waits for at most one request of each
other key in its lane.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence

from gradwire_http.child_processes import start_process
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.turns import Turns
from gradwire_server.bounded.frames import ANSWERED, REFUSED, REPLY, REQUEST, ProcessSettings
from gradwire_server.errors import ServiceError, shutting_down

log = logging.getLogger(__name__)

SHORT_BYTES = 16 << 10
"""Requests up to this size go to the process for short ones."""
LONG_PROCESSES = 2
IDLE_S = 10.0
"""Seconds without a request after which a process for long ones ends."""
PATIENCE_S = 180.0
"""Seconds that a request may take before its process is ended; rendering gives up by itself long before."""
SHORT_PATIENCE_S = 60.0
"""The same for a short request, behind which others wait."""
NICENESS = 5
"""Niceness of processes for long requests: the front, the engine and short requests go first."""
ATTEMPTS = 2
WRITE_BYTES = 1 << 20
THREADS = 4
"""Threads of one process at most; each has memory of its own."""


class _ProcessEnded(Exception):
    """A process ended before it answered."""


class _Process:
    """One process, which answers one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._requests, self._replies = process.stdin, process.stdout

    @classmethod
    async def start(cls, module: str, settings: ProcessSettings) -> _Process:
        threads = str(min(THREADS, os.cpu_count() or 1))
        env = {"RAYON_NUM_THREADS": threads, "MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "true"} | os.environ
        process = await start_process(
            sys.executable, "-m", module, settings.model_dump_json(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env, start_new_session=True,
            limit=1 << 20,
        )  # fmt: skip
        return cls(process)

    async def ask(self, method: int, owner: str, parts: Sequence[bytes]) -> tuple[int, bytes]:
        """Ask for an answer: its kind and body.

        Raises:
            _ProcessEnded: The process ended first.
        """
        name = owner.encode()
        try:
            self._requests.write(REQUEST.pack(method, len(name), sum(map(len, parts))) + name)
            for part in parts:
                for start in range(0, len(part), WRITE_BYTES):  # or the rest of it would be copied, while it waits
                    self._requests.write(memoryview(part)[start : start + WRITE_BYTES])
                    await self._requests.drain()
            kind, size = REPLY.unpack(await self._replies.readexactly(REPLY.size))
            return kind, await self._replies.readexactly(size)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise _ProcessEnded from error
        except RuntimeError as error:  # of uvloop, where asyncio has a ConnectionError
            if not self._requests.is_closing():
                raise
            raise _ProcessEnded from error

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def end(self) -> None:
        """End the process at once."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._requests.close()


class _Lane:
    """Processes for requests of one kind, started when they are needed.

    Args:
        module: The module that they run.
        settings: Returns those of a process that is about to start.
        count: Processes at most.
        idle_s: Seconds without a request after which a process ends; None: it stays.
        patience_s: Seconds that a request may take before its process is ended.
    """

    def __init__(
        self,
        module: str,
        settings: Callable[[], ProcessSettings],
        count: int,
        idle_s: float | None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._module, self._settings, self._idle_s, self._patience_s = module, settings, idle_s, patience_s
        self._turns = Turns(of_key=1, total=count)
        self._idle: list[tuple[_Process, asyncio.TimerHandle | None]] = []
        self._all: set[_Process] = set()
        self._asking: set[asyncio.Task[tuple[int, bytes]]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def ask(self, method: int, owner: str, parts: Sequence[bytes]) -> tuple[int, bytes]:
        """Answer a request when it is the owner's turn, even if the caller leaves meanwhile.

        Raises:
            ServiceError: LIMIT_EXCEEDED if it takes too much memory or time.
        """
        await self._turns.take(owner)
        task = asyncio.create_task(self._ask(method, owner, parts))
        self._asking.add(task)
        task.add_done_callback(lambda done: self._asked(owner, done))
        return await asyncio.shield(task)

    def _asked(self, owner: str, task: asyncio.Task[tuple[int, bytes]]) -> None:
        self._asking.discard(task)
        self._turns.give_back(owner)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may have left

    async def _ask(self, method: int, owner: str, parts: Sequence[bytes]) -> tuple[int, bytes]:
        size = sum(map(len, parts))
        for _ in range(ATTEMPTS):  # a process that something else ended is no fault of the request
            process = self._take() or await self._start()
            try:
                answer = await asyncio.wait_for(process.ask(method, owner, parts), self._patience_s)
            except _ProcessEnded:
                log.warning("a process of %s ended during a request of %d bytes", self._module, size)
                await self._end(process)
            except TimeoutError:
                await self._end(process)
                took = f"converting these {size:,} bytes took more than {self._patience_s:.0f} s"
                raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, f"{took}; send less at a time") from None
            except BaseException:
                await self._end(process)  # it may have read half of the request
                raise
            else:
                self._put_back(process)
                return answer
        raise _ProcessEnded

    async def _start(self) -> _Process:
        process = await _Process.start(self._module, self._settings())
        self._all.add(process)
        return process

    def _take(self) -> _Process | None:
        while self._idle:
            process, timer = self._idle.pop()
            if timer is not None:
                timer.cancel()
            if process.alive:
                return process
            self._end_later(process)
        return None

    def _put_back(self, process: _Process) -> None:
        timer = None
        if self._idle_s is not None:
            timer = asyncio.get_running_loop().call_later(self._idle_s, self._retire, process)
        self._idle.append((process, timer))

    def _retire(self, process: _Process) -> None:
        self._idle = [entry for entry in self._idle if entry[0] is not process]
        self._end_later(process)

    def _end_later(self, process: _Process) -> None:
        task = asyncio.create_task(self._end(process))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, process: _Process) -> None:
        self._all.discard(process)
        await process.end()

    async def close(self) -> None:
        """End every process."""
        for task in self._asking:
            task.cancel()
        for _, timer in self._idle:
            if timer is not None:
                timer.cancel()
        self._idle.clear()
        await asyncio.gather(*self._asking, *self._ending, return_exceptions=True)
        await asyncio.gather(*(self._end(process) for process in list(self._all)))


class ProcessPool:
    """Processes that answer requests of callers.

    Args:
        module: The module that they run, by :func:`.program.run`.
        methods: Names of what they answer, in the order by which they are numbered.
        settings: Returns those of a process that is about to start.
        long_idle_s: Seconds without a request after which a process for long ones ends; None: :data:`IDLE_S`.
    """

    def __init__(
        self,
        module: str,
        methods: Sequence[str],
        settings: Callable[[], ProcessSettings],
        *,
        long_idle_s: float | None = None,
    ) -> None:
        self._methods, self._settings = tuple(methods), settings
        self._short = _Lane(module, settings, 1, None, SHORT_PATIENCE_S)
        idle_s = IDLE_S if long_idle_s is None else long_idle_s
        niced = lambda: settings().model_copy(update={"niceness": NICENESS})  # noqa: E731
        self._long = _Lane(module, niced, LONG_PROCESSES, idle_s)
        self._closed = False

    async def ask(self, method: str, owner: str, *parts: bytes) -> bytes:
        """Answer a request.

        Args:
            owner: Name of the caller's key.
            parts: The request, in parts that need not be copied into one.

        Raises:
            ServiceError: As the method says; LIMIT_EXCEEDED if it takes too much memory or time, SHUTTING_DOWN.
        """
        if self._closed:
            raise shutting_down()
        size = sum(map(len, parts))
        lane = self._short if size <= SHORT_BYTES else self._long
        try:
            kind, body = await lane.ask(self._methods.index(method), owner, parts)
        except _ProcessEnded as error:
            raise self._settings().too_much_memory(size) from error
        if kind == ANSWERED:
            return body
        if kind == REFUSED:
            raise ServiceError.of(pb.Error.FromString(body))
        raise RuntimeError(f"{method} failed: {body.decode(errors='replace')}")

    async def close(self) -> None:
        """End every process."""
        self._closed = True
        await asyncio.gather(self._short.close(), self._long.close())
