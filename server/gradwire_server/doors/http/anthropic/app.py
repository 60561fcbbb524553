"""Anthropic's protocol as an application: its routes and the form of its errors."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from gradwire_proto.chat import read_json
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel

from gradwire_server.core.core import Core
from gradwire_server.doors.http.anthropic.requests import CountRequest, MessagesRequest
from gradwire_server.doors.http.errors import application, error_response
from gradwire_server.doors.http.openai.answers import unless_left
from gradwire_server.doors.http.openai.conversations import AnswerDelta, Conversation, Counts
from gradwire_server.doors.http.openai.errors import invalid_field
from gradwire_server.doors.http.openai.events import event_stream
from gradwire_server.doors.http.openai.requests import named
from gradwire_server.doors.http.openai.unserved import tell_ignored
from gradwire_server.doors.http.protocol import CallerOf, HttpProtocol

Event = dict[str, Any]
DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Writing:
    """One message."""

    def __init__(self, asked: MessagesRequest, prompt_tokens: int) -> None:
        self._asked, self._open = asked, ""
        self._content: list[dict[str, Any]] = []
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt_tokens, 0, 0),
        }

    async def events(self, parts: AsyncGenerator[AnswerDelta | Counts]) -> AsyncGenerator[Event]:
        """The events. The first waits for the answer's first part, as a refusal is no stream."""
        begun, message = False, self._message
        async with aclosing(parts):
            async for part in parts:
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": dict(message)}
                if isinstance(part, Counts):
                    message["usage"] = _usage(part.prompt, part.cached, part.sampled)
                    continue
                for event in self._written(part):
                    yield event
                if part.finish_reason is not None:
                    message["stop_reason"] = STOP_REASONS[part.finish_reason]
                if part.stop_string is not None:
                    message |= {"stop_reason": "stop_sequence", "stop_sequence": part.stop_string}
        for event in self._closed():
            yield event
        message["content"] = self._content
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    async def whole(self, events: AsyncGenerator[Event]) -> dict[str, Any]:
        """The message, once it is written."""
        async for _ in events:
            pass
        return self._message

    def _written(self, part: AnswerDelta) -> Iterator[Event]:
        for kind, text in (("thinking", part.reasoning), ("text", part.content)):
            if text:
                if self._open != kind:
                    signed = {"signature": ""} if kind == "thinking" else {}
                    yield from self._begun({"type": kind, kind: "", **signed})
                self._content[-1][kind] += text
                yield self._delta({"type": DELTAS[kind], kind: text})
        for call in part.calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            yield from self._begun(block)
            self._content[-1] = block | {"input": read_json(function["arguments"])}
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _begun(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._closed()
        self._content.append(block)
        self._open = block["type"]
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _closed(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open:
            yield {"type": "content_block_stop", "index": len(self._content) - 1}
        self._open = ""

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}


PARAMETERS = dict.fromkeys(("prompts", "texts", "conversations", "images"), "messages")
PARAMETERS |= {"stop": "stop_sequences", "json_schema": "tool_choice"}
PARAMETERS |= {"enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}
KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ErrorReason(BaseModel):
    """The reason of an error."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """An error."""

    type: Literal["error"]
    error: ErrorReason
    request_id: str


def protocol(core: Core) -> HttpProtocol:
    """The protocol over a core."""
    app = application("gradwire for Anthropic's clients", AnthropicErrorAnswer, error_body)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(invalid_field(error), error_body, 400)

    @app.post("/messages", response_model=None)
    async def create_message(asked: MessagesRequest, http: Request, caller: CallerOf) -> Response | dict[str, Any]:
        with named(PARAMETERS):
            chat = asked.chat()
            conversation = Conversation(core, caller, chat)
            call = await conversation.request()
            tell_ignored(http, chat, PARAMETERS)
            writing = Writing(asked, len(call.prompt_ids[0].ids))
            if asked.stream:
                events = writing.events(conversation.parts(call))
                return await event_stream(events, error_body, http.url.path, typed=True)
            return await unless_left(lambda begun: writing.whole(writing.events(conversation.parts(call, begun))), http)

    @app.post("/messages/count_tokens")
    async def count_tokens(asked: CountRequest, http: Request, caller: CallerOf) -> dict[str, int]:
        with named(PARAMETERS):
            chat = asked.chat()
            call = await Conversation(core, caller, chat).request()
            tell_ignored(http, chat, PARAMETERS)
        return {"input_tokens": len(call.prompt_ids[0].ids)}

    return HttpProtocol(
        "anthropic", "/v1", app, error_body, paths=("/messages",), for_agents=("/messages", "/messages/*")
    )


def error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error in Anthropic's form, whose texts name the field."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error.message
    if error.field and error.field not in message:
        message = f"{error.field}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": error.request_id}


def _usage(prompt: int, cached: int, sampled: int) -> dict[str, int]:
    """Counts of tokens in Anthropic's form, in which ``input_tokens`` leaves out those from the cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }
