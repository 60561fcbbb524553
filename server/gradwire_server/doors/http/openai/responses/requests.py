"""Requests for responses, and the conversations that their items are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gradwire_http.models import BoundedModel
from pydantic import ConfigDict, Field

from gradwire_server.doors.http.openai.requests import (
    MAX_TOKENS,
    ChatRequest,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingRequest,
    invalid,
    unsupported,
)

Item = dict[str, Any]
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text"}
"""Types of parts that are text, and the field that has it."""


class TextFormat(BoundedModel):
    """The form of the text."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BoundedModel):
    """What the text is to be; ``verbosity`` has no effect."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None


class ReasoningOptions(BoundedModel):
    """How much to think; ``summary`` has no effect, as the reasoning itself is returned."""

    model_config = ConfigDict(extra="ignore")

    effort: str | None = None


class ResponseRequest(SamplingRequest):
    """``POST /v1/responses``."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    n: Literal[1] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=MAX_TOKENS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    max_tool_calls: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def own_items(self) -> list[Item]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or [])

    def chat(self, items: Sequence[Item]) -> ChatRequest:
        """The same as a request for a chat completion.

        Args:
            items: What was said before, and the input.

        Raises:
            ServiceError: INVALID_ARGUMENT, UNSUPPORTED.
        """
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        form = self.text.format if self.text is not None else None
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise invalid("text.format of type json_schema needs a schema", "text")
        shared = {name: getattr(self, name) for name in SamplingRequest.model_fields if name != "stream_options"}
        named = JsonSchemaFormat(name=form.name, schema=form.schema_ or {}) if form is not None else None
        return ChatRequest.model_construct(
            **shared,
            messages=[*system, *messages_of(items)],
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=ResponseFormat(type=form.type, json_schema=named) if form is not None else None,
            tools=[_tool(number, tool) for number, tool in enumerate(self.tools or [])] or None,
            tool_choice=_choice(self.tool_choice),
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
        )


def with_references(items: Sequence[Item], find: Callable[[str], Item]) -> list[Item]:
    """The items, with those in the place of references to them."""
    return [find(str(item.get("id"))) if item.get("type") == "item_reference" else item for item in items]


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as messages of a chat: reasoning, text and calls of one turn of the assistant's are one message.

    Raises:
        ServiceError: INVALID_ARGUMENT, UNSUPPORTED.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _text(item.get("content") or item.get("summary") or [], number)
        elif kind == "message":
            message = {"role": item.get("role"), "content": _content(item.get("content"), number)}
            if message["role"] == "assistant":
                if not isinstance(message["content"], str):
                    message["content"] = _text(item["content"], number)
                if reasoning:
                    message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if reasoning:
                messages[-1]["reasoning_content"], reasoning = reasoning, ""
            call = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": call})
        elif kind == "function_call_output":
            content = _content(item.get("output"), number)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            known = "messages, function calls, their outputs and reasoning"
            raise unsupported(f"item {number} of input is of type {str(kind)[:50]!r}; there are {known}", "input")
    return messages


def _content(content: Any, number: int) -> Any:
    if not isinstance(content, list):
        return content
    return [_part(part, number) for part in content]


def _part(part: Any, number: int) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in PARTS:
        return {"type": "text", "text": part.get(PARTS[kind])}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    shown = str(kind if kind is not None else type(part).__name__)[:50]
    raise unsupported(f"item {number} of input has a part of type {shown!r}; there are texts and images", "input")


def _text(parts: Any, number: int) -> str:
    """The text of parts that are nothing else."""
    if isinstance(parts, str):
        return parts
    texts = []
    for part in parts if isinstance(parts, list) else []:
        text = part.get(PARTS.get(str(part.get("type")), "text")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise invalid(f"item {number} of input has a part without text", "input")
        texts.append(text)
    return "".join(texts)


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:50]
        raise unsupported(f"tool {number} is of type {kind!r}; there are functions, which the client calls", "tools")
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in known if tool.get(name) is not None}}


def _choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, Mapping):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
