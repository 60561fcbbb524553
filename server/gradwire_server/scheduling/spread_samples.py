"""Samples of one request on several engines.

The prompts are divided among the engines that serve the model. The first part goes to the engine that the request would
go to alone, the others wait for their turns elsewhere. Where a run's current weights are read, its engine writes them
into a file for the others, once for each set of weights, in front of its own part; so all parts read the same weights,
and the run goes on once its engine has done its part. Each sample's random numbers are those of its place in the whole
request, so its tokens are the same wherever it is generated. Its log-probabilities may differ in the last bits, because
these depend on what is computed together; the result says which engine has generated what.

An engine that trains takes no part of the samples of one that does not: both would end later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from gradwire_proto import codec
from gradwire_proto.codec import Column
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.engine_client.client import EngineAnswer, EngineClient, EngineDied, Interruptible
from gradwire_server.errors import ServiceError
from gradwire_server.journal.segments import Buffer
from gradwire_server.sampling_seed import own_seed
from gradwire_server.scheduling.operation import Load, QueuedOperation, failed, retrieved
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.who_is_next import EngineQueue, Placement, Visit
from gradwire_server.stores.store import PASSING, Store, StoreError

log = logging.getLogger(__name__)


class SharedFiles:
    """The files of weights that engines have written for others; one is deleted once it is neither used nor newest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._uses: Counter[str] = Counter()
        self._newest: dict[tuple[str, bool], str] = {}
        self._numbers = itertools.count(1)

    def request(self, run_id: str, through_store: bool) -> engine_pb2.EngineRequest:
        """The request for the weights that a run has now."""
        name = f"{run_id}-{next(self._numbers)}"
        share = engine_pb2.EngineShareWeights(run_id=run_id, name=name, through_store=through_store)
        return engine_pb2.EngineRequest(share_weights=share)

    def keep(self, weights: engine_pb2.EngineSharedWeights) -> None:
        """Keep the weights that an engine has just answered with until :meth:`release`."""
        self._uses[weights.file] += 1
        newest = weights.run_id, weights.in_store
        before, self._newest[newest] = self._newest.get(newest), weights.file
        if before is not None and before != weights.file:
            self._delete_unused(before)

    def release(self, weights: engine_pb2.EngineSharedWeights) -> None:
        """Undo :meth:`keep`."""
        self._uses[weights.file] -= 1
        if self._newest.get((weights.run_id, weights.in_store)) != weights.file:
            self._delete_unused(weights.file)

    def forget(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        for in_store in (False, True):
            newest = self._newest.pop((run_id, in_store), None)
            if newest is not None:
                self._delete_unused(newest)

    def _delete_unused(self, file: str) -> None:
        if self._uses[file]:
            return
        del self._uses[file]
        asyncio.get_running_loop().run_in_executor(self._store.threads, self._delete, file)

    def _delete(self, file: str) -> None:
        try:
            if file.startswith(f"{PASSING}/"):
                self._store.delete_all(file)
            else:
                Path(file).unlink(missing_ok=True)
        except (OSError, StoreError) as error:
            log.warning("weights that nobody needs stay in %s: %s", file, error)


OnFrame = Callable[[pb.SampleFrame], None]
OnResult = Callable[[pb.OperationResult], None]


class Turns(Protocol):
    """Gives places in engines. A protocol, as the dispatcher imports this module."""

    async def enter(self, visit: Visit) -> EngineQueue:
        """Wait for a place in an engine."""

    def leave(self, visit: Visit) -> None:
        """Free the place."""


@dataclass(frozen=True)
class Asked:
    """A request for samples that may be spread.

    Attributes:
        owner: Name of the API key that asks.
        model: Name of the base model.
        sample: The request, with a seed.
        run: The run whose current weights are read; None for the request's model.
        operation: The run's operation that this is; None outside its queue.
        streams, tells_start: As of ``EngineRequest``.
        finished: Takes the result of each part that was stopped; None within a run's queue.
    """

    owner: str
    model: str
    sample: pb.SampleRequest
    run: RunQueue | None = None
    operation: QueuedOperation | None = None
    streams: bool = False
    tells_start: bool = False
    finished: OnResult | None = None


@dataclass(frozen=True)
class PromptRange:
    """A part of a request: the engine for it, its range of prompts, and the request for these."""

    there: EngineQueue
    start: int
    end: int
    sample: pb.SampleRequest


class SamplesInParts:
    """Samples in progress on several engines, as one request.

    Attributes:
        answer: The answer that one engine would give to the whole request.
    """

    def __init__(
        self, turns: Turns, files: SharedFiles, asked: Asked, parts: Sequence[PromptRange], on_frame: OnFrame | None
    ) -> None:
        self._turns, self._files, self._asked, self._parts, self._on_frame = turns, files, asked, parts, on_frame
        self._began, self._result = time.monotonic(), pb.OperationResult()
        sharing, first = None, self._request(parts[0])
        if asked.run is not None:
            first.sampled_run = asked.run.record.run_id
            if len(parts) > 1:
                sharing = self._engine.request(self._files.request(first.sampled_run, self._through_store))
        answers = [self._ask(self._engine, first, parts[0])]
        if sharing is not None:
            sharing.add_done_callback(retrieved)
        self._work = asyncio.create_task(self._together(sharing, answers[0]))
        self.answer: asyncio.Future[EngineAnswer] = asyncio.create_task(self._answer())
        self.answer.add_done_callback(retrieved)
        deadline = asked.operation.deadline if asked.operation is not None else math.inf
        if deadline < math.inf:
            late = asyncio.get_running_loop().call_later(max(deadline - time.monotonic(), 0.0), self._late)
            self.answer.add_done_callback(lambda _: late.cancel())

    @property
    def _through_store(self) -> bool:
        """Whether one of the engines does not find the files of another."""
        folders = {part.there.engine.folder for part in self._parts}
        return len(folders) > 1

    @property
    def _engine(self) -> EngineClient:
        return self._parts[0].there.engine

    async def withdraw(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        """Answer that the samples cannot be withdrawn: they have begun."""
        return False

    def interrupt(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        """Stop the samples; outside a run's queue nobody waits for the answer any more."""
        if self._asked.operation is None:
            return self._work.cancel()
        seq = self._asked.operation.seq
        message = f"operation {seq} was cancelled while it was executed; the run is as it was before it"
        error = pb.Error(code=pb.ERROR_CODE_CANCELLED, message=message)
        return self._end_with(pb.OperationResult(seq=seq, status=pb.STATUS_CANCELLED, error=error))

    def _late(self) -> None:
        assert self._asked.operation is not None
        seq = self._asked.operation.seq
        message = f"operation {seq} was not done when its timeout was over; the run is as it was before it"
        result = failed(seq, pb.ERROR_CODE_DEADLINE_EXCEEDED, message)
        result.error.field = "timeout"
        self._end_with(result)

    def _end_with(self, result: pb.OperationResult) -> bool:
        if self._result.status or self._work.done():
            return False
        self._result = result
        self._work.cancel()
        return True

    async def _answer(self) -> EngineAnswer:
        try:
            await asyncio.wait([self._work])
        finally:
            self._work.cancel()
        if self._work.cancelled() and self._result.status:
            return engine_pb2.EngineReply(result=self._result), b""
        return self._work.result()

    async def _together(
        self, sharing: asyncio.Future[EngineAnswer] | None, first: asyncio.Future[EngineAnswer]
    ) -> EngineAnswer:
        engine = self._engine
        tasks = [asyncio.create_task(_until_answered(engine, first))]
        shared = None
        try:
            shared = await self._shared(sharing, tasks[0]) if sharing is not None else None
            tasks += [asyncio.create_task(self._elsewhere(part, shared)) for part in self._parts[1:]]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if shared is not None:
                self._files.release(shared)
        for task in tasks:
            if not task.cancelled():
                task.result()
        return self._merged([task.result() for task in tasks])

    async def _shared(
        self, sharing: asyncio.Future[EngineAnswer], first: asyncio.Task[EngineAnswer]
    ) -> engine_pb2.EngineSharedWeights | None:
        """The file of the run's weights, kept until it is released; None if it cannot be written."""
        try:
            reply, _ = await sharing
        except ServiceError as error:
            log.warning("one engine samples instead of %d: %s", len(self._parts), error)
            return None
        except EngineDied:
            await first  # its part rather than the file may have been the end of the engine
            raise
        self._files.keep(reply.shared_weights)
        return reply.shared_weights

    async def _elsewhere(self, part: PromptRange, shared: engine_pb2.EngineSharedWeights | None) -> EngineAnswer:
        """Generate a part when it is its turn; where another engine refuses it, on the first one."""
        request, engine = self._request(part), self._engine
        if shared is not None:
            request.weights.CopyFrom(shared)
        elif self._asked.run is not None:
            request.sampled_run = self._asked.run.record.run_id
            return await _until_answered(engine, self._ask(engine, request, part))
        given = sum(len(prompt.ids) for prompt in part.sample.prompt_ids)
        visit = Visit(self._asked.owner, Load(given, samples=True), model=self._asked.model, engine=part.there)
        there = await self._turns.enter(visit)
        try:
            return await _until_answered(there.engine, self._ask(there.engine, request, part))
        except ServiceError as error:
            log.warning("engine %d leaves its samples to engine %d: %s", there.engine.number, engine.number, error)
        finally:
            self._turns.leave(visit)
        return await _until_answered(engine, self._ask(engine, request, part))

    def _request(self, part: PromptRange) -> engine_pb2.EngineRequest:
        return engine_pb2.EngineRequest(
            sample=part.sample,
            owner=self._asked.owner,
            streams=self._asked.streams,
            tells_start=self._asked.tells_start,
            first_prompt=part.start,
            in_run=self._asked.operation is not None,
        )

    def _ask(
        self, engine: EngineClient, request: engine_pb2.EngineRequest, part: PromptRange
    ) -> asyncio.Future[EngineAnswer]:
        on_frame = self._on_frame
        if on_frame is None:
            answer = engine.request(request)
        else:
            answer = engine.request(request, (), partial(_shifted, on_frame, part.start * (part.sample.call.n or 1)))
        answer.add_done_callback(retrieved)
        if self._asked.finished is not None:
            answer.add_done_callback(partial(tell_result, self._asked.finished, only=pb.STATUS_CANCELLED))
        return answer

    def _merged(self, answers: Sequence[EngineAnswer]) -> EngineAnswer:
        if any(reply.HasField("not_started") for reply, _ in answers):
            return engine_pb2.EngineReply(not_started=pb.Empty()), b""
        seq = self._asked.operation.seq if self._asked.operation is not None else 0
        if len(answers) == 1:
            ((reply, payload),) = answers
            reply.result.seq = seq
            return reply, payload
        results = [reply.result for reply, _ in answers]
        columns = [codec.decode(reply.result.tensors, payload) for reply, payload in answers]
        specs, buffers = codec.encode({name: _joined([each[name] for each in columns]) for name in columns[0]})
        payload = b"".join(buffers)
        result = pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED, tensors=specs, payload_bytes=len(payload))
        result.timings.engine_s = time.monotonic() - self._began
        sample = result.sample
        if results[0].sample.HasField("step"):
            sample.step = results[0].sample.step
        for part, each in zip(self._parts, results, strict=True):
            sample.stop_reasons.extend(each.sample.stop_reasons)
            sample.texts.extend(each.sample.texts)
            result.timings.used_s += each.timings.used_s
            sample.num_prompt_tokens += each.sample.num_prompt_tokens
            sample.num_sampled_tokens += each.sample.num_sampled_tokens
            sample.num_drafted_tokens += each.sample.num_drafted_tokens
            sample.num_accepted_tokens += each.sample.num_accepted_tokens
            sample.num_cached_tokens += each.sample.num_cached_tokens
            sample.parts.add(engine=part.there.engine.number, num_prompts=part.end - part.start)
        return engine_pb2.EngineReply(result=result), payload


async def _until_answered(engine: Interruptible, answer: asyncio.Future[EngineAnswer]) -> EngineAnswer:
    """Wait for an answer; if the waiting is cancelled, the engine ends the request."""
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        await end(engine, answer)
        raise


def tell_result(
    finished: OnResult, answer: asyncio.Future[EngineAnswer], only: pb.Status.ValueType | None = None
) -> None:
    """Hand an engine's result to whoever counts it, unless there is none, or one of another status."""
    if answer.cancelled() or answer.exception() is not None:
        return
    reply, _ = answer.result()
    if reply.HasField("result") and only in (None, reply.result.status):
        finished(reply.result)


async def end(engine: Interruptible, answer: asyncio.Future[EngineAnswer]) -> None:
    """Withdraw a request, or have the engine stop it."""
    if not await engine.withdraw(answer):
        engine.interrupt(answer)


def _shifted(on_frame: OnFrame, rows: int, frame: pb.SampleFrame) -> None:
    for delta in frame.deltas:
        delta.row += rows
    on_frame(frame)


def _joined(columns: Sequence[Column]) -> Column:
    levels = zip(*(column.levels for column in columns), strict=True)
    return Column(np.concatenate([column.values for column in columns]), tuple(map(np.concatenate, levels)))


LEAST_SAMPLES = 32
"""Samples of a part at least: with fewer, an engine hardly ends sooner than it would with all of them.

Of a token, most of the time is the same for any number of samples, until there are some dozens (``docs/scaling.md``).
"""


class SpreadSamples:
    """Spreads requests for samples over engines."""

    def __init__(self, placement: Placement, turns: Turns, store: Store) -> None:
        self._placement, self._turns = placement, turns
        self.files = SharedFiles(store)

    def may_spread(self, queue: RunQueue, operation: QueuedOperation) -> bool:
        """Whether a run's operation asks for samples that several engines could generate."""
        if len(self._placement.engines) < 2 or not operation.row.samples or operation.deaths:
            return False
        tensors, call = operation.header.tensors, operation.header.operation.sample
        if tensors and not (len(tensors) == 1 and tensors[0].name == "prompt_ids" and len(tensors[0].level_sizes) == 1):
            return False
        prompts = tensors[0].level_sizes[0] if tensors else len(call.prompts)
        return self._count(queue.record.config.base_model, call, prompts) > 1

    def in_run(self, queue: RunQueue, operation: QueuedOperation, payload: Sequence[Buffer]) -> SamplesInParts | None:
        """Begin the samples of a run's operation, which is alone in its engine; None if they are not to be spread."""
        if not self.may_spread(queue, operation):
            return None
        sample, config = pb.SampleRequest(call=operation.header.operation.sample), queue.record.config
        if operation.header.tensors:
            try:
                column = codec.decode(operation.header.tensors, b"".join(payload))["prompt_ids"]
            except codec.CodecError:
                return None  # its engine says what is wrong
            if column.values.ndim != 1 or column.values.dtype.kind not in "iu":
                return None
            sample.prompt_ids.extend(pb.TokenIds(ids=row.tolist()) for row in column.rows())
        if not sample.call.HasField("seed"):
            sample.call.seed = own_seed(config.seed, operation.seq)
        asked = Asked(queue.record.owner, config.base_model, sample, queue, operation)
        return self.begin(asked, self._placement.of(queue.record.run_id))

    def outside(
        self,
        request: engine_pb2.EngineRequest,
        visit: Visit,
        there: EngineQueue,
        on_frame: OnFrame | None,
        finished: OnResult,
    ) -> SamplesInParts | None:
        """Begin samples outside a run's queue; None if they are not to be spread.

        Args:
            request: As it would go to one engine.
            visit: The visit that has a place in an engine for them.
            on_frame: Takes the frames that the request asks for.
            finished: Takes the results of parts that were stopped.
        """
        sample = request.sample
        if self._count(visit.model, sample.call, max(len(sample.prompt_ids), len(sample.call.prompts))) < 2:
            return None
        if not sample.call.HasField("seed"):
            sample.call.seed = secrets.randbits(62)
        asked = Asked(
            visit.owner,
            visit.model,
            sample,
            visit.run,
            streams=request.streams,
            tells_start=request.tells_start,
            finished=finished,
        )
        return self.begin(asked, there, on_frame)

    def begin(self, asked: Asked, there: EngineQueue, on_frame: OnFrame | None = None) -> SamplesInParts:
        """Begin samples; the part of the engine ``there`` is sent at once, ahead of whatever that is sent next."""
        call = asked.sample.call
        prompts = max(len(asked.sample.prompt_ids), len(call.prompts))
        others = [
            each
            for each in self._placement.able(asked.model)
            if each is not there and (there.fair_queue.works or not each.fair_queue.works)
        ]
        count = min(self._count(asked.model, call, prompts), 1 + len(others))
        ends = [prompts * number // count for number in range(count + 1)]
        parts = [
            PromptRange(engine, start, end, part_of(asked.sample, start, end))
            for engine, start, end in zip([there, *others], ends, ends[1:], strict=False)
        ]
        return SamplesInParts(self._turns, self.files, asked, parts, on_frame)

    def _count(self, model: str, call: pb.SampleCall, prompts: int) -> int:
        """Number of engines for so many prompts."""
        if call.deterministic or call.prompt_logprobs:
            return 1
        serving = [each for each in self._placement.engines if model in each.engine.models and not each.drains]
        return min(len(serving), prompts, prompts * (call.n or 1) // LEAST_SAMPLES)


def part_of(whole: pb.SampleRequest, start: int, end: int) -> pb.SampleRequest:
    """The request for the samples of some of the prompts."""
    part = pb.SampleRequest(model=whole.model, call=whole.call, images=whole.images)
    if whole.call.prompts:
        del part.call.prompts[:]
        part.call.prompts.extend(whole.call.prompts[start:end])
    part.prompt_ids.extend(whole.prompt_ids[start:end])
    part.prompt_images.extend(whole.prompt_images[start:end])
    return part
