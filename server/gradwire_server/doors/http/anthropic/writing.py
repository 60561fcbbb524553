"""A message as it grows: the events of its stream, and itself as what they make."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from gradwire_proto.chat import read_json

from gradwire_server.doors.http.anthropic.requests import MessagesRequest
from gradwire_server.doors.http.openai.conversations import Counts, Part

Event = dict[str, Any]
DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Writing:
    """One message.

    Args:
        prompt_tokens: Tokens of its prompt.
    """

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
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }

    async def events(self, parts: AsyncGenerator[Part | Counts]) -> AsyncGenerator[Event]:
        """The events. The first waits for the answer's first part, as a refusal is no stream."""
        begun, message = False, self._message
        async with aclosing(parts):
            async for part in parts:
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": dict(message)}
                if isinstance(part, Counts):
                    message["usage"] = {"input_tokens": part.prompt, "output_tokens": part.sampled}
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

    def _written(self, part: Part) -> Iterator[Event]:
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
