"""The engine's request loop: operations one after the other, and beside them the samples in progress.

One thread. Requests of one run are executed and answered in order of arrival. A sampling request joins the samples in
progress as soon as no earlier request of its run waits, and the run's other requests wait until its samples have ended.

While samples and others both want the time, each gets half of it: samples advance, a token a step, not only between two
operations but also between two micro-batches of one. What either does not want is not saved up for it. Small operations
of other runs, and the making of new ones, go between the micro-batches of a large one, too, and share that half.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from gradwire_server.engine.interruption import giving_way
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
        engine: Executes all requests except samples.
        requests: Queue of received requests, in order of arrival.
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
        self._executing: Collection[str] = ()
        self._owed_s = 0.0  # what others have computed, less what samples have, while both wanted to
        self._since = 0.0  # when the present computation began or went on

    def run(self) -> None:
        """Return once a shutdown is answered; all requests before it are answered first."""
        while True:
            ready = self._taken()
            if self._begin_samples(ready, self._execute):
                ready = self._ready()
            others = [request for request in ready if not request.samples]
            if self._samples_are_next(others):
                self._execute(self._decisions.step_samples(self._samples.messages()))
                continue
            decision = self._decisions.execute(others)
            self._execute(decision)
            if any(request.ends for request in decision.requests):
                return

    def _samples_are_next(self, others: Sequence[Request]) -> bool:
        if not len(self._samples):
            self._owed_s = min(self._owed_s, 0.0)
        elif not others:
            self._owed_s = max(self._owed_s, 0.0)
        return len(self._samples) > 0 and self._owed_s >= 0

    def _begin_samples(self, ready: Sequence[Request], execute: Callable[[Decision], None]) -> bool:
        """Begin the requests for samples among those that are ready; returns whether there were any."""
        sampled = [request for request in ready if request.samples]
        for request in sampled:
            if request in self._waiting:  # else it was begun while one before it let others go on
                execute(self._decisions.sample(request))
        return bool(sampled)

    def _execute(self, decision: Decision) -> None:
        """Execute a decision, and let others go on between its micro-batches."""
        if decision.empty:
            return
        self._executing = {request.run_id for request in (*decision.samples, *decision.requests) if request.run_id}
        gives_way = self._engine.gives_way and not decision.steps_samples
        with self._working(), giving_way(self._let_others_go_on) if gives_way else nullcontext():
            self._carry_out(decision)
        self._executing = ()

    def _let_others_go_on(self) -> float:
        """Begin the samples that were asked for meanwhile, and compute for all and for small operations what they are
        owed; returns the seconds that it took."""
        began = self._now()
        self._owed_s += began - self._since
        self._drain()
        with self._ranks.agreement.aside():
            self._begin_samples(self._ready(), self._carry_out)
            small = self._small()
            while self._owed_s > 0 and (small or len(self._samples)):
                if len(self._samples):
                    self._carry_out(self._decisions.step_samples(self._samples.messages()))
                if small:
                    self._carry_out(self._decisions.execute(small), given=True)
                small = self._small()
        if not len(self._samples):
            self._owed_s = min(self._owed_s, 0.0)
        self._ranks.send(Decision())
        self._since = self._now()
        return self._since - began

    def _small(self) -> list[Request]:
        """Ready operations that cost no more than a token of samples or a micro-batch does."""
        return [request for request in self._ready() if self._decisions.is_small(request)]

    def _carry_out(self, decision: Decision, *, given: bool = False) -> None:
        """Carry out a decision; ``given``: in the time of the samples, of which they are owed less then."""
        for request in (*decision.samples, *decision.requests):
            self._waiting.remove(request)
        self._ranks.send(decision)
        self._since = self._now()
        for answer in carried_out(decision, self._engine, self._samples):
            self._send(answer)
        took_s = self._now() - self._since
        of_samples = decision.steps_samples or all(request.only_samples for request in decision.samples)
        self._owed_s += -took_s if given or (of_samples and not decision.requests) else took_s

    def _now(self) -> float:
        return self._engine.now(settled=len(self._samples) > 0)

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
        changed = set(self._executing)
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
