"""Moves of runs from one engine to another.

A run takes nothing along: what its engine has begun is finished there, what it has not begun comes back, and the next
operation restores the run on the other engine from the checkpoints and the journal, as after an engine's death. So the
bits stay, in mid-accumulation, with dropout, and between the two halves of a client's loss, whose first half is
repeated. Where repeating would take long, the run is saved first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import ServiceError
from gradwire_server.scheduling.auto_checkpoint import AutoCheckpoint
from gradwire_server.scheduling.dispatcher import Dispatcher
from gradwire_server.scheduling.operation import retrieved
from gradwire_server.scheduling.placement import EngineQueue, Placement, Visit
from gradwire_server.scheduling.run_queue import RunQueue

log = logging.getLogger(__name__)

SAVED_FROM_S = 2.0
"""Seconds of repeating from which on a run is saved before it moves."""
LOOK_EVERY_S = 30.0
"""Seconds between two looks at whether an engine has too much to do."""
UNEVEN = 2
"""So many more runs with operations than another engine, at two looks in a row, and one of them moves there."""


class Moves:
    """Moves runs because somebody says so, because an engine drains, or because one has too much to do for long."""

    def __init__(self, placement: Placement, dispatcher: Dispatcher, auto_checkpoint: AutoCheckpoint) -> None:
        self._placement, self._dispatcher, self._auto_checkpoint = placement, dispatcher, auto_checkpoint
        self._uneven: tuple[EngineQueue, EngineQueue] | None = None

    async def move(self, queue: RunQueue, to: EngineQueue) -> None:
        """Place a run on another engine, once the one that holds it has finished what it has begun of it."""
        run_id = queue.record.run_id
        with queue.held_back():
            await self._dispatcher.withdraw_behind(queue, 0)
            await queue.out_of_engine()
            here = self._placement.of(run_id)
            if here is not to and queue.saveable_seq and queue.recovery_cost.work.engine_s > SAVED_FROM_S:
                await self._save(queue)
            async with queue.handing:  # so that no reader of its weights is restoring it
                here = self._placement.of(run_id)
                if here is not to and queue.closed is None:
                    self._let_go(queue, here)
                    self._placement.move(queue, to)
                    log.info("run %s moves from engine %d to %d", run_id, here.engine.number, to.engine.number)
        self._dispatcher.wake(queue)

    async def _save(self, queue: RunQueue) -> None:
        visit = Visit(queue.record.owner, run=queue)
        await self._dispatcher.enter(visit)
        try:
            if queue.saveable_seq:
                await self._auto_checkpoint.take(queue, queue.saveable_seq)
        finally:
            self._dispatcher.leave(visit)

    def _let_go(self, queue: RunQueue, here: EngineQueue) -> None:
        """Remove a run from its engine, also one whose state is out of date, as after a disk that was full.

        Whatever the engine is asked next, also to hold the run again, comes after this.
        """
        drop = engine_pb2.EngineRequest(drop_run=engine_pb2.EngineDropRun(run_id=queue.record.run_id))
        here.engine.request(drop).add_done_callback(retrieved)
        queue.let_go()

    def target(self, queue: RunQueue, number: int | None) -> EngineQueue:
        """The engine to move a run to.

        Args:
            number: The engine's number; None for the one that suits best.

        Raises:
            ServiceError: INVALID_ARGUMENT for an engine that does not exist, drains, or lacks the run's model;
                UNSUPPORTED if there is no other engine.
        """
        if number is None:
            best = self._placement.elsewhere(queue)
            if best is None:
                message = f"no other engine of this server can take the run {queue.record.run_id}"
                raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, f"{message}: `gradwire serve --engines N` starts N")
            return best
        there, model = self.engine(number), queue.record.config.base_model
        if model not in there.engine.models:
            message = f"engine {number} does not serve {model}, the model of the run {queue.record.run_id}"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="engine")
        if there.drains:
            message = f"engine {number} drains and takes no runs: `gradwire runs move --undo-drain {number}` lets it"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="engine")
        return there

    def engine(self, number: int) -> EngineQueue:
        """The engine with a number.

        Raises:
            ServiceError: INVALID_ARGUMENT.
        """
        engines = self._placement.engines
        if not 0 <= number < len(engines):
            message = f"there is no engine {number}: this server's are 0 to {len(engines) - 1}"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="engine")
        return engines[number]

    async def drain(self, here: EngineQueue, queues: Iterable[RunQueue]) -> int:
        """Place nothing more on an engine, and move its runs to others; return their number.

        Raises:
            ServiceError: UNSUPPORTED if no other engine can take one of the runs.
        """
        here.drains = True
        mine = [queue for queue in queues if self._placement.of(queue.record.run_id) is here]
        try:
            targets = [(queue, self.target(queue, None)) for queue in mine]
        except ServiceError:
            here.drains = False
            raise
        await asyncio.gather(*(self.move(queue, to) for queue, to in targets))
        return len(targets)

    async def balance(self, queues: Iterable[RunQueue]) -> None:
        """Move a run, every now and then, from an engine that has had too much to do for long to one that has less."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look(queues)

    async def look(self, queues: Iterable[RunQueue]) -> None:
        """Move one run if this is the second look in a row at which the same engine has too much to do."""
        working: dict[EngineQueue, list[RunQueue]] = {there: [] for there in self._placement.engines if there.is_up}
        for queue in queues:
            there = self._placement.of(queue.record.run_id)
            if queue.pending and queue.parked is None and there in working:
                working[there].append(queue)
        busiest = max(working, key=lambda there: len(working[there]), default=None)
        if busiest is None:
            return
        lightest = min(working[busiest], key=lambda queue: queue.recovery_cost.recovery_s, default=None)
        to = self._placement.elsewhere(lightest) if lightest is not None else None
        uneven = to is not None and to in working and len(working[busiest]) - len(working[to]) >= UNEVEN
        before, self._uneven = self._uneven, (busiest, to) if uneven and to is not None else None
        if lightest is not None and to is not None and self._uneven is not None and self._uneven == before:
            self._uneven = None
            await self.move(lightest, to)
