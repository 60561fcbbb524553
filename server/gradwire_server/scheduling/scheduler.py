"""The runs of a server with their queues, made, opened, moved and deleted; puts the parts of this folder together.

Everything here runs on the front's event loop in tasks of the server, so an operation outlives the call that
submitted it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.key_file import Quota
from gradwire_server.access.quotas import Usage, check_runs
from gradwire_server.config import ServerConfig
from gradwire_server.engine_client.pool import EnginePool
from gradwire_server.errors import ServiceError, invalid, shutting_down, unknown_run
from gradwire_server.journal.recorded_files import RecordedFiles
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.storage import Storage
from gradwire_server.observability.metrics import Backlog, Metrics
from gradwire_server.observability.tracing import Tracing
from gradwire_server.scheduling.admission import Admission
from gradwire_server.scheduling.auto_checkpoint import AutoCheckpoint, in_use
from gradwire_server.scheduling.checks import Checks
from gradwire_server.scheduling.dispatcher import Dispatcher
from gradwire_server.scheduling.executor import Executor, RecordedBatches
from gradwire_server.scheduling.operation import Load, PayloadMemory, retrieved
from gradwire_server.scheduling.replay import Restorer
from gradwire_server.scheduling.results import Results, RunFeed
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.who_is_next import SHARED_TOKENS, UNKNOWN, EngineQueue, Placement, Visit
from gradwire_server.stores.store import Place

log = logging.getLogger(__name__)

SAVED_FROM_S = 2.0
"""Seconds of repeating from which on a run is saved before it moves."""
LOOK_EVERY_S = 30.0
"""Seconds between two looks at whether an engine has too much to do."""
UNEVEN = 2
"""Number of runs with operations that an engine must have more than another, at two looks in a row, for one to move."""


class Moves:
    """Moves runs to other engines: because somebody says so, an engine drains, or one has too much to do for long.

    A run takes nothing along: what its engine has begun is finished there, what it has not begun comes back, and the
    next operation restores the run on the other engine from the checkpoints and the journal, as after an engine's
    death. So the bits stay, in mid-accumulation, with dropout, and between the two halves of a client's loss, whose
    first half is repeated. Where repeating would take long, the run is saved first.
    """

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
            raise invalid(message, "engine")
        if there.drains:
            message = f"engine {number} drains and takes no runs: `gradwire runs move --undo-drain {number}` lets it"
            raise invalid(message, "engine")
        return there

    def engine(self, number: int) -> EngineQueue:
        """The engine with a number.

        Raises:
            ServiceError: INVALID_ARGUMENT.
        """
        engines = self._placement.engines
        if not 0 <= number < len(engines):
            raise invalid(f"there is no engine {number}: this server's are 0 to {len(engines) - 1}", "engine")
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


COLLECT_EVERY_S = 30.0
PAYLOAD_MEMORY_BYTES = 256 << 20
"""Queued payloads of all runs that are kept in memory beside the disk, so that they need not be read back."""


class Scheduler:
    """The runs of a server with their queues; creates, opens and deletes them.

    Args:
        parked: Called with the number of parked runs whenever it may have changed.
    """

    def __init__(
        self,
        pool: EnginePool,
        storage: Storage,
        config: ServerConfig,
        quota_of: Callable[[str], Quota],
        metrics: Metrics,
        tracing: Tracing,
        recorded: RecordedFiles,
        parked: Callable[[int], object],
    ) -> None:
        self._metrics, self._usage = metrics, storage.usage
        journal, checkpoints = storage.journal, storage.checkpoints
        self._journal, self._runs, self._checkpoints = journal, storage.records, checkpoints
        self._limits, self._quota_of = config.limits, quota_of
        self._result_retention_s = config.keep_results_hours * 3600
        self._queues: dict[str, RunQueue] = {}
        self._usages: dict[str, Usage] = {}
        self.feed = RunFeed()
        self._memory = PayloadMemory(PAYLOAD_MEMORY_BYTES)
        self.placement = Placement(pool)
        self._recorded_files, self.recorded = recorded, RecordedBatches(recorded)
        self._restorer = Restorer(self.placement, journal, checkpoints, self._metrics)
        self._executor = Executor(self.placement, journal, checkpoints, self._restorer, self.recorded)
        self._auto_checkpoint = AutoCheckpoint(
            self.placement,
            journal,
            checkpoints,
            config.checkpoint_every_steps,
            int(config.checkpoint_every_mib * (1 << 20)),
            config.max_recovery_seconds,
        )
        self.results = Results(journal, self._auto_checkpoint, self._memory, self._metrics, self.feed, self._usage)
        self.dispatcher = Dispatcher(
            self.placement,
            self._executor,
            self._auto_checkpoint,
            self.results,
            self._metrics,
            lambda: parked(self.num_parked),
            storage.folders,
        )
        self._moves = Moves(self.placement, self.dispatcher, self._auto_checkpoint)
        self.checks = Checks(config.limits, checkpoints)
        self._know_models()
        pool.watch(self._know_models)
        self.admission = Admission(
            self._queues,
            journal,
            self.checks,
            self.dispatcher,
            self.results,
            self._memory,
            self._metrics,
            tracing,
        )
        self._caring: list[asyncio.Task[None]] = []
        self._dropping: set[asyncio.Task[None]] = set()

    def _know_models(self) -> None:
        """Take note of the models that engines have, as they come."""
        self.checks.know(self.placement.pool.hello.models)

    async def start(self, records: Sequence[RunRecord]) -> None:
        """Load the runs of the state folder with their queued operations, and start to process them.

        A run is restored in the engine when its next operation comes.
        """
        await self._auto_checkpoint.start(records)
        used = await self._usage.of_runs()
        for record in records:
            record.num_tokens, record.engine_s = used.get(record.run_id, (0, 0.0))
            queue = self._queues[record.run_id] = self._new_queue(record)
            self.placement.place(queue)
            if not self._journal.keep_payloads:
                try:
                    await self._restorer.rewind_if_lossy(queue, queued_too=True)
                except ServiceError as error:
                    self.dispatcher.parking.park(queue, error.error)
            await self.admission.load(queue)
        await self._measure(self._queues.values())
        balance = self._moves.balance(self._queues.values())
        self._caring = [asyncio.create_task(work) for work in (self._collect(), balance)]
        for queue in self._queues.values():
            self.dispatcher.wake(queue)

    async def drain(self, grace_s: float) -> dict[str, int]:
        """Accept nothing more, and wait up to ``grace_s`` seconds for the operations that are being executed.

        Returns:
            Number of operations without a result, by run id.
        """
        self.admission.closed = True
        for task in self._caring:
            task.cancel()
        await asyncio.gather(*self._caring, return_exceptions=True)
        await self.dispatcher.drain(self._queues.values(), grace_s)
        left = {run_id: len(queue.pending) for run_id, queue in self._queues.items() if queue.pending}
        await self.results.settle(grace_s)
        await self.recorded.settle()
        for queue in self._queues.values():
            queue.close(shutting_down())
        self.feed.close(shutting_down())
        return left

    async def create(self, record: RunRecord, origin: Place | None = None) -> None:
        """Create a run in the database and the engine; durable when it returns.

        Args:
            origin: The place of the checkpoint from which it starts; None: it starts from its model.

        Raises:
            ServiceError: LIMIT_EXCEEDED, or the engine's own error. Nothing is left of the run.
        """
        queue = self._new_queue(record)
        try:
            quota = self._quota_of(record.owner)
            check_runs(self._runs.owned(record.owner), quota, self._limits)
            self._runs.reserve(record)
            if origin is not None:
                await self._runs.insert(record)
                await self._checkpoints.adopt(record, origin)
            load = Load(SHARED_TOKENS) if origin is None and record.config.HasField("lora") else UNKNOWN
            async with self._turn(Visit(record.owner, load, run=queue)) as there:
                share = quota.memory_percent or self._limits.key_memory_percent
                created = await self._executor.create(queue, share, self._runs.held_bytes(record.owner, there.sizes))
            # A fork has the head of its checkpoint, which need not be the one that the source has now.
            record.config.head, record.config.num_labels = created.head, created.num_labels
            await self._runs.finish(record, created.num_trainable_parameters, created.step, created.computed_with)
        except BaseException:
            self.placement.forget(record.run_id)
            await self._runs.delete(record)
            raise
        self.placement.measure(queue)
        self._queues[record.run_id] = queue
        self.feed.touch(record.run_id)

    async def ask(
        self, owner: str, model: str, request: engine_pb2.EngineRequest, doing: str
    ) -> engine_pb2.EngineReply:
        """Send a request that is no operation when it is the owner's turn; see :meth:`.Executor.ask`.

        Args:
            model: The model that the engine must serve.
        """
        visit = Visit(owner, model=model)
        async with self._turn(visit):
            return await self._executor.ask(visit, request, doing)

    @asynccontextmanager
    async def _turn(self, visit: Visit) -> AsyncIterator[EngineQueue]:
        there = await self.dispatcher.enter(visit)
        try:
            yield there
        finally:
            self.dispatcher.leave(visit)

    async def delete(self, record: RunRecord) -> None:
        """Delete a run with its operations, results and files.

        Raises:
            ServiceError: UNSUPPORTED if the recovery of another run needs a checkpoint of this one; UNKNOWN_RUN.
        """
        used = await self._checkpoints.user_of(record.run_id)
        if used is not None:
            raise in_use(*used)
        queue = self._queues.pop(record.run_id, None)
        if queue is None:
            raise unknown_run(record.run_id)  # another call has deleted it meanwhile
        queue.close(unknown_run(record.run_id))
        for operation in queue.pending.values():
            self._memory.let_go(operation)
        queue.empty()
        await self.dispatcher.interrupt_all(queue)
        await self._runs.delete(record)
        await asyncio.to_thread(self._recorded_files.delete, record.run_id)
        self.feed.gone(record.run_id, {record.owner, *record.readers}, deleted=True)
        self._metrics.forget(record.run_id)
        dropping = asyncio.create_task(self._drop(queue))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, queue: RunQueue) -> None:
        """Remove a deleted run from the engine when it is its owner's turn, which its deletion does not wait for."""
        record = queue.record
        with contextlib.suppress(ServiceError):  # the server stops, and the engine with it
            async with self._turn(Visit(record.owner, Load(SHARED_TOKENS), run=queue)):
                await self._executor.drop(record.run_id)
        self.placement.forget(record.run_id)
        self.dispatcher.spread.files.forget(record.run_id)

    async def move(self, record: RunRecord, engine: int | None = None) -> int:
        """Move a run to another engine; return that engine's number.

        Args:
            engine: The number of the engine; None for the one that suits best.

        Raises:
            ServiceError: UNKNOWN_RUN; INVALID_ARGUMENT or UNSUPPORTED if the run cannot be there.
        """
        queue = self.queue(record)
        to = self._moves.target(queue, engine)
        await self._moves.move(queue, to)
        return to.engine.number

    async def drain_engine(self, number: int, *, undo: bool = False) -> int:
        """Place nothing more on an engine, and move its runs to others; or let it take runs again.

        Returns:
            The number of runs that were moved.

        Raises:
            ServiceError: INVALID_ARGUMENT for an engine that does not exist; UNSUPPORTED if one of its runs can be
                nowhere else.
        """
        there = self._moves.engine(number)
        if undo:
            there.drains = False
            return 0
        return await self._moves.drain(there, self._queues.values())

    async def open(self, record: RunRecord, takeover: bool, writer: str) -> int:
        """Make a writer the run's only one; return its epoch.

        Raises:
            ServiceError: RUN_BUSY if another writer holds the run and ``takeover`` is not set; UNKNOWN_RUN.
        """
        epoch = await self._runs.open(record, takeover, writer)
        self.queue(record).fence()
        self.feed.touch(record.run_id)
        return epoch

    async def delete_checkpoint(self, record: RunRecord, name: str) -> None:
        """Delete a checkpoint.

        Raises:
            ServiceError: As for :meth:`.AutoCheckpoint.let_go`.
        """
        await self._auto_checkpoint.let_go(record, name)
        await self._checkpoints.delete(record, name)
        await self._measure([self.queue(record)])
        self.feed.touch(record.run_id)

    async def _measure(self, queues: Iterable[RunQueue]) -> None:
        """Find out what a recovery of these runs would replay, from the journal."""
        by_id = {queue.record.run_id: queue for queue in queues}
        newest = {run_id: queue.record.newest_checkpoint for run_id, queue in by_id.items()}
        bases = {run_id: saved.seq if saved is not None else 0 for run_id, saved in newest.items()}
        for run_id, seconds in (await self._journal.replay_s(bases)).items():
            by_id[run_id].recovery_cost.found(seconds)

    def recovery_s(self, run_id: str) -> float:
        """Seconds that bringing a run back into a new engine would take now."""
        queue = self._queues.get(run_id)
        return queue.recovery_cost.recovery_s if queue is not None else 0.0

    def queue(self, record: RunRecord) -> RunQueue:
        """Return the queue of a run.

        Raises:
            ServiceError: UNKNOWN_RUN.
        """
        if record.run_id not in self._queues:
            raise unknown_run(record.run_id)
        return self._queues[record.run_id]

    @property
    def num_parked(self) -> int:
        """Number of parked runs."""
        return sum(queue.parked is not None for queue in self._queues.values())

    def parked(self, run_id: str) -> pb.Error | None:
        """Why a run is parked; None if it is not."""
        queue = self._queues.get(run_id)
        return queue.parked.error if queue is not None and queue.parked is not None else None

    def waits_for(self, run_id: str) -> str:
        """The reason, besides its turn, for which the next operation of a run waits; empty if there is none."""
        queue = self._queues.get(run_id)
        if queue is None or not queue.pending or queue.parked is not None:
            return ""
        there = self.placement.of(run_id)
        if not there.is_up:
            return there.absence
        oldest = next(iter(queue.pending.values()))
        if oldest.full_since is None:
            return ""
        return f"room on the server's disk: it is full, and {oldest.kind} {oldest.seq} cannot be written"

    def busy(self) -> list[RunQueue]:
        """The queues with operations that have no result."""
        return [queue for queue in self._queues.values() if queue.pending]

    def accept_changes(self, record: RunRecord, by: str) -> None:
        """Let a run go on that is parked because it would not be the run that it was.

        Args:
            by: Name of the caller, for the run's history.

        Raises:
            ServiceError: UNSUPPORTED if it is not parked, or for another reason.
        """
        queue = self.queue(record)
        if queue.parked is None or queue.parked.error.code != pb.ERROR_CODE_RUN_PARKED:
            why = "it is not parked" if queue.parked is None else f"it is parked because {queue.parked.error.message}"
            message = f"nothing that the run {record.run_id} is computed with has changed: {why}"
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message)
        self._journal.facts.consent(record.run_id, by)
        self.dispatcher.parking.release(queue)

    def engines(self) -> list[pb.EngineStatus]:
        """The engines as clients see them, by number."""
        return [there.to_proto() for there in self.placement.engines]

    def usage(self, owner: str) -> Usage:
        """The resources that a key's runs hold at this moment."""
        return self._usages.setdefault(owner, Usage(owner, self._limits, self._quota_of))

    def history(self, record: RunRecord, at_most: int = 0) -> AsyncIterator[list[pb.HistoryPoint]]:
        """The points of a run's record; see :meth:`.Journal.history`."""
        return self._journal.history(record.run_id, at_most)

    def _new_queue(self, record: RunRecord) -> RunQueue:
        changed = partial(self.feed.touch, record.run_id)
        return RunQueue(record, self._limits, self.usage(record.owner), changed)

    def backlog(self) -> Backlog:
        """The number of runs and what is queued at this moment."""
        queues = self._queues.values()
        now = time.time()
        oldest = (next(iter(queue.pending.values())).accepted_at for queue in queues if queue.pending)
        return Backlog(
            runs=len(queues),
            operations=sum(len(queue.pending) for queue in queues),
            bytes=sum(queue.held.bytes for queue in queues),
            parked=self.num_parked,
            recovery_s=sum(queue.recovery_cost.recovery_s for queue in queues),
            early=sum(len(queue.window) for queue in queues),
            oldest_s=max(now - min(oldest, default=now), 0.0),
        )

    async def _collect(self) -> None:
        """Delete expired results and unreferenced journal segments, every ``COLLECT_EVERY_S`` seconds."""
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            try:
                for run_id, seq in (await self._journal.retention.expired(self._result_retention_s)).items():
                    if run_id in self._queues:
                        await self.results.release(self._queues[run_id], seq)
                await self._journal.retention.collect()
            except Exception as error:  # tried again after the next interval
                log.error("old results and segments were not deleted: %s", error)
