"""The engine's request loop, which alternates sampling steps with all other requests.

One thread. Requests of one run are executed and answered in order of arrival. A sampling request joins the samples in
progress as soon as no earlier request of its run waits. Each sampling step, which adds a token to some of the samples,
alternates with one other request or one group of requests. A run's other requests wait until its samples have ended.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

from gradwire_server.engine.operations.decisions import Decision, Decisions
from gradwire_server.engine.operations.lifecycle import Answer
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.operations.samples import SamplesInProgress
from gradwire_server.engine.process.engine import Engine
from gradwire_server.engine.process.ranks import Ranks


def carried_out(decision: Decision, engine: Engine, samples: SamplesInProgress) -> Iterator[Answer]:
    """Execute a decision, as every process of the engine does; yields the answers that are there, one by one."""
    for request in decision.samples:
        yield from samples.begin(decision, request)
    if decision.steps_samples:
        samples.step(decision)
        yield from samples.finished()
    if decision.requests:
        yield from engine.execute(decision)


READING_S = 0.005
"""Seconds between two looks at images that are being read, while nothing else is to be done."""


class Loop:
    """Decide and execute until a shutdown request.

    Args:
        decisions: Chooses among ready requests.
        engine: Executes all requests except samples.
        samples: The samples in progress.
        requests: Queue of received requests, in order of arrival.
        ranks: The other processes of the engine.
        send: Called with each answer.
        working: Context manager around each piece of work.
    """

    def __init__(
        self,
        decisions: Decisions,
        engine: Engine,
        samples: SamplesInProgress,
        requests: queue.SimpleQueue[Request],
        ranks: Ranks,
        send: Callable[[Answer], None],
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._decisions, self._engine, self._samples = decisions, engine, samples
        self._requests, self._ranks, self._send, self._working = requests, ranks, send, working
        self._waiting: deque[Request] = deque()

    def run(self) -> None:
        """Return once a shutdown is answered; all requests before it are answered first."""
        while True:
            ready = self._taken()
            sampled = [request for request in ready if request.samples]
            for request in sampled:
                self._execute(self._decisions.sample(request))
            if len(self._samples):
                self._execute(self._decisions.step_samples(self._samples.messages()))
            decision = self._decisions.execute(self._ready() if sampled or len(self._samples) else ready)
            self._execute(decision)
            if any(request.ends for request in decision.requests):
                return

    def _execute(self, decision: Decision) -> None:
        if decision.empty:
            return
        for request in (*decision.samples, *decision.requests):
            self._waiting.remove(request)
        self._ranks.send(decision)
        with self._working():
            for answer in carried_out(decision, self._engine, self._samples):
                self._send(answer)

    def _taken(self) -> list[Request]:
        """Move received requests to the waiting list, and return those that are ready; block if there is nothing else
        to do."""
        self._drain()
        ready = self._ready()
        if ready or len(self._samples):
            return ready
        with suppress(queue.Empty):
            self._waiting.append(self._requests.get(timeout=READING_S if self._waiting else None))
        self._drain()
        return self._ready()

    def _drain(self) -> None:
        for _ in range(self._requests.qsize()):  # only this thread takes from it
            self._waiting.append(self._requests.get_nowait())

    def _ready(self) -> list[Request]:
        """Requests that may be executed now, in order of arrival: no earlier request of their run is unfinished, and
        their images are read."""
        ready: list[Request] = []
        read: set[str] = set()
        changed: set[str] = set()
        for request in self._waiting:
            run_id = request.run_id
            if request.ends:
                if request is self._waiting[0] and not len(self._samples):
                    ready.append(request)
                break
            waits = run_id in changed or (not request.leaves_run and (run_id in read or self._samples.of(run_id)))
            if request.ready and not (run_id and waits):
                ready.append(request)
            if run_id:  # a sample whose images are being read is not overtaken by the next, as answers are in order
                (read if request.leaves_run and request.ready else changed).add(run_id)
        return ready
