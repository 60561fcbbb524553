"""Dispatch of queued operations to the engine, several at a time.

Operations of a run are sent to the engine before it has answered the earlier ones. After a failed operation the engine
does not start the later ones and answers ``not_started`` for each; the dispatcher decides their results once every
operation before them has its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import Usage
from gradwire_server.engine_client.process import EngineAnswer, EngineClient
from gradwire_server.errors import shutting_down
from gradwire_server.journal.segments import Buffer
from gradwire_server.observability import logs
from gradwire_server.observability.metrics import Metrics
from gradwire_server.operation_kinds import kind_of
from gradwire_server.scheduling import abort_rule
from gradwire_server.scheduling.auto_checkpoint import AutoCheckpoint
from gradwire_server.scheduling.executor import Executor
from gradwire_server.scheduling.fairness import PIPE_TOKENS, FairQueue
from gradwire_server.scheduling.operation import QueuedOperation, retrieved
from gradwire_server.scheduling.parking import CannotRestore, Parking
from gradwire_server.scheduling.results import Results
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.states import OperationState


@dataclass(eq=False)
class _Place:
    """Place in the queue of a request that belongs to no run's queue, such as a sample outside a run."""

    owner: str
    tokens: int
    given: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Dispatcher:
    """Dispatcher of operations to the engine, in fair order and with a bounded number in flight.

    Attributes:
        fair_queue: What waits for the engine, and how much is in it.
        parking: Parks the runs that cannot be restored.

    Args:
        parked: Called whenever a run is parked or goes on.
    """

    def __init__(
        self,
        engine: EngineClient,
        executor: Executor,
        auto_checkpoint: AutoCheckpoint,
        results: Results,
        metrics: Metrics,
        parked: Callable[[], object] = bool,
    ) -> None:
        self._engine, self._executor, self._auto_checkpoint = engine, executor, auto_checkpoint
        self._results, self._metrics = results, metrics
        self.fair_queue: FairQueue[RunQueue | _Place] = FairQueue(_wants_alone)
        self.parking = Parking(self.wake, parked)
        self._carrying: set[asyncio.Task[None]] = set()
        self._draining = False

    async def drain(self, queues: Iterable[RunQueue], grace_s: float) -> None:
        """Send nothing more, withdraw what the engine has not started, and wait ``grace_s`` seconds for the rest."""
        self._draining = True
        for operation in [each for queue in queues for each in queue.sent.values()]:
            await self.withdraw(operation)
        for item in self.fair_queue.clear():
            if isinstance(item, _Place) and not item.given.done():
                item.given.set_exception(shutting_down())
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=grace_s)
        for task in self._carrying:
            task.cancel()

    def wake(self, queue: RunQueue) -> None:
        """Finish the operations at the head of a queue that need no engine, then queue the run for the engine."""
        self._offer(queue)
        self._dispatch()

    def _offer(self, queue: RunQueue) -> None:
        while (head := queue.head) is not None:
            if not self._may_go(queue, head):
                return  # wake() is called again when it is journaled and when earlier operations get their results
            verdict = None if queue.sent else abort_rule.verdict(queue.record, head)
            if verdict is None:
                if queue not in self.fair_queue:
                    self.fair_queue.put(queue.record.owner, queue)
                return
            self._results.finish(queue, head, verdict)

    def _may_go(self, queue: RunQueue, operation: QueuedOperation) -> bool:
        if operation.refusal is None and time.monotonic() < operation.not_before:
            return False
        if operation.state is OperationState.QUEUED and not queue.sent:
            return True
        return queue.is_held and queue.may_follow(operation) and not self._auto_checkpoint.due(queue)

    def _dispatch(self) -> None:
        while not self._draining and (item := self.fair_queue.pop()) is not None:
            if isinstance(item, _Place):
                if not item.given.done():
                    self.fair_queue.enter(item.owner, item.tokens)
                    item.given.set_result(None)
                continue
            head = item.head
            if head is None or not self._may_go(item, head):
                continue
            item.send(head)
            self.fair_queue.enter(item.record.owner, head.tokens, alone=head.deaths > 0)
            task = asyncio.create_task(self._carry_out(item, head))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)
            self._offer(item)

    async def _carry_out(self, queue: RunQueue, operation: QueuedOperation) -> None:
        record = queue.record
        operation.trace.phase("engine")
        try:
            with logs.about(record.run_id, operation.seq):
                outcome = await self._executor.carry_out(queue, operation)
            if outcome is not None and queue.parked is not None:
                outcome = self.parking.executed(queue, operation, outcome)
            async with queue.finishing:
                finished = outcome is not None and await self._finish(queue, operation, *outcome)
            if finished:
                last = len(queue.sent) == 1 and not kind_of(operation.header.operation).keeps_graph
                if last and self._auto_checkpoint.due(queue):
                    queue.go_alone()
                    await self._auto_checkpoint.take(queue, operation.seq)
        except CannotRestore as reason:
            self.parking.park(queue, reason.error, again=reason.again)
        finally:
            queue.back(operation)
            self.fair_queue.leave(record.owner, operation.tokens)
        if (pause := operation.not_before - time.monotonic()) > 0:
            asyncio.get_running_loop().call_later(pause, self._send_again, queue, operation)
        self.wake(queue)

    def _send_again(self, queue: RunQueue, operation: QueuedOperation) -> None:
        operation.not_before = 0.0  # a timer may run a nanosecond early, and nothing else wakes the queue
        self.wake(queue)

    async def _finish(
        self, queue: RunQueue, operation: QueuedOperation, result: pb.OperationResult, payload: Buffer
    ) -> bool:
        """Give an operation its result; False if it was removed meanwhile."""
        if operation.state is OperationState.EARLY and operation.appended is not None:
            together = operation.patient and queue.is_first(operation)
            if together and await self._results.finish_with_operation(queue, operation, result, payload):
                return True
            await asyncio.wait([operation.appended])
        if operation.state is not OperationState.SENT:
            return False
        self._results.finish(queue, operation, result, payload)
        return True

    async def withdraw(self, operation: QueuedOperation) -> bool:
        """Withdraw an operation from the engine; False if it has started there.

        Whoever decides by the answer holds the queue back, and sees afterwards whether the operation is still there.
        """
        return operation.answer is None or await self._engine.withdraw(operation.answer)

    async def withdraw_behind(self, queue: RunQueue, seq: int) -> None:
        """Withdraw a run's operations behind a number that the engine has not begun, the last one first."""
        for later in [each for each in reversed(queue.sent.values()) if each.seq > seq]:
            await self.withdraw(later)

    async def interrupt(self, operation: QueuedOperation) -> bool:
        """Stop an operation that the engine executes; False if it cannot be stopped or was done before."""
        answer = operation.answer
        if answer is None or not kind_of(operation.header.operation).stoppable or not self._engine.interrupt(answer):
            return False
        await asyncio.wait([answer])
        if answer.cancelled() or answer.exception() is not None:
            return False
        return answer.result()[0].result.status == pb.STATUS_CANCELLED

    async def interrupt_all(self, queue: RunQueue) -> None:
        """Withdraw or stop every operation of a run that is in the engine, without waiting for its end."""
        for answer in [each.answer for each in queue.sent.values() if each.answer is not None]:
            await self._end(answer)

    async def _end(self, answer: asyncio.Future[EngineAnswer]) -> None:
        if not await self._engine.withdraw(answer):
            self._engine.interrupt(answer)

    async def enter(self, owner: str, tokens: int = PIPE_TOKENS) -> None:
        """Wait for a place in the engine for a request outside any run's queue; :meth:`leave` frees the place.

        Raises:
            ServiceError: SHUTTING_DOWN.
        """
        if self._draining:
            raise shutting_down()
        place = _Place(owner, tokens)
        self.fair_queue.put(owner, place)
        self._dispatch()
        try:
            await place.given
        except asyncio.CancelledError:
            if not place.given.cancelled() and place.given.exception() is None:
                self.leave(owner, tokens)
            raise

    def leave(self, owner: str, tokens: int = PIPE_TOKENS) -> None:
        """Free the place taken with :meth:`enter`."""
        self.fair_queue.leave(owner, tokens)
        self._dispatch()

    async def sample(
        self,
        asked: pb.SampleRequest,
        usage: Usage,
        run: RunQueue | None = None,
        on_frame: Callable[[pb.SampleFrame], None] | None = None,
    ) -> EngineAnswer:
        """Sample outside any run's queue, when it is the owner's turn. A caller who is cancelled ends the generation.

        Args:
            run: The run whose current weights are sampled from, instead of the request's model.
            on_frame: Takes new tokens as they are generated.

        Raises:
            ServiceError: LIMIT_EXCEEDED, SHUTTING_DOWN, or the engine's own error.
            EngineDied: The engine died while it sampled.
        """
        prompts = max(len(asked.prompt_ids), len(asked.call.prompts))
        given = sum(len(prompt.ids) for prompt in asked.prompt_ids)
        tokens = given + prompts * (asked.call.n or 1) * asked.call.max_tokens
        request = engine_pb2.EngineRequest(sample=asked, streams=on_frame is not None)
        if run is not None:
            request.sampled_run = run.record.run_id
        reply, payload = await self._outside(request, usage, given, tokens, run, on_frame)
        self._metrics.finished("", pb.Operation(sample=asked.call), reply.result)
        return reply, payload

    async def _outside(
        self,
        request: engine_pb2.EngineRequest,
        usage: Usage,
        given: int,
        tokens: int,
        run: RunQueue | None = None,
        on_frame: Callable[[pb.SampleFrame], None] | None = None,
    ) -> EngineAnswer:
        """Execute a request that belongs to no run, with ``given`` tokens, counted as ``tokens`` of the quota.

        Args:
            run: A run that the engine must hold, because the request reads it.
            on_frame: Takes the frames of a request that streams.
        """
        usage.check(0, tokens)
        usage.operations += 1
        try:
            await self.enter(usage.owner, given)
            while run is not None and not self._executor.holds(run):
                self.leave(usage.owner, given)  # it could be the place that the run's own operation waits for
                await self._executor.hold(run)
                await self.enter(usage.owner, given)
            answer = self._engine.request(request) if on_frame is None else self._engine.request(request, (), on_frame)
            answer.add_done_callback(retrieved)
            answer.add_done_callback(lambda _: self.leave(usage.owner, given))  # also if the caller has left meanwhile
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:  # the caller has left
                await self._end(answer)
                raise
        finally:
            usage.operations -= 1


def _wants_alone(item: RunQueue | _Place) -> bool:
    """Whether an operation is suspected of having killed an engine; it then runs alone, so that blame is certain."""
    return isinstance(item, RunQueue) and (head := item.head) is not None and head.deaths > 0
