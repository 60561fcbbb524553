"""Samples of the core, row by row, and their tokens as texts."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from gradwire_proto.codec import decode
from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1 import training_pb2 as pb
from starlette.requests import Request

from gradwire_server.access.calls import CallKind
from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.rollouts.live import RolloutCall
from gradwire_server.doors.http.errors import in_public_names
from gradwire_server.errors import ServiceError

OnStart = Callable[[], object]
"""Called when an engine begins to compute what was asked for, and again later."""
R = TypeVar("R")

DECODED_TOGETHER = 2048
TURN_S = 60.0
"""Seconds for which a request without a stream waits for an engine: many clients and proxies wait no longer."""
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass
class ScoredTokens:
    """Some tokens of one row.

    Attributes:
        logprobs: Their log-probabilities; None where there is none (a prompt's first token).
        tops: The most probable tokens in each place with their log-probabilities, most probable first.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)

    def __add__(self, other: ScoredTokens) -> ScoredTokens:
        return ScoredTokens(self.ids + other.ids, self.logprobs + other.logprobs, self.tops + other.tops)


@dataclass
class Choice:
    """One sample.

    Attributes:
        finish_reason: ``"stop"`` or ``"length"``.
        prompt: The tokens of its prompt, scored, if the call wanted that.
    """

    text: str
    finish_reason: str
    tokens: ScoredTokens
    prompt: ScoredTokens | None = None


@dataclass
class Answers:
    """The samples of a request, prompt by prompt.

    Attributes:
        step: Optimizer steps of a run's weights, if these were sampled from.
    """

    rows: list[Choice]
    num_prompt_tokens: int
    num_sampled_tokens: int
    num_cached_tokens: int = 0
    step: int | None = None


async def sampled(core: Core, caller: Caller, asked: pb.SampleRequest, name: str, http: Request) -> Answers:
    """Sample; a client who leaves ends the generation. Errors say ``name`` of the model."""

    async def work(begun: OnStart) -> Answers:
        async with core.calls.turn(caller.name, CallKind.SAMPLE):
            stored = await core.sample(caller, asked, on_start=begun)
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
                ScoredTokens(
                    values["token_ids"][part].tolist(),
                    values["logprobs"][part].tolist(),
                    _tops(values, "top", part),
                ),
                prompts[row // (asked.call.n or 1)] if prompts else None,
            )
            for row, (text, reason, part) in enumerate(zip(texts, result.stop_reasons, parts, strict=True))
        ]
        step = result.step if result.HasField("step") else None
        return Answers(rows, result.num_prompt_tokens, result.num_sampled_tokens, result.num_cached_tokens, step)

    with _called(caller, name, asked.model):
        return await unless_left(work, http)


@asynccontextmanager
async def turn_of(turn: RolloutCall | None) -> AsyncIterator[list[sessions.SessionTurn]]:
    """A place among a rollout session's calls, if there is one; yields the recorded answers of a repeated call."""
    if turn is None:
        yield []
        return
    async with turn.turn() as recorded:
        yield recorded


async def unless_left(work: Callable[[OnStart], Coroutine[Any, Any, R]], http: Request) -> R:
    """The result of some work, which is cancelled when the client leaves, or has to wait for too long.

    Args:
        work: Gets what to call once an engine has begun it.

    Raises:
        ServiceError: CANCELLED, which nobody reads; LIMIT_EXCEEDED if no engine has begun it within ``TURN_S``.
    """
    begun = asyncio.Event()

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work(begun.set)), asyncio.create_task(left())
    try:
        await asyncio.wait([working, leaving], timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
        if not (begun.is_set() or working.done() or leaving.done()):
            message = (
                f"the request has waited {TURN_S:.0f} s for its turn behind others; send it again later,"
                " or with stream=true, which waits for longer and says so"
            )
            raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, rule="samples_waiting")
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ServiceError(pb.ERROR_CODE_CANCELLED, "the client has left")
        return await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def streamed(
    core: Core, caller: Caller, asked: pb.SampleRequest, name: str, on_start: OnStart | None = None
) -> AsyncGenerator[pb.SampleFrame]:
    """The frames of a streamed sample. Errors say ``name`` of the model."""
    with _called(caller, name, asked.model):
        async with (
            core.calls.turn(caller.name, CallKind.SAMPLE),
            aclosing(core.stream_sample(caller, asked, on_start)) as frames,
        ):
            async for frame in frames:
                yield frame


