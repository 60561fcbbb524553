"""A response as it grows: the events of its stream, and itself as the last of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.doors.http.errors import status_of
from gradwire_server.doors.http.openai.answers import TokenTexts
from gradwire_server.doors.http.openai.chat import token_entries
from gradwire_server.doors.http.openai.conversations import AnswerDelta, Counts
from gradwire_server.doors.http.openai.errors import error_body
from gradwire_server.doors.http.openai.responses.compaction import sealed
from gradwire_server.doors.http.openai.responses.requests import ResponseRequest
from gradwire_server.errors import ServiceError

Event = dict[str, Any]
TEXTS = {"reasoning": ("reasoning_text", "response.reasoning_text"), "message": ("output_text", "response.output_text")}
"""Type of an item -> type of its part, and how the events of its text begin."""


CALLS = {
    "function": ("function_call", "fc", "arguments", "response.function_call_arguments"),
    "custom": ("custom_tool_call", "ctc", "input", "response.custom_tool_call_input"),
}
"""Kind of a call -> type of its item, beginning of its id, field with what the model wrote, and of its events."""


class Writing:
    """One response.

    Args:
        texts: Reads the tokens whose log-probabilities are wanted.

    Attributes:
        response: It, as far as it is written.
    """

    def __init__(self, asked: ResponseRequest, texts: TokenTexts) -> None:
        self._asked, self._texts = asked, texts
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._output: list[dict[str, Any]] = []
        form = asked.text.format if asked.text is not None and asked.text.format is not None else None
        self.response: dict[str, Any] = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning is not None else None, "summary": None},
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }

    async def events(self, parts: AsyncGenerator[AnswerDelta | Counts]) -> AsyncGenerator[Event]:
        """The events. The first waits for the answer's first part, as a refusal is no stream; a later error is two."""
        try:
            async for event in self._events(parts):
                yield event
        except ServiceError as failed:
            if not self._number:
                raise
            error = self.error(status_of(failed.error), failed.error)
            yield error
            self.response |= {"status": "failed", "error": {name: error[name] for name in ("code", "message")}}
            yield self._event("response.failed", response=self.response)

    async def _events(self, parts: AsyncGenerator[AnswerDelta | Counts]) -> AsyncGenerator[Event]:
        reason, counts, begun = None, Counts(0, 0, 0), False
        async with aclosing(parts):
            async for part in parts:
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=dict(self.response))
                if isinstance(part, Counts):
                    counts = part
                    continue
                logprobs = await self._logprobs(part)
                for event in self._written(part, logprobs):
                    yield event
                reason = part.finish_reason or reason
        cut = reason == "length"
        for event in self._closed("incomplete" if cut else "completed"):
            yield event
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": _usage(counts),
        }
        yield self._event("response.incomplete" if cut else "response.completed", response=self.response)

    async def whole(self, parts: AsyncGenerator[AnswerDelta | Counts]) -> dict[str, Any]:
        """The response, once it is written."""
        async for _ in self._events(parts):
            pass
        return self.response

    def error(self, status: int, error: pb.Error) -> Event:
        """The event of an error in the stream."""
        found = error_body(status, error)["error"]
        return self._event("error", code=found["code"], message=found["message"], param=found["param"])

    def _event(self, kind: str, **values: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _written(self, part: AnswerDelta, logprobs: list[Any]) -> Iterator[Event]:
        for kind, text in (("reasoning", part.reasoning), ("message", part.content)):
            if text:
                yield from self._in(kind)
                item, (of_part, event) = self._open, TEXTS[kind]
                assert item is not None
                item["content"][0]["text"] += text
                extra: dict[str, Any] = {}
                if of_part == "output_text":
                    item["content"][0]["logprobs"] += logprobs
                    extra = {"logprobs": logprobs}
                yield self._event(f"{event}.delta", **self._place(item), content_index=0, delta=text, **extra)
        last = part.finish_reason is not None
        if last and not part.calls and (self._open is None or self._open["type"] != "message"):
            yield from self._in("message")  # an answer has a message, if an empty one
        for call in part.calls:
            yield from self._closed("completed")
            yield from self._called(call)

    def _in(self, kind: str) -> Iterator[Event]:
        """Begin an item, if it is not begun."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._closed("completed")
        part = {"type": TEXTS[kind][0], "text": ""}
        if kind == "message":
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "status": "in_progress", "content": []}
            part |= {"annotations": [], "logprobs": []}  # type: ignore[dict-item]
        else:
            item = {"id": _id("rs"), "type": kind, "summary": [], "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        self._open = item | {"content": [part]}
        place = self._place(self._open)
        yield self._event("response.content_part.added", **place, content_index=0, part=dict(part))

    def _closed(self, status: str) -> Iterator[Event]:
        """End the item that is open."""
        item, self._open = self._open, None
        if item is None:
            return
        (part,), place = item["content"], self._place(item)
        of_part, event = TEXTS[item["type"]]
        extra = {"logprobs": part["logprobs"]} if of_part == "output_text" else {}
        yield self._event(f"{event}.done", **place, content_index=0, text=part["text"], **extra)
        yield self._event("response.content_part.done", **place, content_index=0, part=part)
        yield self._done(item, status)

    def _called(self, call: Mapping[str, Any]) -> Iterator[Event]:
        kind = call["type"]
        of_item, of_id, field, event = CALLS[kind]
        called = call[kind]
        item = {"id": _id(of_id), "type": of_item, "call_id": call["id"], **called, field: ""}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._event(
            "response.output_item.added", output_index=len(self._output), item=item | {"status": "in_progress"}
        )
        yield self._event(f"{event}.delta", **place, delta=called[field])
        name = {"name": called["name"]} if kind == "function" else {}
        yield self._event(f"{event}.done", **place, **name, **{field: called[field]})
        yield self._done(item | {field: called[field]}, "completed")

    def _done(self, item: dict[str, Any], status: str) -> Event:
        item = item | {"status": status}
        if item["type"] == "reasoning" and "reasoning.encrypted_content" in (self._asked.include or []):
            item["encrypted_content"] = sealed(item["content"][0]["text"])
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._output)}

    async def _logprobs(self, part: AnswerDelta) -> list[Any]:
        if not self._asked.wants_logprobs or not part.content:
            return []
        return await token_entries(self._texts, part.tokens)


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.sampled,
    }


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
