"""``POST /v1/chat/completions``."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gradwire_server.core.core import Core
from gradwire_server.doors.http.openai.answers import ScoredTokens, TokenTexts
from gradwire_server.doors.http.openai.completions import usage
from gradwire_server.doors.http.openai.conversations import AnswerDelta, Conversation, Counts
from gradwire_server.doors.http.openai.events import event_stream
from gradwire_server.doors.http.openai.requests import ChatRequest, named
from gradwire_server.doors.http.openai.unserved import tell_ignored
from gradwire_server.doors.http.protocol import CallerOf, ErrorBody
from gradwire_server.errors import invalid

PARAMETERS = dict.fromkeys(("prompts", "texts", "conversations", "images"), "messages")
PARAMETERS |= {"json_schema": "response_format", "regex": "structured_outputs", "grammar": "structured_outputs"}


def routes(core: Core, error_body: ErrorBody) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/chat/completions", response_model=None)
    async def create_chat_completion(asked: ChatRequest, http: Request, caller: CallerOf) -> Response | dict[str, Any]:
        with named(PARAMETERS):
            if asked.top_logprobs and not asked.logprobs:
                raise invalid("top_logprobs come with logprobs: true", "top_logprobs")
            conversation = Conversation(core, caller, asked)
            call = await conversation.request()
            tell_ignored(http, asked, {})
            texts = TokenTexts(core, caller, conversation.base, as_ids=bool(asked.return_tokens_as_token_ids))
            chat = Chat(texts, asked, call.prompt_ids[0].ids)
            if asked.stream:
                return await event_stream(chat.events(conversation.parts(call)), error_body, http.url.path)
            return await chat.answer(*await conversation.answers(call, http))

    return router


class Chat:
    """One answer.

    Args:
        texts: Reads the tokens whose log-probabilities are wanted.
    """

    def __init__(self, texts: TokenTexts, asked: ChatRequest, prompt_ids: Sequence[int]) -> None:
        self._texts, self._asked, self._prompt_ids = texts, asked, prompt_ids
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    async def answer(self, parts: list[AnswerDelta], counts: Counts) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for part in parts:
            message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": part.content}
            if part.reasoning:
                message["reasoning_content"] = part.reasoning
            message |= self._calls(part.calls)
            if not part.content and (part.calls or part.reasoning):
                message["content"] = None
            choice = {"index": part.row, "message": message, "finish_reason": self._reason(part)}
            choice["logprobs"] = await self._logprobs(part)
            choices.append(choice | self._token_ids(part))
        answer = self._head("chat.completion") | {
            "choices": choices,
            "usage": usage(counts.prompt, counts.sampled, counts.cached),
        }
        if parts[0].prompt is not None:
            answer["prompt_logprobs"] = await self._texts.of_prompt(parts[0].prompt)
        if self._asked.return_token_ids:
            answer["prompt_token_ids"] = list(self._prompt_ids)
        return answer

    async def events(self, parts: AsyncGenerator[AnswerDelta | Counts]) -> AsyncGenerator[Mapping[str, Any]]:
        """The answer's parts."""
        begun = set[int]()
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Counts):
                    options = self._asked.stream_options
                    if options is not None and options.include_usage:
                        counts = usage(part.prompt, part.sampled, part.cached)
                        yield {**self._head("chat.completion.chunk"), "choices": [], "usage": counts}
                    continue
                if part.row not in begun:
                    begun.add(part.row)
                    first = self._chunk(part.row, {"role": "assistant", "content": ""})
                    yield first | ({"prompt_token_ids": list(self._prompt_ids)} if self._asked.return_token_ids else {})
                delta = self._delta(part)
                if delta or part.finish_reason is not None or self._asked.logprobs or self._asked.return_token_ids:
                    chunk = self._chunk(part.row, delta, self._reason(part), await self._logprobs(part))
                    chunk["choices"][0] |= self._token_ids(part)
                    yield chunk

    def _delta(self, part: AnswerDelta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.content:
            delta["content"] = part.content
        return delta | self._calls([{**call, "index": number} for number, call in enumerate(part.calls)])

    def _calls(self, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The calls; for a request with ``functions``, the first, as its answer has place for one."""
        if not calls:
            return {}
        return {"function_call": calls[0]["function"]} if self._asked.functions else {"tool_calls": calls}

    def _reason(self, part: AnswerDelta) -> str | None:
        called = part.finish_reason == "tool_calls" and self._asked.functions
        return "function_call" if called else part.finish_reason

    async def _logprobs(self, part: AnswerDelta) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        return {"content": await token_entries(self._texts, part.tokens), "refusal": None}

    def _token_ids(self, part: AnswerDelta) -> dict[str, list[int]]:
        return {"token_ids": part.tokens.ids} if self._asked.return_token_ids else {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}

    def _chunk(
        self, row: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": row, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


async def token_entries(texts: TokenTexts, tokens: ScoredTokens) -> list[dict[str, Any]]:
    """Log-probabilities in the form of conversations."""
    text_of = await texts.read([tokens])

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": text_of(token), "logprob": logprob, "bytes": texts.bytes_of(token)}

    places = zip(tokens.ids, tokens.logprobs, tokens.tops, strict=True)
    return [
        {**entry(token, logprob), "top_logprobs": [entry(*other) for other in top]} for token, logprob, top in places
    ]
