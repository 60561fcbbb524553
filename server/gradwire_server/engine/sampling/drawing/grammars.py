"""Grammars compiled in a thread of their own, while the engine's thread goes on with everything else.

llguidance holds no lock of Python while it compiles. API keys take turns, one schema each, so a key with many schemas
delays no other key's by more than one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar

WAIT_S = 0.005


class Compiles(Protocol, Hashable):
    """A job with a grammar."""

    owner: str

    def compile(self) -> None:
        """Compile the grammar; errors become the job's own."""


J = TypeVar("J", bound=Compiles)


class Grammars(Generic[J]):
    """The jobs whose grammars are not compiled yet.

    Args:
        waits: Whether :meth:`take` waits, so that all processes of a group take a job at the same step.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._waiting: dict[str, deque[J]] = {}
        self._current: tuple[J, Future[None]] | None = None
        self._last_owner = ""
        self._thread: ThreadPoolExecutor | None = None

    @property
    def compiling(self) -> tuple[J, ...]:
        """The job whose grammar is being compiled, if there is one."""
        return () if self._current is None else (self._current[0],)

    def add(self, job: J) -> None:
        """Compile a job's grammar when it is its key's turn."""
        self._waiting.setdefault(job.owner, deque()).append(job)
        self._begin_next()

    def remove(self, job: J) -> None:
        """Forget a job; a grammar that is being compiled is compiled to its end."""
        if job in self._waiting.get(job.owner, ()):
            self._waiting[job.owner].remove(job)
            if not self._waiting[job.owner]:
                del self._waiting[job.owner]

    def take(self) -> J | None:
        """Remove and return a job whose grammar is compiled, or could not be."""
        if self._current is None or not (self._waits or self._current[1].done()):
            return None
        (job, compiled), self._current = self._current, None
        compiled.result()
        self._begin_next()
        return job

    def wait(self) -> None:
        """Wait a moment for the present grammar."""
        if self._current is not None:
            wait([self._current[1]], WAIT_S)

    def _begin_next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        last = self._last_owner
        self._last_owner = owner = next((owner for owner in self._waiting if owner != last), last)
        jobs = self._waiting.pop(owner)
        job = jobs.popleft()
        if jobs:
            self._waiting[owner] = jobs  # behind the other keys
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gradwire-grammars")
        self._current = job, self._thread.submit(job.compile)