@contextmanager
def _called(caller: Caller, name: str, source: str) -> Iterator[None]:
    """Let errors name a model as the client does, and not by the run that it is; in a rollout session, whose agent may
    name anything, by the session's own."""
    known = (source, source.partition("/")[0]) if caller.session is None else ()
    try:
        yield
    except ServiceError as error:
        error.error.message = in_public_names(error.error.message, lambda path: name if path in known else path)
        raise


def tokens_of(delta: pb.SampleDelta) -> ScoredTokens:
    """The tokens of a delta."""
    count = len(delta.token_ids)
    tops: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    width = len(delta.top_token_ids) // count if count else 0
    for place, (token, logprob) in enumerate(zip(delta.top_token_ids, delta.top_logprobs, strict=True)):
        tops[place // width].append((token, logprob))
    return ScoredTokens(list(delta.token_ids), list(delta.logprobs), tops)


def tokens_again(turn: sessions.SessionTurn) -> ScoredTokens:
    """The tokens of a recorded answer."""
    return ScoredTokens(list(turn.response_ids), list(turn.logprobs), [[] for _ in turn.response_ids])


class TokenTexts:
    """Texts of single tokens.

    Args:
        as_ids: Whether a token's text is ``token_id:ID``, by which texts that are equal can be told apart.
    """

    def __init__(self, core: Core, caller: Caller, model: str, *, as_ids: bool = False) -> None:
        self._core, self._caller, self._model, self._as_ids = core, caller, model, as_ids
        self._known: dict[int, str] = {}
        self._first: dict[int, str] = {}
        self._special: set[int] = set()
        self._bytes: dict[int, list[int] | None] = {}

    async def read(self, tokens: Iterable[ScoredTokens]) -> Callable[[int], str]:
        """Read the texts of all tokens that are named in some rows; returns the function from id to text."""
        wanted = {token for row in tokens for token in [*row.ids, *(token for top in row.tops for token, _ in top)]}
        missing = sorted(wanted - set(self._known))
        for start in range(0, len(missing), DECODED_TOGETHER):
            ids = missing[start : start + DECODED_TOGETHER]
            texts = await self._decoded([[token] for token in ids] + [[token, token] for token in ids])
            alone, twice = texts[: len(ids)], texts[len(ids) :]
            shown = await self._decoded([[token] for token in ids], skip_special_tokens=True)
            self._first |= dict(zip(ids, alone, strict=True))
            self._special |= {token for token, text, left in zip(ids, alone, shown, strict=True) if text and not left}
            texts = [_after_itself(text, both) for text, both in zip(alone, twice, strict=True)]
            self._known |= dict(zip(ids, texts, strict=True))
            parts = [token for token, text in zip(ids, texts, strict=True) if "\ufffd" in text]
            pieces = await self._core.texts.pieces(self._caller, self._model, parts)
            self._bytes |= {token: bytes_of_piece(piece) for token, piece in zip(parts, pieces, strict=True)}
        return "token_id:{}".format if self._as_ids else self._known.__getitem__

    async def _decoded(self, rows: list[list[int]], *, skip_special_tokens: bool = False) -> list[str]:
        return await self._core.texts.decode(self._caller, self._model, rows, skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token: int) -> list[int] | None:
        """The bytes of a token whose text was read, also of a part of a character; None where nobody can tell."""
        return self._bytes[token] if token in self._bytes else list(self._known[token].encode())

    def added_bytes(self, token: int, *, first: bool, keep_special_tokens: bool) -> bytes | None:
        """The bytes that a token, whose text was read, adds to a text; None for a special token that the text omits.

        Args:
            first: Whether nothing is before it; some tokenizers leave out the space that a text begins with.
        """
        if token in self._special and not keep_special_tokens:
            return None
        known = self._bytes.get(token)
        if known is None:
            return (self._first if first else self._known)[token].encode()
        return bytes(known)

    async def of_prompt(self, tokens: ScoredTokens) -> list[dict[str, Any] | None]:
        """The log-probabilities of a prompt's tokens, as vLLM gives them.

        The rank of a token is its place among the most probable ones that were asked for; None beyond them.
        """
        text_of = await self.read([tokens])
        places: list[dict[str, Any] | None] = []
        for token, logprob, top in zip(tokens.ids, tokens.logprobs, tokens.tops, strict=True):
            if logprob is None:
                places.append(None)
                continue
            place = {
                str(other): {"logprob": value, "rank": rank, "decoded_token": text_of(other)}
                for rank, (other, value) in enumerate(top, 1)
            }
            place.setdefault(str(token), {"logprob": logprob, "rank": None, "decoded_token": text_of(token)})
            places.append(place)
        return places


class TextOffsets:
    """Where the tokens of a growing text begin in it, in characters.

    All parts of a character begin where it does. A token that the text leaves out begins where the next one does.

    Args:
        texts: Has read the tokens.
        start: Where the text begins.
        keep_special_tokens: Whether special tokens are text.
    """

    def __init__(self, texts: TokenTexts, start: int = 0, *, keep_special_tokens: bool = False) -> None:
        self._texts, self._end, self._keep = texts, start, keep_special_tokens
        self._first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> list[int]:
        """Add tokens; returns where each begins."""
        offsets = []
        for token in ids:
            added = self._texts.added_bytes(token, first=self._first, keep_special_tokens=self._keep)
            if added is None:
                offsets.append(self._end)
                continue
            if added and not 0x80 <= added[0] < 0xC0:  # it begins a character, and so ends a broken one
                self._end += len(self._decoder.decode(b"", True))
            offsets.append(self._end)
            self._end += len(self._decoder.decode(added))
            self._first = False
        return offsets


def _after_itself(alone: str, twice: str) -> str:
    """The text of a token behind another one, with the space that some tokenizers leave out where a text begins."""
    behind = twice[len(alone) :] if twice.startswith(alone) and "\ufffd" not in twice else ""
    return behind or alone


def bytes_of_piece(piece: str) -> list[int] | None:
    """The bytes that an entry of a vocabulary stands for: ``<0xE2>``, or a character for each byte as GPT-2 wrote them;
    None for one that is of neither form."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return [int(piece[3:5], 16)]
    found = [_BYTE_OF.get(char) for char in piece]
    return [byte for byte in found if byte is not None] if piece and None not in found else None


_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that byte-level vocabularies write as the character of that number; the others follow from 256 on."""
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _SHOWN)
}


def _prompts(asked: pb.SampleRequest, columns: Any) -> list[ScoredTokens]:
    lengths = columns["prompt_logprobs"].levels[0].tolist()
    values = {name: column.values for name, column in columns.items()}
    prompts, start = [], 0
    for prompt, length in zip(asked.prompt_ids, lengths, strict=True):
        part = slice(start, start + length)
        logprobs: Sequence[float | None] = [None, *values["prompt_logprobs"][part].tolist()]
        prompts.append(ScoredTokens(list(prompt.ids), list(logprobs), [[], *_tops(values, "prompt_top", part)]))
        start += length
    return prompts


def _tops(values: dict[str, Any], name: str, part: slice) -> list[list[tuple[int, float]]]:
    if f"{name}_token_ids" not in values:
        return [[] for _ in range(part.stop - part.start)]
    ids, logprobs = values[f"{name}_token_ids"][part].tolist(), values[f"{name}_logprobs"][part].tolist()
    return [list(zip(*place, strict=True)) for place in zip(ids, logprobs, strict=True)]
