"""Sampling outside a run's queue: from a model, a checkpoint, or a run's current weights; whole or token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.access.model_names import ModelNames
from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.engine_client.client import EngineDied
from gradwire_server.errors import ServiceError
from gradwire_server.journal.checkpoint_records import CheckpointRecords
from gradwire_server.journal.rows import StoredResult
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.usage import Usage
from gradwire_server.scheduling.checks import check_sample_request, check_sampled_bytes
from gradwire_server.scheduling.scheduler import Scheduler


class Sampling:
    """Samples for callers who may read what they sample from."""

    def __init__(
        self,
        config: ServerConfig,
        runs: RunRecords,
        checkpoints: CheckpointRecords,
        names: ModelNames,
        scheduler: Scheduler,
        usage: Usage,
    ) -> None:
        self._config, self._runs, self._checkpoints, self._names = config, runs, checkpoints, names
        self._scheduler, self._usage = scheduler, usage

    async def sample(
        self, caller: Caller, request: pb.SampleRequest, label: str, on_start: Callable[[], object] | None
    ) -> StoredResult:
        """Sample. A caller who is cancelled ends the generation.

        Args:
            label: The label under which it is counted; the run's name if empty.
            on_start: Called when an engine begins, and again later.

        Raises:
            ServiceError: The request is invalid; ENGINE_UNAVAILABLE if engines died while they sampled.
        """
        return await self._answer(caller, *self._checked(caller, request), None, on_start, label)

    async def stream(
        self, caller: Caller, request: pb.SampleRequest, on_start: Callable[[], object] | None
    ) -> AsyncGenerator[pb.SampleFrame]:
        """Yield new tokens as they are generated, and last the result without its tensors.

        What a slow reader has not taken is merged, so it is never more than the samples themselves. A reader who leaves
        ends the generation.

        Raises:
            ServiceError: As for :meth:`sample`; UNSUPPORTED for prompt_logprobs.
        """
        asked, source, current = self._checked(caller, request)
        if asked.call.prompt_logprobs:
            message = "a stream has no prompt_logprobs: sample without a stream"
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="prompt_logprobs")
        tokens = _NewTokens()
        answer = asyncio.create_task(self._answer(caller, asked, source, current, tokens.add, on_start))
        answer.add_done_callback(lambda _: tokens.changed.set())
        try:
            while not answer.done():
                await tokens.changed.wait()
                tokens.changed.clear()
                for frame in tokens.take():
                    yield frame
            for frame in tokens.take():
                yield frame
            result = answer.result().header
            result.ClearField("tensors")
            result.payload_bytes = 0
            yield pb.SampleFrame(result=result)
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _checked(self, caller: Caller, request: pb.SampleRequest) -> tuple[pb.SampleRequest, RunRecord | None, bool]:
        """The request with its model resolved, the run whose weights are sampled from, and whether its current ones."""
        refusal = check_sample_request(request, self._config.limits)
        if refusal is not None:
            raise ServiceError.of(refusal)
        asked = pb.SampleRequest()
        asked.CopyFrom(request)
        model, source = asked.model, None
        base = self._names.known(model)
        current = base is None and model.startswith("run-") and "/" not in model
        if current:
            source = self._runs.get(model, caller)
        elif base is None and "/" in model and not model.startswith("/"):
            source = self._checkpoints.get(model, caller)[0]
        else:
            asked.model = self._names.find(model, "model")
        context_length = self._scheduler.checks.context_length(_base(asked, source))
        if not asked.call.HasField("max_tokens"):
            asked.call.max_tokens = min(self._config.limits.max_sample_tokens, context_length)
        refusal = check_sampled_bytes(asked.call, len(asked.prompt_ids), self._config.limits, context_length)
        if refusal is not None:
            raise ServiceError.of(refusal)
        return asked, source, current

    async def _answer(
        self,
        caller: Caller,
        asked: pb.SampleRequest,
        source: RunRecord | None,
        current: bool,
        on_frame: Callable[[pb.SampleFrame], None] | None,
        on_start: Callable[[], object] | None,
        label: str = "",
    ) -> StoredResult:
        queue = self._scheduler.queue(source) if source is not None and current else None
        usage, base = self._scheduler.usage(caller.name), _base(asked, source)
        session_id = caller.session.session_id if caller.session is not None else ""
        try:
            reply, payload = await self._scheduler.dispatcher.sample(
                asked,
                usage,
                base,
                queue,
                on_frame,
                on_start,
                count=lambda result: self._usage.count(
                    caller.name, source, result, label=label, base_model=base, session_id=session_id
                ),
            )
        except EngineDied as error:
            message = "the engine ended while it sampled, and could not be replaced in time; try again"
            raise ServiceError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, message) from error
        return StoredResult(reply.result, payload)


def _base(asked: pb.SampleRequest, source: RunRecord | None) -> str:
    return asked.model if source is None else source.config.base_model


@dataclass(eq=False)
class _NewTokens:
    """New tokens that the reader has not taken yet, merged by sample.

    Attributes:
        changed: Set when there is something to take.
    """

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: dict[int, pb.SampleDelta] = field(default_factory=dict)

    def add(self, frame: pb.SampleFrame) -> None:
        """Add what the engine has sent."""
        for delta in frame.deltas:
            if delta.row in self._waiting:
                self._waiting[delta.row].MergeFrom(delta)
            else:
                self._waiting[delta.row] = delta
        self.changed.set()

    def take(self) -> list[pb.SampleFrame]:
        """Take everything, in frames of about ``CHUNK_BYTES`` at most, unless one sample has more."""
        taken, self._waiting = self._waiting, {}
        frames, size = [pb.SampleFrame()], 0
        for delta in taken.values():
            length = delta.ByteSize()
            if size and size + length > CHUNK_BYTES:
                frames.append(pb.SampleFrame())
                size = 0
            frames[-1].deltas.append(delta)
            size += length
        return frames if taken else []
