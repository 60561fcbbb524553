"""On which engine each run is, and what waits for each engine.

A run is placed on one engine and stays there while that engine lives, because its weights are there. It is placed again
when it is created, when its engine has died, when it could not be restored there, and when it is moved
(:mod:`.moves`). Whatever engine restores it, the journal and the checkpoints give it the same state.

An operation that is suspected of having killed an engine is tried again where it can harm fewest others: that is the
engine that died, which holds nothing when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.config import TRAINED_BYTES
from gradwire_server.engine_client.client import EngineClient, EngineDied
from gradwire_server.engine_client.pool import EnginePool
from gradwire_server.scheduling.fairness import UNKNOWN, FairQueue, Load
from gradwire_server.scheduling.run_queue import RunQueue

SLACK = 1.2
"""How many times its even share of the runs' memory an engine may hold before new runs go to others."""
LEAST_BYTES = 1 << 20
"""The least that a run counts, as every run also takes memory that is not trained."""


@dataclass(eq=False)
class Visit:
    """A request that belongs to no run's queue, such as a sample outside a run, and waits for its turn.

    Attributes:
        owner: The key that it counts for.
        load: What it is for the engine; by default that of a request whose size is not known.
        run: The run whose engine it needs; None for any engine with its model.
        model: The model that it needs; "" for any.
        engine: The engine that it is for, while that has a process.
        given: Resolves with the engine when it is its turn.
    """

    owner: str
    load: Load = UNKNOWN
    run: RunQueue | None = None
    model: str = ""
    engine: EngineQueue | None = None
    given: asyncio.Future[EngineQueue] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False)
class EngineQueue:
    """An engine, with the runs that are placed on it and what waits for it.

    Attributes:
        engine: The engine.
        fair_queue: What waits for it, and how much is in it.
        sizes: Bytes of the runs that are placed on it, by run id.
        drains: Whether nothing more is placed on it.
    """

    engine: EngineClient
    fair_queue: FairQueue[RunQueue | Visit]
    sizes: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    drains: bool = False

    def add(self, run_id: str, size: int) -> None:
        """Place a run here, or change its size."""
        self.nbytes += size - self.sizes.get(run_id, 0)
        self.sizes[run_id] = size

    def remove(self, run_id: str) -> None:
        """Place a run here no longer."""
        self.nbytes -= self.sizes.pop(run_id)

    def to_proto(self) -> pb.EngineStatus:
        """The engine's status as clients see it."""
        engine = self.engine
        status = engine.vitals.to_proto()
        status.number, status.device, status.ready = engine.number, engine.hello.device, engine.is_ready
        status.placed_runs, status.drains, status.machine = len(self.sizes), self.drains, engine.machine
        status.models.extend(model.name for model in engine.hello.models)
        return status

    @property
    def is_up(self) -> bool:
        """Whether the engine has a process."""
        return self.engine.holder.alive

    @property
    def absence(self) -> str:
        """The engine, while it has no process, and why it has none."""
        engine = self.engine
        if engine.is_away and not engine.machine:
            return "an engine: this server has none of its own, start `gradwire engine --front` on a machine"
        if engine.is_away:
            advice = f"start `gradwire engine` on {engine.machine} again, or any engine that serves the model"
            return f"engine {engine.number}, whose machine {engine.machine} is not connected: {advice}"
        if engine.fails_to_start:
            return f"engine {engine.number}, whose last start failed and is tried again: the server's log says why"
        return f"engine {engine.number}, which is starting"


