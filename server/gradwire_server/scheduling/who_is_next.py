"""Who is next: on which engine each run is, what waits for each engine, and in what order it goes there.

Within a run the order is that of the numbers (:attr:`.RunQueue.head`). :class:`WhoIsNext` says whether the first may go
now, :class:`Placement` to which engine, and :class:`FairQueue` when: API keys in turn, and within a key its runs and
samples in turn.

Requests that already wait in the engine's pipe keep it busy and let it execute small operations together, but a new
request waits for all of them, unless it is small: then it goes between the micro-batches of a large one. So the
requests in the pipe are bounded by their tokens, and while several keys use the server, so are those of each key: a key
waits for few small operations or one large one of each other key before its own, however much the others submit.
Samples advance by a token at a time beside everything else, and the engine divides its room for them between keys. So
they are only counted.

A run is placed on one engine and stays there while that engine lives, because its weights are there. It is placed again
when it is created, when its engine has died, when it could not be restored there, and when it is moved
(:class:`.Moves`). Whatever engine restores it, the journal and the checkpoints give it the same state. An operation
that is suspected of having killed an engine is tried again where it can harm fewest others: that is the engine that
died, which holds nothing when it is back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.turns import ActiveKeys
from gradwire_server.config import TRAINED_BYTES
from gradwire_server.engine_client.client import EngineClient, EngineDied
from gradwire_server.engine_client.pool import EnginePool
from gradwire_server.engine_link.crash_marks import SLOTS
from gradwire_server.scheduling.operation import Load, OperationState, QueuedOperation, verdict_on
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.sent_prompts import SentPrompts

T = TypeVar("T")

AHEAD = 2
"""Requests that may be in the engine whatever their size: one is read while the other is computed."""
SMALL_AHEAD = 32
"""Requests that may be in the engine while they hold fewer than ``PIPE_TOKENS`` tokens in total."""
PIPE_TOKENS = 4096
"""Tokens in the engine from which on only ``AHEAD`` requests are allowed."""
SHARED_TOKENS = 512
"""Tokens that one key may have in the engine while keys share the server, unless it is one request."""
LEAST_TOKENS = 128
"""Tokens that a request counts for at least: an optimizer step costs about as much as some."""
SAMPLES_AHEAD = 128
"""Requests for samples in the engine from which on only keys that have none there send one."""
KEY_SAMPLES_AHEAD = 64
"""Requests for samples of one key in an engine while keys share the server."""
MOST_SAMPLES = SLOTS - SMALL_AHEAD - AHEAD
"""Requests for samples that may be in the engine, which has a slot for each request."""


UNKNOWN = Load(PIPE_TOKENS)
"""Load of a request whose size is not known."""


class FairQueue(Generic[T]):
    """Items that wait for the engine, by owner, and counters of the requests in it.

    Args:
        load_of: Returns what an item is for the engine; asked each time the item could go.
        clock: Monotonic time in seconds.
    """

    def __init__(self, load_of: Callable[[T], Load], clock: Callable[[], float] = time.monotonic) -> None:
        self._load_of, self._active = load_of, ActiveKeys(clock)
        self._waiting: dict[str, deque[T]] = {}
        self._items: set[T] = set()
        self._tokens: Counter[str] = Counter()  # of each owner's requests in the engine, samples aside
        self._samples: Counter[str] = Counter()
        self._count_there = self._tokens_there = 0
        self._alone = False
        self._served: dict[str, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    @property
    def shared(self) -> bool:
        """Whether several keys are active."""
        return self._active.several

    @property
    def load(self) -> int:
        """Number of items that wait, and of requests in the engine."""
        return len(self._items) + self._count_there + self._samples.total()

    @property
    def works(self) -> bool:
        """Whether the engine has requests other than samples, or such wait for it."""
        return self._count_there > 0 or any(not self._load_of(item).samples for item in self._items)

    def put(self, owner: str, item: T) -> None:
        """Add an item at the end of its owner's queue."""
        self._active.asked(owner)
        self._waiting.setdefault(owner, deque()).append(item)
        self._items.add(item)

    def pop(self) -> T | None:
        """Remove and return the next item; None if nothing waits or the engine has no room.

        The item belongs to the least recently served owner among those that have room.
        """
        if self._alone or not self._waiting:
            return None
        shared = self.shared
        loads = {owner: self._load_of(waiting[0]) for owner, waiting in self._waiting.items()}
        owners = [owner for owner, load in loads.items() if self._has_room(owner, load, shared)]
        if not owners:
            return None
        owner = min(owners, key=lambda owner: self._served.get(owner, 0))
        if loads[owner].alone and (self._count_there or self._samples.total()):
            return None
        item = self._waiting[owner].popleft()
        self._count += 1
        self._served[owner] = self._count
        self._items.remove(item)
        if not self._waiting[owner]:
            del self._waiting[owner]
        return item

    def _has_room(self, owner: str, load: Load, shared: bool) -> bool:
        if load.samples:
            own, total = self._samples[owner], self._samples.total()
            if not own:
                return total < MOST_SAMPLES
            return total < SAMPLES_AHEAD and not (shared and own >= KEY_SAMPLES_AHEAD)
        there, own = self._count_there, self._tokens[owner]
        # One that goes between the micro-batches of those that are there; of a key alone one at a time.
        small = load.tokens <= SHARED_TOKENS and (shared or there <= AHEAD)
        if there >= SMALL_AHEAD or (there >= AHEAD and self._tokens_there >= PIPE_TOKENS and not small):
            return False
        return not (shared and own and own + max(load.tokens, LEAST_TOKENS) > SHARED_TOKENS)

    def enter(self, owner: str, load: Load) -> None:
        """Count a request that is sent to the engine."""
        self._add(owner, load, 1)
        self._alone = load.alone

    def leave(self, owner: str, load: Load) -> None:
        """Uncount a request that the engine has answered."""
        self._add(owner, load, -1)
        self._alone = False

    def _add(self, owner: str, load: Load, sign: int) -> None:
        if load.samples:
            self._samples[owner] += sign
            return
        self._count_there += sign
        self._tokens_there += sign * load.tokens
        self._tokens[owner] += sign * max(load.tokens, LEAST_TOKENS)

    def clear(self) -> list[T]:
        """Remove and return every waiting item."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        self._items.clear()
        return items


SLACK = 1.2
"""How many times its even share of the runs' memory an engine may hold before new runs go to others."""
LEAST_BYTES = 1 << 20
"""The least that a run counts, as every run also takes memory that is not trained."""


