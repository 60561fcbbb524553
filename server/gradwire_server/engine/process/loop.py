"""What the engine does next: samples in progress take turns with everything else.

One thread. Requests of a run are carried out and answered in the order they came. Samples join those in progress as
soon as they may; then each step of theirs, a token for some of them, alternates with one other request. A run's request
that is no sample waits until the run's samples have ended.
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
    """The engine, for what is answered at once."""

    def answer(self, request: Request) -> Answer: ...


class InProgress(Protocol):
    """See :class:`.samples_in_progress.SamplesInProgress`."""

    def __len__(self) -> int: ...

    def of(self, run_id: str) -> bool: ...

    def begin(self, request: Request) -> None: ...

    def turn(self) -> list[int]: ...

    def step(self) -> None: ...

    def finished(self) -> list[Answer]: ...


class Groups(Protocol):
    """See :class:`.grouped_runs.GroupedRuns`."""

    def choose(self, ready: Sequence[Request]) -> Sequence[Request]: ...

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]: ...


class Loop:
    """Carries requests out until one says to end.

    Args:
        engine: answers them.
        samples: those in progress.
        requests: as they were read.
        send: takes an answer.
        working: a context for each piece of work, given the ids of the requests that it is for.
        groups: what carries out requests of several runs at once; None where each is to be alone.
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
        """Returns when a shutdown is answered; what came before it is answered then."""
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
        """Everything that was read; waits for something where there is nothing to do."""
        if not self._waiting and not len(self._samples):
            self._waiting.append(self._requests.get())
        while True:
            try:
                self._waiting.append(self._requests.get_nowait())
            except queue.Empty:
                return

    def _ready(self) -> list[Request]:
        """Those whose turn it is in their run, in the order they came."""
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
        """What is carried out now, of different runs: the first of those whose turn it is, or several at once."""
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