class Placement:
    """The engines of a server with the runs on them.

    Attributes:
        pool: The engines without their queues.
    """

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self._engines: tuple[EngineQueue, ...] = ()
        self._places: dict[str, EngineQueue] = {}

    @property
    def engines(self) -> tuple[EngineQueue, ...]:
        """The engines by number; those on other machines come while the server runs."""
        if len(self._engines) < len(self.pool.engines):
            new = self.pool.engines[len(self._engines) :]
            self._engines += tuple(EngineQueue(engine, FairQueue(_load_of)) for engine in new)
        return self._engines

    def of(self, run_id: str) -> EngineQueue:
        """The engine on which a run is placed."""
        return self._places.get(run_id, self.engines[0])

    def place(self, queue: RunQueue) -> EngineQueue:
        """The engine on which a run is, after placing it again if it must be."""
        run_id = queue.record.run_id
        there = self._places.get(run_id)
        if there is not None and (len(self.engines) == 1 or queue.is_held or self._stays(queue, there)):
            return there
        able, size = self.able(queue.record.config.base_model), self._size(queue)
        if there is not None and there in able:  # all of them are down, and each would be chosen in turn
            return there
        there = choose(able, size)
        self._put(run_id, there, size)
        return there

    async def ready(self, item: RunQueue | Visit) -> EngineQueue:
        """Wait until the engine of an item has a process; which engine that is may change meanwhile."""
        while True:
            changed = self.pool.changed
            there = self.target(item)
            if there.is_up:
                return there
            await changed.wait()

    async def restarted(self, visit: Visit) -> None:
        """Wait, after the death of an engine, until one has a process that a visit could go to.

        Raises:
            EngineDied: None starts: the newest attempt failed, or there is nobody who could.
        """
        while True:
            changed, able = self.pool.changed, self.able(visit.model)
            if any(there.is_up for there in able):
                return
            if all(there.engine.fails_to_start for there in able):
                raise EngineDied(suspect=False)
            await changed.wait()

    def target(self, item: RunQueue | Visit) -> EngineQueue:
        """The engine that an item goes to: that of its run, or the least busy one with its model."""
        queue = item if isinstance(item, RunQueue) else item.run
        if queue is not None:
            return self.place(queue)
        assert isinstance(item, Visit)
        if item.engine is not None and item.engine.is_up:
            return item.engine
        return min(self.able(item.model), key=lambda there: there.fair_queue.load)

    def measure(self, queue: RunQueue) -> None:
        """Take note of the size of a run that was just created."""
        self.of(queue.record.run_id).add(queue.record.run_id, self._size(queue))

    def move(self, queue: RunQueue, to: EngineQueue) -> None:
        """Place a run, which no engine holds, on another engine."""
        self._put(queue.record.run_id, to, self._size(queue))

    def forget(self, run_id: str) -> None:
        """Place a run on no engine."""
        there = self._places.pop(run_id, None)
        if there is not None:
            there.remove(run_id)

    def elsewhere(self, queue: RunQueue) -> EngineQueue | None:
        """The engine that a run would best be moved to; None if no other can take it."""
        here = self.of(queue.record.run_id)
        able = self.able(queue.record.config.base_model)
        able = [there for there in able if there is not here and there.is_up and not there.drains]
        return choose(able, self._size(queue)) if able else None

    def _put(self, run_id: str, there: EngineQueue, size: int) -> None:
        self.forget(run_id)
        self._places[run_id] = there
        there.add(run_id, size)

    def _stays(self, queue: RunQueue, there: EngineQueue) -> bool:
        return there.is_up or (queue.is_suspect and not there.engine.fails_to_start)

    def able(self, model: str) -> Sequence[EngineQueue]:
        """The engines that could take a request for a model, those that are ready before others."""
        serving = [there for there in self.engines if not model or model in there.engine.models] or self.engines
        staying = [there for there in serving if not there.drains] or serving
        up = [there for there in staying if there.is_up]
        return [there for there in up if there.engine.is_ready] or up or staying

    def _size(self, queue: RunQueue) -> int:
        return max(TRAINED_BYTES * queue.record.num_trainable_parameters, LEAST_BYTES)


def choose(able: Sequence[EngineQueue], size: int) -> EngineQueue:
    """The least busy engine among those that hold no more than their share of the runs' memory.

    Args:
        able: Engines that could take the run; at least one.
        size: Bytes of the run.
    """
    share = (sum(there.nbytes for there in able) + size) / len(able)
    least = min(there.nbytes for there in able)
    within = [there for there in able if there.nbytes + size <= SLACK * share or there.nbytes == least]
    return min(within, key=lambda there: (there.fair_queue.load, there.nbytes, there.engine.number))


def _load_of(item: RunQueue | Visit) -> Load:
    if isinstance(item, Visit):
        return item.load
    return item.head.load if item.head is not None else Load(0)
