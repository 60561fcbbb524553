"""Batch the generation requests of concurrent episodes for one sampler."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradwire.errors import RETRYABLE
from gradwire.rl.generation import Generation, InferenceModule, SamplingParams, TextCodec
from gradwire.rl.types import IntArray

logger = logging.getLogger("gradwire.rl")
GATHER_S, MOST_GATHERED = 0.01, 5
"""Requests are sent once none has come for so many seconds, or after so many times that."""

Ask = Callable[[IntArray, SamplingParams], Awaitable[Generation]]


async def in_parts(ask: Ask, codec: TextCodec, prompt: IntArray, params: SamplingParams, size: int) -> Generation:
    """Generate a response by requests of up to ``size`` tokens, each of which continues the last.

    Each part is of one version of the weights: the policy of that version reads the prompt and the parts before, and
    its log-probabilities are those of the new tokens given all of it.
    """
    parts: list[Generation] = []
    left, ids = params.max_tokens, np.asarray(prompt, np.int64)
    while True:
        asked = min(size, left)
        parts.append(await ask(ids, replace(params, max_tokens=asked)))
        written = len(parts[-1].token_ids)
        left -= written
        if len(parts) > 1 and (stopped := await _stopped(parts, codec, params.stop)) is not None:
            return stopped
        if parts[-1].stop_reason != "length" or written < asked or not left:
            return _joined(parts, await _text(parts, codec))
        ids = np.concatenate([ids, parts[-1].token_ids])


async def _stopped(parts: Sequence[Generation], codec: TextCodec, stops: Sequence[str]) -> Generation | None:
    """The response up to a stop string that lies in two parts; None if there is none."""
    text = await _text(parts, codec) if stops else ""
    if not any(stop in text for stop in stops):
        return None
    whole = _joined(parts, "")
    first = len(whole.token_ids) - len(parts[-1].token_ids) + 1
    texts = await codec.decode([whole.token_ids[:end] for end in range(first, len(whole.token_ids) + 1)])
    for end, text in enumerate(texts, first):
        if places := [at for stop in stops if (at := text.find(stop)) >= 0]:
            versions = None if whole.token_versions is None else whole.token_versions[:end]
            return Generation(
                text[: min(places)], whole.token_ids[:end], whole.logprobs[:end], "stop", whole.version, versions
            )
    return None


async def _text(parts: Sequence[Generation], codec: TextCodec) -> str:
    text = "".join(part.text for part in parts)
    if len(parts) == 1 or "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    ids = np.concatenate([part.token_ids for part in parts])  # a character lies in two parts
    return (await codec.decode([ids[:-1] if parts[-1].stop_reason == "eos" else ids]))[0]


def _joined(parts: Sequence[Generation], text: str) -> Generation:
    if len(parts) == 1:
        return parts[0]
    return Generation(
        text,
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        parts[-1].stop_reason,
        parts[0].version,
        np.concatenate([np.full(len(part.token_ids), part.version) for part in parts]),
    )


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from numbers and names: reproducible, and unrelated for different inputs."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(eq=False)
class _Request:
    order: tuple[int, int]
    prompt: IntArray
    params: SamplingParams
    answer: asyncio.Future[Generation]


@dataclass
class SamplerStatistics:
    """Counters of a batcher.

    Attributes:
        calls: Batches sent.
        requests: Prompts in those batches.
        tokens: Tokens sampled.
        busy_s: Seconds with at least one batch in flight.
        retries: Batches sent again because the sampler was away.
    """

    calls: int = 0
    requests: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    retries: int = 0


class GenerationBatcher:
    """Collects the requests of episodes and sends them in batches.

    Deterministic mode: a batch is sent when every active episode (:meth:`enter`, :meth:`leave`) is waiting for one.
    Batches are ordered by turn and episode number and have their own seeds, so that a seed gives the same episodes
    whatever the timing. Episodes whose environment takes longer than ``straggler_s`` are no longer waited for until
    they ask again; then the result depends on timing. Otherwise, waiting requests are sent once the sampler is free and
    no more come for a moment: episodes that ask together do not wait for a batch of the first one alone.

    Args:
        inference: The sampler.
        seed: Seed from which the batches' seeds are derived.
        deterministic: See above.
        max_batch: Maximum number of prompts per batch.
        concurrent_calls: Batches in flight at once, if not deterministic.
        patience_s: How long an unreachable sampler is retried.
        straggler_s: See above; None waits without limit.
        partial_tokens: Tokens of a response per request; None: all of them.
    """

    def __init__(
        self,
        inference: InferenceModule,
        *,
        seed: int = 0,
        deterministic: bool = True,
        max_batch: int = 256,
        concurrent_calls: int = 2,
        patience_s: float = 60.0,
        straggler_s: float | None = 5.0,
        partial_tokens: int | None = None,
    ) -> None:
        self._inference = inference
        self._seed = seed
        self._deterministic = deterministic
        self._max_batch = max_batch
        self._concurrent_calls = 1 if deterministic else concurrent_calls
        self._patience_s = patience_s
        self._straggler_s = straggler_s
        self._partial_tokens = partial_tokens
        self._alarm: asyncio.TimerHandle | None = None
        self._waiting: dict[_Request, None] = {}
        self._turns: dict[int, int] = {}
        self._active: set[int] = set()
        self._excused: set[int] = set()
        self._busy_since = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.statistics = SamplerStatistics()

    def enter(self, index: int) -> None:
        """Register the episode of this number as active."""
        self._active.add(index)

    def leave(self, index: int) -> None:
        """Unregister the episode of this number."""
        self._active.discard(index)
        self._excused.discard(index)
        self._gather()

    async def generate(self, index: int, prompt: IntArray, params: SamplingParams) -> Generation:
        """Generate a response for the episode of this number."""
        if self._partial_tokens is None:
            return await self._request(index, prompt, params)
        ask = functools.partial(self._request, index)
        return await in_parts(ask, self._inference.codec, prompt, params, self._partial_tokens)

    async def _request(self, index: int, prompt: IntArray, params: SamplingParams) -> Generation:
        # Requests that were served least often go first, so that a full batch leaves no episode behind for long.
        self._excused.discard(index)
        turn = self._turns[index] = self._turns.get(index, 0) + 1
        request = _Request((turn, index), prompt, params, asyncio.get_running_loop().create_future())
        self._waiting[request] = None
        self._gather()
        try:
            return await request.answer
        finally:
            self._waiting.pop(request, None)

    async def close(self) -> None:
        self._disarm()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _gather(self, before: int = 0, times: int = 0) -> None:
        """Dispatch; if not deterministic and others may ask, as soon as none has for a moment."""
        if times:
            self._alarm = None  # it has rung
        waiting = len(self._waiting)
        everybody = waiting >= min(len(self._active), self._max_batch)
        if self._deterministic or everybody or (times and waiting <= before) or times == MOST_GATHERED:
            self._dispatch()
        elif waiting and self._alarm is None and len(self._tasks) < self._concurrent_calls:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(GATHER_S, self._gather, waiting, times + 1)

    def _dispatch(self, late: bool = False) -> None:
        if not self._waiting or len(self._tasks) >= self._concurrent_calls:
            return
        if late:
            self._excused = self._active - {request.order[1] for request in self._waiting}
        if self._deterministic and len(self._waiting) < len(self._active) - len(self._excused):
            if self._alarm is None and self._straggler_s is not None:
                loop = asyncio.get_running_loop()
                self._alarm = loop.call_later(self._straggler_s, lambda: self._dispatch(late=True))
            return
        self._disarm()
        ordered = sorted(self._waiting, key=lambda request: request.order)
        kind = ordered[0].params
        same = [request for request in ordered if request.params is kind or request.params == kind]
        batch = same[: self._max_batch]
        for request in batch:
            del self._waiting[request]
        if not self._tasks:
            self._busy_since = time.monotonic()
        task = asyncio.create_task(self._send(batch, kind))
        self._tasks.add(task)
        task.add_done_callback(self._sent)
        if not self._deterministic:
            self._dispatch()

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.statistics.busy_s += time.monotonic() - self._busy_since
        # The answered episodes come first: each asks again or leaves, and either dispatches the next batch.
        asyncio.get_running_loop().call_soon(self._gather)

    async def _send(self, batch: Sequence[_Request], params: SamplingParams) -> None:
        statistics = self.statistics
        if params.seed is None:
            params = replace(params, seed=derive_seed(self._seed, "batch", statistics.calls))
        statistics.calls += 1
        statistics.requests += len(batch)
        try:
            answers = await self._patiently([request.prompt for request in batch], params)
            pairs = list(zip(batch, answers, strict=True))
        except (Exception, asyncio.CancelledError) as error:  # the sampler's failure is that of all who waited for it
            if isinstance(error, asyncio.CancelledError):
                error = RuntimeError("the sampler's request was cancelled")
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(error)
            return
        for request, generation in pairs:
            statistics.tokens += len(generation.token_ids)
            if not request.answer.done():
                request.answer.set_result(generation)

    async def _patiently(self, prompts: list[IntArray], params: SamplingParams) -> list[Generation]:
        since, wait = time.monotonic(), 0.1
        while True:
            try:
                return await self._inference.generate(prompts, params)
            except (*RETRYABLE, ConnectionError) as error:
                if time.monotonic() - since + wait > self._patience_s:
                    raise
                self.statistics.retries += 1
                logger.warning("the sampler is away, trying again in %.1f s: %s", wait, error)
                await asyncio.sleep(wait)
                wait = min(2 * wait, 5.0)