@dataclass(eq=False)
class Visit:
    """A request that belongs to no run's queue, such as a sample outside a run, and waits for its turn.

    Attributes:
        owner: The key that it counts for.
        load: Its load on the engine; by default that of a request whose size is not known.
        run: The run whose engine it needs; None for any engine with its model.
        model: The model that it needs; "" for any.
        engine: The engine that it is for, while that has a process.
        prompt: The :func:`.sent_prompts.beginnings` of what it samples from.
        given: Resolves with the engine when it is its turn.
    """

    owner: str
    load: Load = UNKNOWN
    run: RunQueue | None = None
    model: str = ""
    engine: EngineQueue | None = None
    prompt: Sequence[bytes] = ()
    given: asyncio.Future[EngineQueue] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False)
class EngineQueue:
    """An engine, with the runs that are placed on it and what waits for it.

    Attributes:
        fair_queue: The items that wait for it, and the counters of its requests.
        sizes: Bytes of the runs that are placed on it, by run id.
        drains: Whether nothing more is placed on it.
        prompts: The beginnings of prompts that it was sent.
    """

    engine: EngineClient
    fair_queue: FairQueue[RunQueue | Visit]
    sizes: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    drains: bool = False
    prompts: SentPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = SentPrompts(self.engine)

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
    """The engines of a server with the runs on them."""

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
        """The engine that an item goes to: that of its run, or the least busy one with its model.

        Among these one counts as less busy if it was sent prompts that begin alike.
        """
        queue = item if isinstance(item, RunQueue) else item.run
        if queue is not None:
            return self.place(queue)
        assert isinstance(item, Visit)
        if item.engine is not None and item.engine.is_up:
            return item.engine
        return min(self.able(item.model), key=lambda there: there.fair_queue.load - there.prompts.worth(item.prompt))

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


class WhoIsNext:
    """Decides which operation, and which request outside any run's queue, goes to its engine next.

    Args:
        may_spread: Whether several engines may execute a run's operation.
        checkpoint_is_due: Whether a run is to be saved as soon as its engine does nothing for it.
    """

    def __init__(
        self,
        placement: Placement,
        may_spread: Callable[[RunQueue, QueuedOperation], bool],
        checkpoint_is_due: Callable[[RunQueue], bool],
    ) -> None:
        self._placement, self._may_spread, self._checkpoint_is_due = placement, may_spread, checkpoint_is_due

    def offer(self, queue: RunQueue) -> tuple[QueuedOperation, pb.OperationResult] | None:
        """Let a run wait for its engine if its first unsent operation may go there.

        Returns:
            The operation with its result if it needs no engine, because it is aborted or refused.
        """
        head = queue.head
        if head is None:
            return None
        head.may_spread = self._may_spread(queue, head)
        if not self._may_go(queue, head):
            return None  # asked again when it is journaled and when earlier operations get their results
        verdict = None if queue.sent else verdict_on(queue.record, head)
        if verdict is not None:
            return head, verdict
        self.put(queue)
        return None

    def put(self, item: RunQueue | Visit) -> None:
        """Let an item wait for the engine that it goes to."""
        there = self._placement.target(item)
        if isinstance(item, Visit):
            there.prompts.add(item.prompt)
        if item not in there.fair_queue:
            there.fair_queue.put(item.record.owner if isinstance(item, RunQueue) else item.owner, item)

    def turns(self) -> Iterator[tuple[RunQueue | Visit, EngineQueue]]:
        """Take what goes to an engine now, one after the other, until no engine has room for what waits for it."""
        moved = True
        while moved:
            moved = False
            for there in self._placement.engines:
                while (item := there.fair_queue.pop()) is not None:
                    if not self._is_there(item):
                        continue
                    if isinstance(item, RunQueue) and self._placement.place(item) is not there:
                        self.put(item)  # it was moved while it waited, perhaps to an engine before this one
                        moved = True
                        continue
                    yield item, there

    def _is_there(self, item: RunQueue | Visit) -> bool:
        """Whether an item that has waited is still to go."""
        if isinstance(item, Visit):
            return not item.given.done()
        return item.head is not None and self._may_go(item, item.head)

    def _may_go(self, queue: RunQueue, operation: QueuedOperation) -> bool:
        """Whether the first unsent operation of a run may be sent now, as far as the run is concerned.

        It may be the first in the engine once it is journaled. It may follow others there, or go before it is journaled
        itself, if it depends on nothing that is not known yet and no checkpoint waits for the engine to be idle.
        """
        if operation.refusal is None and time.monotonic() < operation.not_before:
            return False
        if operation.state is OperationState.QUEUED and not queue.sent:
            return True
        return queue.is_held and queue.may_follow(operation) and not self._checkpoint_is_due(queue)


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
