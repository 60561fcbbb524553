"""The engine's request loop, which alternates sampling steps with all other requests.

One thread. Requests of one run are executed and answered in order of arrival. A sampling request joins the samples in
progress as soon as no earlier request of its run waits. Each sampling step, which adds a token to some of the samples,
alternates with one other request or one group of requests. A run's other requests wait until its samples have ended.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gradwire_server.engine.operations.lifecycle import Answer
from gradwire_server.engine.operations.request import Request


class Answering(Protocol):
    """The part of :class:`.engine.Engine` that answers a request at once."""

    def answer(self, request: Request) -> Answer: ...


class InProgress(Protocol):
    """Interface of :class:`gradwire_server.engine.operations.samples_in_progress.SamplesInProgress`."""

    def __len__(self) -> int: ...

    def of(self, run_id: str) -> bool: ...

    def begin(self, request: Request) -> None: ...

    def turn(self) -> list[int]: ...

    def step(self) -> None: ...

    def finished(self) -> list[Answer]: ...


class Groups(Protocol):
    """Interface of :class:`gradwire_server.engine.operations.grouped_runs.GroupedRuns`."""

    def choose(self, ready: Sequence[Request]) -> Sequence[Request]: ...

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]: ...


class Loop:
    """Execute requests until a shutdown request.

    Args:
        engine: Answers all requests except samples.
        samples: The samples in progress.
        requests: Queue of received requests, in order of arrival.
        send: Called with each answer.
        working: Context manager around each piece of work, called with the ids of its requests.
        groups: Executes requests of several runs at once; None executes each alone.
    """

    def __init__(
        self,
        engine: Answering,
        samples: InProgress,
        requests: queue.Queue[Request],
        send: Callable[[Answer], None],
        working: Callable[[Sequence[int]], AbstractContextManager[None]],
        groups: Groups | None = None,
    ) -> None:
        self._engine, self._samples = engine, samples
        self._requests, self._send, self._working, self._groups = requests, send, working, groups
        self._waiting: deque[Request] = deque()

    def run(self) -> None:
        """Return once a shutdown is answered; all requests before it are answered first."""
        while True:
            self._take()
            for request in self._ready():
                if request.samples:
                    self._waiting.remove(request)
                    with self._working([request.message.id]):
                        self._samples.begin(request)
            if len(self._samples):
                with self._working(self._samples.turn()):
                    self._samples.step()
                    answers = self._samples.finished()
                for answer in answers:
                    self._send(answer)
            chosen = self._choose([request for request in self._ready() if not request.samples])
            if chosen:
                self._answer(chosen)
                if chosen[0].ends:
                    return

    def _take(self) -> None:
        """Move received requests to the waiting list; block if there is nothing else to do."""
        if not self._waiting and not len(self._samples):
            self._waiting.append(self._requests.get())
        while True:
            try:
                self._waiting.append(self._requests.get_nowait())
            except queue.Empty:
                return

    def _ready(self) -> list[Request]:
        """Requests that may be executed now, in order of arrival: no earlier request of their run is unfinished."""
        ready: list[Request] = []
        waits: set[str] = set()
        for request in self._waiting:
            run_id = request.run_id
            if request.ends:
                if request is self._waiting[0] and not len(self._samples):
                    ready.append(request)
                break
            if run_id and (run_id in waits or (not request.samples and self._samples.of(run_id))):
                waits.add(run_id)
                continue
            ready.append(request)
            if run_id and not request.samples:
                waits.add(run_id)
        return ready

    def _choose(self, ready: Sequence[Request]) -> Sequence[Request]:
        """Requests to execute now: the first ready one, or several of different runs at once."""
        return ready[:1] if self._groups is None else self._groups.choose(ready)

    def _answer(self, chosen: Sequence[Request]) -> None:
        for request in chosen:
            self._waiting.remove(request)
        if self._groups is not None and len(chosen) > 1:
            with self._working([request.message.id for request in chosen]):
                for answer in self._groups.answer(chosen):
                    self._send(answer)
            return
        for request in chosen:
            with self._working([request.message.id]):
                answer = self._engine.answer(request)
            self._send(answer)
