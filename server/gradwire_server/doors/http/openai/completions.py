"""``POST /v1/completions``."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.rollouts.live import Answer, RolloutCall
from gradwire_server.core.rollouts.transcript import Ids
from gradwire_server.doors.http.openai.answers import (
    FINISH_REASONS,
    Answers,
    Choice,
    ScoredTokens,
    TextOffsets,
    TokenTexts,
    sampled,
    streamed,
    tokens_again,
    tokens_of,
    turn_of,
)
from gradwire_server.doors.http.openai.events import event_stream
from gradwire_server.doors.http.openai.names import find_model
from gradwire_server.doors.http.openai.requests import CompletionRequest, check_encodable, named, unsupported
from gradwire_server.doors.http.openai.unserved import tell_ignored
from gradwire_server.doors.http.protocol import CallerOf, ErrorBody
from gradwire_server.errors import invalid

MAX_TOKENS = 16
"""Tokens of a completion that does not say how many."""
CONTEXT_TOKENS = 16
"""Tokens of a prompt behind which the offsets of an answer are counted."""
PARAMETERS = {"prompts": "prompt", "texts": "prompt", "top_logprobs": "logprobs"}
PARAMETERS |= dict.fromkeys(("json_schema", "regex", "grammar"), "structured_outputs")


def routes(core: Core, error_body: ErrorBody) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/completions", response_model=None)
    async def create_completion(asked: CompletionRequest, http: Request, caller: CallerOf) -> Response | dict[str, Any]:
        with named(PARAMETERS):
            completion = Completion(core, caller, asked)
            call = await completion.request()
            tell_ignored(http, asked, {})
            if asked.stream:
                return await event_stream(completion.events(call), error_body, http.url.path)
            return await completion.answer(call, http)

    return router


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Counts of tokens in OpenAI's form."""
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class Completion:
    """One request."""

    def __init__(self, core: Core, caller: Caller, asked: CompletionRequest) -> None:
        self._core, self._caller, self._asked = core, caller, asked
        model = find_model(core, caller, asked.model)
        self._base, self._source = model.base, model.source
        self._texts = TokenTexts(core, caller, self._base, as_ids=bool(asked.return_tokens_as_token_ids))
        self._turn: RolloutCall | None = None
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }

    async def request(self) -> pb.SampleRequest:
        """Return the request to the sampler."""
        asked = self._asked
        if asked.suffix:
            raise unsupported("suffix is not served: models here continue a text, and fill in nothing", "suffix")
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise unsupported("best_of is not served: sample n, and choose by their logprobs", "best_of")
        if asked.echo and asked.stream:
            raise unsupported("echo is not served in a stream", "echo")
        max_tokens = MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        if not max_tokens and not asked.echo:
            raise invalid("max_tokens is 0, which leaves nothing to do without echo", "max_tokens")
        call = asked.call(max_tokens)
        self._turn = await self._core.rollouts.call(self._caller)
        if self._turn is not None:
            await self._turn.begin(call, asked.given)
        echoed = asked.echo and (asked.logprobs is not None or not max_tokens)
        call.prompt_logprobs |= bool(echoed)
        if asked.logprobs is not None:
            call.top_logprobs = asked.logprobs
            call.top_prompt_logprobs = max(call.top_prompt_logprobs, asked.logprobs if echoed else 0)
        prompts = await self._prompts()
        return pb.SampleRequest(model=self._source, call=call, prompt_ids=prompts)

    async def answer(self, call: pb.SampleRequest, http: Request) -> dict[str, Any]:
        """The whole completion."""
        asked = self._asked
        async with turn_of(self._turn) as recorded:
            if recorded:
                answers = _again(recorded)
            else:
                answers = await sampled(self._core, self._caller, call, asked.model, http)
                await self._record([(row.text, row.finish_reason, row.tokens) for row in answers.rows], answers.step)
        rows = [(row.prompt + row.tokens) if row.prompt and asked.echo else row.tokens for row in answers.rows]
        text_of = await self._texts.read(rows if asked.logprobs is not None else [])
        echoed = await self._echoed(call)
        begin = await self._offsets(call)
        choices = []
        for index, (answer, tokens) in enumerate(zip(answers.rows, rows, strict=True)):
            text, logprobs = echoed[index // call.call.n] + answer.text, None
            if asked.logprobs is not None:
                logprobs = _logprobs(tokens, text_of, begin(index).add(tokens.ids), len(text))
            choice = {
                "index": index,
                "text": text,
                "finish_reason": answer.finish_reason,
                "logprobs": logprobs,
            }
            if asked.prompt_logprobs is not None and answer.prompt is not None:
                choice["prompt_logprobs"] = await self._texts.of_prompt(answer.prompt)
            if asked.return_token_ids:
                choice |= {
                    "prompt_token_ids": list(call.prompt_ids[index // call.call.n].ids),
                    "token_ids": answer.tokens.ids,
                }
            choices.append(choice)
        counts = usage(answers.num_prompt_tokens, answers.num_sampled_tokens, answers.num_cached_tokens)
        return {**self._head, "choices": choices, "usage": counts}

    async def events(self, call: pb.SampleRequest) -> AsyncGenerator[Mapping[str, Any]]:
        """The completion's parts."""
        asked = self._asked
        begin = await self._offsets(call)
        offsets: dict[int, TextOffsets] = {}
        lengths: Counter[int] = Counter()
        async for frame in self._frames(call):
            deltas = [(delta, tokens_of(delta)) for delta in frame.deltas]
            text_of = await self._texts.read([tokens for _, tokens in deltas] if asked.logprobs is not None else [])
            for delta, tokens in deltas:
                logprobs = None
                if asked.logprobs is not None:
                    lengths[delta.row] += sum(map(len, delta.texts))
                    most = lengths[delta.row] if delta.stop_reason else None
                    places = offsets.setdefault(delta.row, begin(delta.row)).add(tokens.ids)
                    logprobs = _logprobs(tokens, text_of, places, most)
                choice = {
                    "index": delta.row,
                    "text": "".join(delta.texts),
                    "finish_reason": FINISH_REASONS[delta.stop_reason] if delta.stop_reason else None,
                    "logprobs": logprobs,
                }
                if asked.return_token_ids:
                    choice["token_ids"] = tokens.ids
                yield {**self._head, "choices": [choice]}
            if frame.HasField("result") and asked.stream_options is not None and asked.stream_options.include_usage:
                result = frame.result.sample
                counts = usage(result.num_prompt_tokens, result.num_sampled_tokens, result.num_cached_tokens)
                yield {**self._head, "choices": [], "usage": counts}

    async def _frames(self, call: pb.SampleRequest) -> AsyncGenerator[pb.SampleFrame]:
        """The frames of a stream; in a rollout session the last tokens of each sample come once all are recorded."""
        async with turn_of(self._turn) as recorded:
            if recorded:
                yield _frame_again(recorded)
                return
            last = pb.SampleFrame()
            whole: dict[int, pb.SampleDelta] = {}
            async for frame in streamed(self._core, self._caller, call, self._asked.model):
                if self._turn is None:
                    yield frame
                    continue
                for delta in frame.deltas:
                    whole.setdefault(delta.row, pb.SampleDelta()).MergeFrom(delta)
                    if delta.stop_reason:
                        last.deltas.append(delta)
                if not frame.HasField("result"):
                    yield pb.SampleFrame(deltas=[each for each in frame.deltas if not each.stop_reason])
                    continue
                rows = [
                    ("".join(row.texts), FINISH_REASONS[row.stop_reason], tokens_of(row))
                    for _, row in sorted(whole.items())
                ]
                step = frame.result.sample.step if frame.result.sample.HasField("step") else None
                await self._record(rows, step)
                last.result.CopyFrom(frame.result)
                yield last

    async def _record(self, rows: Sequence[tuple[str, str, ScoredTokens]], step: int | None) -> None:
        """Record whole samples, in a rollout session: texts, finish reasons and tokens."""
        if self._turn is not None:
            answers = [
                Answer(row.ids, [each or 0.0 for each in row.logprobs], reason, text) for text, reason, row in rows
            ]
            await self._turn.record(answers, step)

    async def _prompts(self) -> list[pb.TokenIds]:
        """The prompts; in a rollout session with the sampled tokens of the earlier answers in them."""
        turn, texts = self._turn, self._asked.prompt
        if turn is None:
            return await self._encoded()
        texts = [texts] if isinstance(texts, str) else texts

        async def decode(ids: Sequence[int]) -> str:
            return (await self._core.texts.decode(self._caller, self._base, [ids], skip_special_tokens=False))[0]

        async def encode(text: str) -> Ids:
            encoded = await self._core.texts.encode(self._caller, self._base, [text], add_special_tokens=False)
            return np.array(encoded[0].ids, np.uint32)

        prompts = await self._encoded()
        for number, prompt in enumerate(prompts):
            given = texts[number] if number < len(texts) else None
            text = given if isinstance(given, str) else ""
            if text and (known := await turn.text(text, decode, encode)) is not None:
                prompt.ids[:] = known
            turn.tokens(prompt.ids, text)
        return prompts

    async def _encoded(self) -> list[pb.TokenIds]:
        prompt = self._asked.prompt
        if isinstance(prompt, str):
            prompt = [prompt]
        if not prompt:
            raise invalid("prompt is empty", "prompt")
        texts = [part for part in prompt if isinstance(part, str)]
        if texts:
            for text in texts:
                check_encodable(text, "prompt")
            length = self._core.scheduler.checks.context_length(self._base)
            if self._asked.echo and not self._asked.max_tokens:
                length += 1  # nothing comes after it
            return await self._core.texts.encode_prompts(self._caller, self._base, texts, length)
        rows = [part for part in prompt if isinstance(part, list)]
        return [pb.TokenIds(ids=ids) for ids in rows or [[part for part in prompt if isinstance(part, int)]]]

    async def _offsets(self, call: pb.SampleRequest) -> Callable[[int], TextOffsets]:
        """Return the start of a row's offsets: its prompt if that is repeated, else behind the prompt's last tokens."""
        keep = call.call.keep_special_tokens
        tails: list[list[int]] = [[] for _ in call.prompt_ids]
        known = [""] * len(tails)
        if self._asked.logprobs is not None and not self._asked.echo:
            tails = [list(prompt.ids[-CONTEXT_TOKENS:]) for prompt in call.prompt_ids]
            await self._texts.read(map(ScoredTokens, tails))
            known = await self._decoded(call, tails)

        def begin(row: int) -> TextOffsets:
            number = row // call.call.n
            offsets = TextOffsets(self._texts, -len(known[number]), keep_special_tokens=keep)
            offsets.add(tails[number])
            return offsets

        return begin

    async def _echoed(self, call: pb.SampleRequest) -> list[str]:
        """The text of each prompt, if it is to be repeated."""
        if not self._asked.echo:
            return [""] * len(call.prompt_ids)
        return await self._decoded(call, [list(prompt.ids) for prompt in call.prompt_ids])

    async def _decoded(self, call: pb.SampleRequest, rows: list[list[int]]) -> list[str]:
        """The text of each row, without a last character that is not complete: that is the answer's."""
        skip = not call.call.keep_special_tokens
        texts = await self._core.texts.decode(self._caller, self._base, rows, skip_special_tokens=skip)
        return [text.rstrip("\ufffd") for text in texts]


def _again(turns: Sequence[sessions.SessionTurn]) -> Answers:
    """Recorded answers as they were given."""
    rows = [Choice(turn.text, turn.finish_reason, tokens_again(turn)) for turn in turns]
    return Answers(rows, turns[0].prompt_tokens, sum(len(turn.response_ids) for turn in turns))


def _frame_again(turns: Sequence[sessions.SessionTurn]) -> pb.SampleFrame:
    """Recorded answers as one frame of a stream."""
    frame = pb.SampleFrame()
    for row, turn in enumerate(turns):
        texts = [turn.text, *([""] * (len(turn.response_ids) - 1))]
        delta = frame.deltas.add(row=row, token_ids=turn.response_ids, logprobs=turn.logprobs, texts=texts)
        delta.stop_reason = turn.finish_reason
    result = frame.result.sample
    result.num_prompt_tokens = turns[0].prompt_tokens
    result.num_sampled_tokens = sum(len(turn.response_ids) for turn in turns)
    return frame


def _logprobs(
    tokens: ScoredTokens, text_of: Callable[[int], str], offsets: Sequence[int], length: int | None
) -> dict[str, Any]:
    """Log-probabilities in the form of completions.

    A place's ``top_logprobs`` have its own token too. Tokens whose texts are equal have one entry, the most probable's.

    Args:
        offsets: Where each token begins in the text.
        length: Length of the text, which a stop string may have cut; None while it grows.
    """
    texts = [text_of(token) for token in tokens.ids]
    tops: list[dict[str, float] | None] = []
    for text, logprob, top in zip(texts, tokens.logprobs, tokens.tops, strict=True):
        place: dict[str, float] = {}
        for token, value in top:
            place.setdefault(text_of(token), value)
        if logprob is not None:
            place.setdefault(text, logprob)
        tops.append(place if logprob is not None else None)
    return {
        "tokens": texts,
        "token_logprobs": tokens.logprobs,
        "top_logprobs": tops,
        "text_offset": [offset if length is None else min(offset, length) for offset in offsets],
    }
