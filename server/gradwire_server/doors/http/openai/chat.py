"""``POST /v1/chat/completions``."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.openai.answers import FINISH_REASONS, Tokens, TokenTexts, sampled, streamed, tokens_of
from gradwire_server.doors.http.openai.completions import usage
from gradwire_server.doors.http.openai.events import event_stream
from gradwire_server.doors.http.openai.images import ConversationImages
from gradwire_server.doors.http.openai.names import find_model
from gradwire_server.doors.http.openai.requests import ChatRequest, invalid, named, unsupported
from gradwire_server.doors.http.openai.tools import (
    certain_content,
    checked_tools,
    forced,
    forced_schema,
    messages_for_template,
    read_answer,
    read_forced,
)
from gradwire_server.doors.http.protocol import CallerOf, ErrorBody

PARAMETERS = dict.fromkeys(("prompts", "texts", "conversations", "images"), "messages")
PARAMETERS |= {"json_schema": "response_format"}


def routes(core: Core, error_body: ErrorBody) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/chat/completions", response_model=None)
    async def create_chat_completion(asked: ChatRequest, http: Request, caller: CallerOf) -> Response | dict[str, Any]:
        with named(PARAMETERS):
            chat = Chat(core, caller, asked)
            call = await chat.request()
            if asked.stream:
                return await event_stream(chat.events(call), error_body, http.url.path)
            return await chat.answer(call, http)

    return router


class Chat:
    """One request."""

    def __init__(self, core: Core, caller: Caller, asked: ChatRequest) -> None:
        self._core, self._caller, self._asked = core, caller, asked
        model = find_model(core, caller, asked.model)
        self._base, self._source = model.base, model.source
        self._texts = TokenTexts(core, caller, self._base)
        self._tools: list[dict[str, Any]] = []
        self._forced: list[Mapping[str, Any]] = []
        self._template = ""
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    async def request(self) -> pb.SampleRequest:
        """What the sampler is asked.

        Raises:
            ServiceError: The request is invalid.
        """
        asked = self._asked
        if asked.top_logprobs and not asked.logprobs:
            raise invalid("top_logprobs come with logprobs: true", "top_logprobs")
        if asked.reasoning_effort is not None:
            message = "reasoning_effort is not served; set what the model's template has, with chat_template_kwargs"
            raise unsupported(message, "reasoning_effort")
        tools = checked_tools(asked.tools)
        self._forced = forced(asked.tool_choice, tools)
        if asked.tool_choice != "none":
            self._tools = tools
        if self._tools:
            self._template = (await self._core.texts.tokenizer_info(self._caller, self._base)).chat_template
            if "tools" not in self._template:
                raise unsupported(f"the chat template of {self._base} takes no tools", "tools")
        schema = asked.response_format.json_schema_text() if asked.response_format is not None else ""
        if self._forced:
            schema = forced_schema(self._forced, self._template)
        call = asked.call(asked.max_completion_tokens or asked.max_tokens, schema)
        call.top_logprobs = asked.top_logprobs or 0
        images = ConversationImages()
        messages = messages_for_template(asked.messages, images)
        if images.numbers and not self._core.model_info(self._base).takes_images:
            raise unsupported(f"the messages have images, and the model {self._base} takes none", "messages")
        ids = await self._rendered(messages)
        request = pb.SampleRequest(model=self._source, call=call, prompt_ids=[pb.TokenIds(ids=ids)])
        if images.numbers:
            request.images.extend(images.contents)
            request.prompt_images.add(images=images.numbers)
        return request

    async def answer(self, call: pb.SampleRequest, http: Request) -> dict[str, Any]:
        """The whole answer."""
        answers = await sampled(self._core, self._caller, call, http)
        text_of = await self._texts.read([row.tokens for row in answers.rows] if self._asked.logprobs else [])
        choices = []
        for index, row in enumerate(answers.rows):
            message, reason = self._message(row.text, row.finish_reason)
            logprobs = _logprobs(row.tokens, text_of) if self._asked.logprobs else None
            message = {"role": "assistant", "refusal": None, **message}
            choices.append({"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs})
        counts = usage(answers.num_prompt_tokens, answers.num_sampled_tokens)
        return {**self._head("chat.completion"), "choices": choices, "usage": counts}

    async def events(self, call: pb.SampleRequest) -> AsyncGenerator[Mapping[str, Any]]:
        """The answer's parts. With tools, text comes once it is certain that it belongs to no call."""
        whole: dict[int, str] = {}
        sent: dict[int, int] = {}
        async for frame in streamed(self._core, self._caller, call):
            deltas = [(delta, tokens_of(delta)) for delta in frame.deltas]
            text_of = await self._texts.read([tokens for _, tokens in deltas] if self._asked.logprobs else [])
            for delta, tokens in deltas:
                if delta.row not in whole:
                    whole[delta.row], sent[delta.row] = "", 0
                    yield self._chunk(delta.row, {"role": "assistant", "content": ""})
                text, reason = "".join(delta.texts), FINISH_REASONS.get(delta.stop_reason)
                part: dict[str, Any] = {"content": text}
                if self._tools:
                    whole[delta.row] += text
                    if reason is not None:
                        part, reason = self._message(whole[delta.row], reason)
                        for number, tool_call in enumerate(part.get("tool_calls", [])):
                            tool_call["index"] = number
                    else:
                        names = [tool["function"]["name"] for tool in self._tools]
                        certain = "" if self._forced else certain_content(whole[delta.row], self._template, names)
                        part = {"content": certain}
                    new = (part.pop("content") or "")[sent[delta.row] :]
                    if new:
                        part["content"] = new
                        sent[delta.row] += len(new)
                    if not part and reason is None and not self._asked.logprobs:
                        continue
                logprobs = _logprobs(tokens, text_of) if self._asked.logprobs else None
                yield self._chunk(delta.row, part, reason, logprobs)
            options = self._asked.stream_options
            if frame.HasField("result") and options is not None and options.include_usage:
                result = frame.result.sample
                counts = usage(result.num_prompt_tokens, result.num_sampled_tokens)
                yield {**self._head("chat.completion.chunk"), "choices": [], "usage": counts}

    async def _rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, ready for the assistant's turn."""
        request = pb.RenderRequest(
            model=self._base,
            conversations=[pb.Conversation(messages_json=json.dumps(messages))],
            tools_json=json.dumps(self._tools) if self._tools else "",
            template_kwargs_json=json.dumps(self._asked.chat_template_kwargs or {}),
            train_on=pb.TRAIN_ON_NOTHING,
            add_generation_prompt=self._asked.add_generation_prompt is not False,
        )
        rendered = await self._core.texts.render(self._caller, request)
        return list(rendered.rows[0].ids)

    def _message(self, text: str, reason: str) -> tuple[dict[str, Any], str]:
        if not self._tools:
            return {"content": text}, reason
        content: str | None = None
        if self._forced:
            calls = read_forced(text, self._forced)
        else:
            content, calls = read_answer(text, self._template, self._tools)
        if not calls:
            return {"content": text}, reason
        return {"content": content, "tool_calls": calls}, "length" if reason == "length" else "tool_calls"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}

    def _chunk(
        self, row: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": row, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


def _logprobs(tokens: Tokens, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Log-probabilities in the form of chat completions. The bytes are those of the text, where it is one."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = text_of(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    places = zip(tokens.ids, tokens.logprobs, tokens.tops, strict=True)
    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*other) for other in top]} for token, logprob, top in places
    ]
    return {"content": content, "refusal": None}
