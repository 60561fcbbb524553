"""Samples of the core, row by row, and their tokens as texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from gradwire_proto.codec import decode
from gradwire_proto.v1 import training_pb2 as pb
from starlette.requests import Request

from gradwire_server.access.calls import CallKind
from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.errors import ServiceError

R = TypeVar("R")

DECODED_TOGETHER = 2048
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass
class Tokens:
    """Some tokens of one row.

    Attributes:
        ids: The tokens.
        logprobs: Their log-probabilities; None where there is none (a prompt's first token).
        tops: The most probable tokens in each place with their log-probabilities, most probable first.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.ids + other.ids, self.logprobs + other.logprobs, self.tops + other.tops)


@dataclass
class Choice:
    """One sample.

    Attributes:
        text: Its text.
        finish_reason: ``"stop"`` or ``"length"``.
        tokens: Its tokens.
        prompt: The tokens of its prompt, scored, if the call wanted that.
    """

    text: str
    finish_reason: str
    tokens: Tokens
    prompt: Tokens | None = None


@dataclass
class Answers:
    """The samples of a request, prompt by prompt."""

    rows: list[Choice]
    num_prompt_tokens: int
    num_sampled_tokens: int


async def sampled(core: Core, caller: Caller, asked: pb.SampleRequest, http: Request) -> Answers:
    """Sample; a client who leaves ends the generation."""

    async def work() -> Answers:
        async with core.calls.turn(caller.name, CallKind.SAMPLE):
            stored = await core.sample(caller, asked)
        result = stored.header.sample
        columns = decode(list(stored.header.tensors), stored.payload)
        ends = np.cumsum(columns["token_ids"].levels[1], dtype=np.int64).tolist()
        parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        values = {name: column.values for name, column in columns.items()}
        prompts = _prompts(asked, columns) if asked.call.prompt_logprobs else None
        texts = list(result.texts) or [""] * len(parts)
        rows = [
            Choice(
                text,
                FINISH_REASONS[reason],
                Tokens(
                    values["token_ids"][part].tolist(),
                    values["logprobs"][part].tolist(),
                    _tops(values, "top", part),
                ),
                prompts[row // (asked.call.n or 1)] if prompts else None,
            )
            for row, (text, reason, part) in enumerate(zip(texts, result.stop_reasons, parts, strict=True))
        ]
        return Answers(rows, result.num_prompt_tokens, result.num_sampled_tokens)

    return await unless_left(work(), http)


async def unless_left(work: Coroutine[Any, Any, R], http: Request) -> R:
    """The result of some work, which is cancelled when the client leaves.

    Raises:
        ServiceError: CANCELLED; nobody reads it.
    """

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ServiceError(pb.ERROR_CODE_CANCELLED, "the client has left")
        return await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def streamed(core: Core, caller: Caller, asked: pb.SampleRequest) -> AsyncGenerator[pb.SampleFrame]:
    """The frames of a streamed sample."""
    async with core.calls.turn(caller.name, CallKind.SAMPLE), aclosing(core.stream_sample(caller, asked)) as frames:
        async for frame in frames:
            yield frame


def tokens_of(delta: pb.SampleDelta) -> Tokens:
    """The tokens of a delta."""
    count = len(delta.token_ids)
    tops: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    width = len(delta.top_token_ids) // count if count else 0
    for place, (token, logprob) in enumerate(zip(delta.top_token_ids, delta.top_logprobs, strict=True)):
        tops[place // width].append((token, logprob))
    return Tokens(list(delta.token_ids), list(delta.logprobs), tops)


class TokenTexts:
    """Texts of single tokens.

    Args:
        core: The core, which has the tokenizers.
        model: The base model.
    """

    def __init__(self, core: Core, caller: Caller, model: str) -> None:
        self._core, self._caller, self._model = core, caller, model
        self._known: dict[int, str] = {}

    async def read(self, tokens: Iterable[Tokens]) -> Callable[[int], str]:
        """Read the texts of all tokens that are named in some rows; returns the function from id to text."""
        wanted = {token for row in tokens for token in [*row.ids, *(token for top in row.tops for token, _ in top)]}
        missing = sorted(wanted - set(self._known))
        for start in range(0, len(missing), DECODED_TOGETHER):
            ids = missing[start : start + DECODED_TOGETHER]
            texts = await self._core.texts.decode(
                self._caller, self._model, [[token] for token in ids], skip_special_tokens=False
            )
            self._known |= dict(zip(ids, texts, strict=True))
        return self._known.__getitem__


def _prompts(asked: pb.SampleRequest, columns: Any) -> list[Tokens]:
    lengths = columns["prompt_logprobs"].levels[0].tolist()
    values = {name: column.values for name, column in columns.items()}
    found, start = [], 0
    for prompt, length in zip(asked.prompt_ids, lengths, strict=True):
        part = slice(start, start + length)
        logprobs: Sequence[float | None] = [None, *values["prompt_logprobs"][part].tolist()]
        found.append(Tokens(list(prompt.ids), list(logprobs), [[], *_tops(values, "prompt_top", part)]))
        start += length
    return found


def _tops(values: dict[str, Any], name: str, part: slice) -> list[list[tuple[int, float]]]:
    if f"{name}_token_ids" not in values:
        return [[] for _ in range(part.stop - part.start)]
    ids, logprobs = values[f"{name}_token_ids"][part].tolist(), values[f"{name}_logprobs"][part].tolist()
    return [list(zip(*place, strict=True)) for place in zip(ids, logprobs, strict=True)]
