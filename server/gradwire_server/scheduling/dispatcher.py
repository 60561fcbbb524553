"""Dispatch of queued operations to the engine, several at a time.

Operations of a run are sent to the engine before it has answered the earlier ones. After a failed operation the engine
does not start the later ones and answers ``not_started`` for each; the dispatcher decides their results once every
operation before them has its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import PIXELS_OF_TOKEN, Usage, grammar_tokens
from gradwire_server.engine_client.client import EngineAnswer, EngineDied, Interruptible
from gradwire_server.errors import shutting_down
from gradwire_server.observability import logs
from gradwire_server.observability.metrics import Metrics
from gradwire_server.scheduling.auto_checkpoint import AutoCheckpoint
from gradwire_server.scheduling.checks import pixels_of_images
from gradwire_server.scheduling.executor import Executor
from gradwire_server.scheduling.operation import (
    DEATHS,
    Load,
    QueuedOperation,
    retrieved,
)
from gradwire_server.scheduling.replay import CannotRestore
from gradwire_server.scheduling.results import Results
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.sent_prompts import beginnings
from gradwire_server.scheduling.spread_samples import SpreadSamples, end, tell_result
from gradwire_server.scheduling.who_is_next import EngineQueue, Placement, Visit, WhoIsNext
from gradwire_server.stores.store import Store

T = TypeVar("T")

log = logging.getLogger(__name__)

PAUSES_S = (2.0, 5.0, 15.0, 60.0)
"""Seconds until a parked run is tried again: after the first failure, the second, and so on."""


class Parking:
    """Parks runs that cannot go on for now, tries them again, and lets them go on.

    A parked run executes nothing and accepts nothing. Its accepted operations keep their numbers, get no results and
    are not checked again. A run is parked if it cannot be restored in the engine (:class:`.CannotRestore`): the server
    was started without its model, memory is short, a checkpoint is damaged. It is tried again after a pause, and goes
    on by itself once the cause is gone; at the latest the next start of the server tries it.

    Args:
        wake: Continues a queue that may go on.
        changed: Called whenever a run is parked or goes on.
    """

    def __init__(self, wake: Callable[[RunQueue], None], changed: Callable[[], object]) -> None:
        self._wake, self._changed = wake, changed

    def park(self, queue: RunQueue, error: pb.Error, *, again: bool = True) -> None:
        """Park a run, which then executes nothing; operations that the engine has begun are executed again later.

        Args:
            error: The reason, for the run's owner: what is wrong, and what to do.
            again: Whether to try again after a pause.
        """
        before, record = queue.parked, queue.record
        queue.park(error)
        if before is None or before.error.message != error.message:
            code = pb.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower()
            log.warning(
                "run %s is parked (operations waiting: %d): %s (%s)", record.run_id, len(queue.pending),
                error.message, code, extra={"run_id": record.run_id},
            )  # fmt: skip
        self._changed()
        if again and queue.parked is not None:
            pause = PAUSES_S[min(queue.parked.attempts, len(PAUSES_S)) - 1]
            asyncio.get_running_loop().call_later(pause, self._try_again, queue, queue.parked)

    def release(self, queue: RunQueue) -> None:
        """Let a parked run go on; it is parked again if it still cannot be restored."""
        if queue.parked is not None:
            queue.go_on()
            self._changed()
            self._wake(queue)

    def executed(self, queue: RunQueue, operation: QueuedOperation, outcome: T) -> T | None:
        """Take note of the outcome of an operation of a parked run.

        If the run was being tried again, whatever parked it is gone, and the run goes on. Otherwise the operation was
        sent before the run was parked: its outcome is dropped, and it is executed again later.
        """
        if queue.parked is None or not queue.parked.trying:
            queue.died(operation, suspect=False)
            return None
        log.warning("run %s goes on", queue.record.run_id, extra={"run_id": queue.record.run_id})
        queue.go_on()
        self._changed()
        return outcome

    def _try_again(self, queue: RunQueue, parked: object) -> None:
        if queue.parked is not parked or queue.closed is not None:
            return
        if not queue.pending:  # all of it was cancelled: the next operation finds out whether the cause is gone
            self.release(queue)
            return
        queue.try_again()
        self._wake(queue)


class Dispatcher:
    """Dispatcher of operations to the engines, to each in fair order and with a bounded number in flight.

    Args:
        parked: Called whenever a run is parked or goes on.
    """

    def __init__(
        self,
        placement: Placement,
        executor: Executor,
        auto_checkpoint: AutoCheckpoint,
        results: Results,
        metrics: Metrics,
        parked: Callable[[], object],
        store: Store,
    ) -> None:
        self._placement, self._executor, self._auto_checkpoint = placement, executor, auto_checkpoint
        self._results, self._metrics = results, metrics
        self.parking = Parking(self.wake, parked)
        self.spread = SpreadSamples(placement, self, store)
        self._next = WhoIsNext(placement, self.spread.may_spread, auto_checkpoint.due)
        self._carrying: set[asyncio.Task[None]] = set()
        self._draining = False
        placement.pool.watch(self._engine_changed)

    async def drain(self, queues: Iterable[RunQueue], grace_s: float) -> None:
        """Send nothing more, withdraw what the engine has not started, and wait ``grace_s`` seconds for the rest."""
        self._draining = True
        for operation in [each for queue in queues for each in queue.sent.values()]:
            await self.withdraw(operation)
        for item in [item for there in self._placement.engines for item in there.fair_queue.clear()]:
            if isinstance(item, Visit) and not item.given.done():
                item.given.set_exception(shutting_down())
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=grace_s)
        for task in self._carrying:
            task.cancel()

    def wake(self, queue: RunQueue) -> None:
        """Finish the operations at the head of a queue that need no engine, then queue the run for the engine."""
        self._offer(queue)
        self._dispatch()

    def _engine_changed(self) -> None:
        """Send what waits for an engine that has died to another one."""
        for there in self._placement.engines:
            if not there.is_up:
                for item in there.fair_queue.clear():
                    self._next.put(item)
        self._dispatch()

    def _offer(self, queue: RunQueue) -> None:
        while (decided := self._next.offer(queue)) is not None:
            self._results.finish(queue, *decided)

    def _dispatch(self) -> None:
        if not self._draining:
            for item, there in self._next.turns():
                self._send(item, there)

    def _send(self, item: RunQueue | Visit, there: EngineQueue) -> None:
        """Send an item whose turn has come to its engine."""
        if isinstance(item, Visit):
            there.fair_queue.enter(item.owner, item.load)
            item.given.set_result(there)
            return
        head = item.head
        assert head is not None
        item.send(head)
        load = head.load
        there.fair_queue.enter(item.record.owner, load)
        task = asyncio.create_task(self._carry_out(item, head, there, load))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        self._offer(item)

    async def _carry_out(self, queue: RunQueue, operation: QueuedOperation, there: EngineQueue, load: Load) -> None:
        record = queue.record
        operation.trace.phase("engine", engine=there.engine.number)
        try:
            with logs.about(record.run_id, operation.seq):
                outcome = await self._executor.carry_out(queue, operation, self.spread)
            if outcome is not None and queue.parked is not None:
                outcome = self.parking.executed(queue, operation, outcome)
            async with queue.finishing:
                finished = outcome is not None and await self._results.answered(queue, operation, *outcome)
            if finished:
                last = len(queue.sent) == 1 and not operation.row.keeps_graph
                if last and self._auto_checkpoint.due(queue):
                    queue.go_alone()
                    await self._auto_checkpoint.take(queue, operation.seq)
        except CannotRestore as reason:
            self._placement.forget(record.run_id)  # another engine may be able to
            self.parking.park(queue, reason.error, again=reason.again)
        finally:
            queue.back(operation)
            there.fair_queue.leave(record.owner, load)
        if (pause := operation.not_before - time.monotonic()) > 0:
            asyncio.get_running_loop().call_later(pause, self._send_again, queue, operation)
        self.wake(queue)

    def _send_again(self, queue: RunQueue, operation: QueuedOperation) -> None:
        operation.not_before = 0.0  # a timer may run a nanosecond early, and nothing else wakes the queue
        self.wake(queue)

    async def withdraw(self, operation: QueuedOperation) -> bool:
        """Withdraw an operation from the engine; False if it has started there.

        Whoever decides by the answer holds the queue back, and sees afterwards whether the operation is still there.
        """
        answer = operation.answer
        return answer is None or await self._engine_of(operation).withdraw(answer)

    def _engine_of(self, operation: QueuedOperation) -> Interruptible:
        return operation.spread or self._placement.of(operation.header.run_id).engine

    async def withdraw_behind(self, queue: RunQueue, seq: int) -> None:
        """Withdraw a run's operations behind a number that the engine has not begun, the last one first."""
        for later in [each for each in reversed(queue.sent.values()) if each.seq > seq]:
            await self.withdraw(later)

    async def interrupt(self, operation: QueuedOperation) -> bool:
        """Stop an operation that the engine executes; False if it cannot be stopped or was done before."""
        answer = operation.answer
        if answer is None or not operation.row.stoppable:
            return False
        if not self._engine_of(operation).interrupt(answer):
            return False
        await asyncio.wait([answer])
        if answer.cancelled() or answer.exception() is not None:
            return False
        return answer.result()[0].result.status == pb.STATUS_CANCELLED

    async def interrupt_all(self, queue: RunQueue) -> None:
        """Withdraw or stop every operation of a run that is in the engine, without waiting for its end."""
        for operation in list(queue.sent.values()):
            if operation.answer is not None:
                await end(self._engine_of(operation), operation.answer)

    async def enter(self, visit: Visit) -> EngineQueue:
        """Wait for a place in an engine for a request outside any run's queue; :meth:`leave` frees the place.

        Raises:
            ServiceError: SHUTTING_DOWN.
        """
        if self._draining:
            raise shutting_down()
        self._next.put(visit)
        self._dispatch()
        try:
            return await visit.given
        except asyncio.CancelledError:
            if not visit.given.cancelled() and visit.given.exception() is None:
                self.leave(visit)
            raise

    def leave(self, visit: Visit) -> None:
        """Free the place taken with :meth:`enter`."""
        visit.given.result().fair_queue.leave(visit.owner, visit.load)
        self._dispatch()

    async def sample(
        self,
        asked: pb.SampleRequest,
        usage: Usage,
        model: str,
        run: RunQueue | None = None,
        on_frame: Callable[[pb.SampleFrame], None] | None = None,
        on_start: Callable[[], object] | None = None,
        *,
        count: Callable[[pb.OperationResult], object],
    ) -> EngineAnswer:
        """Sample outside any run's queue, when it is the owner's turn. A caller who is cancelled ends the generation.

        If the engine dies, the samples are generated anew, on another engine or when this one has started again, unless
        tokens of them were streamed.

        Args:
            model: Name of the base model of what is sampled from.
            run: The run whose current weights are sampled from, instead of the request's model.
            on_frame: Takes new tokens as they are generated.
            on_start: Called when an engine begins to compute them, and again later.
            count: Takes the result, or what was computed before the caller left, which may be after this has returned.

        Raises:
            ServiceError: LIMIT_EXCEEDED, SHUTTING_DOWN, or the engine's own error.
            EngineDied: The engine died after it had streamed tokens, or :data:`DEATHS` times, or does not start.
        """
        prompts = max(len(asked.prompt_ids), len(asked.call.prompts))
        prompt_tokens = sum(len(prompt.ids) for prompt in asked.prompt_ids) + grammar_tokens(asked.call)
        prompt_tokens += sum(pixels_of_images(asked.images)) // PIXELS_OF_TOKEN
        tokens = prompt_tokens + prompts * (asked.call.n or 1) * asked.call.max_tokens
        request = engine_pb2.EngineRequest(sample=asked, streams=on_frame is not None, owner=usage.owner)
        if run is not None:
            request.sampled_run = run.record.run_id
        load = Load(prompt_tokens, samples=not asked.call.prompt_logprobs)
        several = run is None and len(self._placement.engines) > 1
        visit = Visit(usage.owner, load, run, model, prompt=beginnings(usage.owner, asked) if several else ())

        def finished(result: pb.OperationResult) -> None:
            self._metrics.finished("", pb.Operation(sample=asked.call), result)
            count(result)

        request.tells_start = on_start is not None
        return await self._outside(request, usage, visit, tokens, _Heard(on_start, on_frame), finished)

    async def _outside(
        self,
        request: engine_pb2.EngineRequest,
        usage: Usage,
        visit: Visit,
        tokens: int,
        heard: _Heard,
        finished: Callable[[pb.OperationResult], None],
    ) -> EngineAnswer:
        """Execute a request that belongs to no run, counted as ``tokens`` of the quota.

        Args:
            visit: Where it goes. If it is to a run, the engine must hold that, because the request reads it.
            heard: Takes the frames of a request that streams or says when it begins.
            finished: Takes the result; that of a caller who has left says how much was computed.
        """
        usage.check(0, tokens)
        usage.operations += 1
        deaths = 0
        try:
            while True:
                try:
                    return await self._visited(request, visit, heard, finished)
                except EngineDied as error:
                    deaths += error.suspect
                    if deaths == DEATHS or heard.tokens:
                        raise
                visit = replace(visit, given=asyncio.get_running_loop().create_future())
                await self._placement.restarted(visit)
        finally:
            usage.operations -= 1

    async def _visited(
        self,
        request: engine_pb2.EngineRequest,
        visit: Visit,
        heard: _Heard,
        finished: Callable[[pb.OperationResult], None],
    ) -> EngineAnswer:
        """Execute a request of :meth:`_outside` on one engine.

        Raises:
            EngineDied: The engine died before it answered.
        """
        there = await self.enter(visit)
        while (run := visit.run) is not None and not (
            self._executor.holds(run) and there is self._placement.of(run.record.run_id)
        ):
            self.leave(visit)  # it could be the place that the run's own operation waits for
            await self._executor.hold(run)
            visit = replace(visit, given=asyncio.get_running_loop().create_future())
            there = await self.enter(visit)
        engine: Interruptible = there.engine
        on_frame = heard.frame if heard.is_wanted else None
        spread = self.spread.outside(request, visit, there, on_frame, finished)
        if spread is not None:
            engine, answer = spread, spread.answer
        else:
            answer = there.engine.request(request, (), on_frame)
        if run is not None:
            run.reads(answer)
        answer.add_done_callback(retrieved)
        answer.add_done_callback(lambda _: self.leave(visit))  # also if the caller has left meanwhile
        answer.add_done_callback(partial(tell_result, finished))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:  # the caller has left
            await end(engine, answer)
            raise


@dataclass(eq=False)
class _Heard:
    """Frames on their way to whoever asked for samples outside any run's queue.

    Attributes:
        on_start: Called at each frame; the first one says that an engine has begun.
        on_frame: Takes the frames.
        tokens: Whether it has taken tokens: what an engine computes again could not be told from these.
    """

    on_start: Callable[[], object] | None
    on_frame: Callable[[pb.SampleFrame], None] | None
    tokens: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether anybody takes frames."""
        return self.on_start is not None or self.on_frame is not None

    def frame(self, frame: pb.SampleFrame) -> None:
        """Take a frame."""
        if self.on_start is not None:
            self.on_start()
        if self.on_frame is not None:
            self.tokens = self.tokens or bool(frame.deltas)
            self.on_frame(frame)
