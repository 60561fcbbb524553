"""Anthropic's protocol as an application: its routes and the form of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import BaseModel

from gradwire_server.core.core import Core
from gradwire_server.doors.http.anthropic.requests import CountRequest, MessagesRequest
from gradwire_server.doors.http.anthropic.writing import Writing
from gradwire_server.doors.http.errors import application, error_response
from gradwire_server.doors.http.openai.answers import unless_left
from gradwire_server.doors.http.openai.conversations import Conversation
from gradwire_server.doors.http.openai.errors import invalid_field
from gradwire_server.doors.http.openai.events import event_stream
from gradwire_server.doors.http.openai.requests import named
from gradwire_server.doors.http.openai.unserved import tell_ignored
from gradwire_server.doors.http.protocol import CallerOf, HttpProtocol

PARAMETERS = dict.fromkeys(("prompts", "texts", "conversations", "images"), "messages")
PARAMETERS |= {"stop": "stop_sequences", "json_schema": "tool_choice"}
PARAMETERS |= {"enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}
KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ErrorReason(BaseModel):
    """What was wrong."""

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
