"""An event loop whose time is simulated, and processes on it that can be killed between any two callbacks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

EPOCH = 1_700_000_000.0
"""Unix time at which a simulation begins."""

MOST_ROUNDS = 200_000
"""A simulation that needs more rounds of the loop than this runs in a circle."""


class Stuck(Exception):
    """No callback or timer is left, and the program has not ended."""


class Process:
    """A part of the program that dies as a whole: after :meth:`kill`, not one of its callbacks runs.

    Args:
        machine: Where it runs, if that matters.
    """

    def __init__(self, loop: SimulatedLoop, name: str, machine: Any = None) -> None:
        self.name, self.alive, self.machine = name, True, machine
        self._stopped: list[_Guarded] | None = None
        self._loop = loop
        self._context = contextvars.Context()
        self._context.run(_process.set, self)
        loop.processes.append(self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a task of this process."""
        return self._loop.create_task(work, context=self._context.copy())

    def kill(self) -> None:
        """End the process without warning: no ``finally`` runs, no file is closed."""
        self.alive = False

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    def stop(self) -> None:
        """Run none of its callbacks for a while, as after SIGSTOP."""
        if self._stopped is None:
            self._stopped = []

    def go_on(self) -> None:
        """Run what was due meanwhile, and go on."""
        stopped, self._stopped = self._stopped or [], None
        for each in stopped:
            self._loop.call_soon(each, context=each.context)

    def takes(self, callback: _Guarded) -> bool:
        """Whether a callback is to run now; one that is not is kept for later, if there is a later."""
        if self.alive and self._stopped is not None:
            self._stopped.append(callback)
        return self.alive and self._stopped is None


_process: contextvars.ContextVar[Process] = contextvars.ContextVar("simulated_process")


class _NoSelector(selectors.SelectSelector):
    """Selector that advances the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.wait: Callable[[float | None], None] = lambda timeout: None

    def select(self, timeout: float | None = None) -> list[Any]:
        self.wait(timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Event loop that runs callbacks in a fixed order; if none is ready, the clock jumps to the next timer.

    Args:
        rng: Draws how long work in a thread takes; the work itself is done at once, on the loop.
    """

    def __init__(self, rng: random.Random) -> None:
        selector = _NoSelector()
        self._now, self._rounds = 0.0, 0
        super().__init__(selector)
        selector.wait = self._jump
        self._rng = rng
        self.tasks: list[asyncio.Task[Any]] = []
        """Every task, so that none of a dead process is finalized while the simulation runs."""
        self.processes: list[Process] = []
        self.set_task_factory(self._remember)
        self.complaints: list[str] = []
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self._now

    def unix_time(self) -> float:
        """The value of ``time.time`` in the simulation."""
        return EPOCH + self._now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        guarded = _Guarded(process, context, callback, args)
        guarded.handle = super().call_soon(guarded, context=context)
        return guarded.handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        process = context.get(_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        guarded = _Guarded(process, context, callback, args)
        guarded.handle = handle = super().call_at(when, guarded, context=context)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(function(*args))
            except Exception as error:
                done.set_exception(error)

        self.call_later(self._rng.uniform(0, 0.003), work)
        return done

    def finish(self) -> None:
        """Close the loop and end every task, those of dead processes too."""
        for process in self.processes:
            process.alive = True
            process.go_on()
        self._rounds = 0
        with contextlib.suppress(Stuck):
            self.run_until_complete(self._end_tasks())
            self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    async def _end_tasks(self) -> None:
        ending = asyncio.current_task()
        for _ in range(3):
            for task in list(self.tasks):
                if task is not ending:
                    task.cancel()
            await asyncio.sleep(0.1)
        for task in list(self.tasks):
            if task is not ending and not task.done():  # its next step belonged to a dead process and was dropped
                work: Any = task.get_coro()
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    for _ in range(20):  # its ``finally`` may wait, for which ``close`` does not
                        work.throw(asyncio.CancelledError)

    def _jump(self, timeout: float | None) -> None:
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            raise Stuck(f"{MOST_ROUNDS} rounds of the loop did not end it, at {self._now:.3f} s")
        if timeout is None:
            raise Stuck(f"nothing is left to happen at {self._now:.3f} s")
        self._now += max(timeout, 0.0)

    def _remember(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        self.tasks.append(task)
        return task

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.complaints.append(f"{context['message']}: {context.get('exception')!r}")


def current_process() -> Process:
    """The process whose callback runs."""
    return _process.get()


class _Guarded:
    """A callback of a process, which does not run once that is dead, and later while it is stopped."""

    __slots__ = ("_args", "_callback", "_process", "context", "handle")

    def __init__(
        self, process: Process, context: contextvars.Context, callback: Callable[..., object], args: Any
    ) -> None:
        self._process, self.context, self._callback, self._args = process, context, callback, args
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self._process.takes(self) and not (self.handle is not None and self.handle.cancelled()):
            self._callback(*self._args)
