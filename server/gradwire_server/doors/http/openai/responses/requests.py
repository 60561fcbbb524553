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
    unsupported,
)
from gradwire_server.doors.http.openai.responses.compaction import SUMMARY, unsealed
from gradwire_server.doors.http.openai.unserved import ITEMS
from gradwire_server.errors import invalid

Item = dict[str, Any]
PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text"}
"""Types of parts that are text, and the field that has it."""
INCLUDED = (
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "web_search_call.results", "web_search_call.action.sources",
)  # fmt: skip
"""Names that ``include`` may have and that add nothing to any response."""


class TextFormat(BoundedModel):
    """The form of the text."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BoundedModel):
    """Options of the text."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None


class ReasoningOptions(BoundedModel):
    """How much to think. The reasoning itself is returned, no summary of it."""

    model_config = ConfigDict(extra="ignore")

    effort: str | None = None


class ResponseRequest(SamplingRequest):
    """``POST /v1/responses``."""

    door = "responses"

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    n: Literal[1] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=MAX_TOKENS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    metadata: Any = None
    store: bool | None = None

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
            items: The earlier items, and the input.
        """
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        form = self.text.format if self.text is not None else None
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise invalid("text.format of type json_schema needs a schema", "text")
        shared = {name: getattr(self, name) for name in SamplingRequest.model_fields if name != "stream_options"}
        named = JsonSchemaFormat(name=form.name, schema=form.schema_ or {}) if form is not None else None
        chat = ChatRequest.model_construct(
            **shared,
            messages=[*system, *messages_of(items)],
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=ResponseFormat(type=form.type, json_schema=named) if form is not None else None,
            tools=[_tool(tool) for tool in self.tools or []] or None,
            tool_choice=self.tool_choice,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
        )
        chat.ignore(self.ignored)
        chat.ignore(f"include.{each}" for each in INCLUDED if each in (self.include or []))
        chat.ignore(f"input.{kind}" for kind in ITEMS if any(item.get("type") == kind for item in items))
        return chat


def with_references(items: Sequence[Item], find: Callable[[str], Item]) -> list[Item]:
    """The items, with those in the place of references to them."""
    return [find(str(item.get("id"))) if item.get("type") == "item_reference" else item for item in items]


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as messages of a chat: reasoning, text and calls of one turn of the assistant's are one message."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _text(item.get("content") or [], number) or unsealed(item.get("encrypted_content")) or ""
            reasoning = reasoning or _text(item.get("summary") or [], number)
        elif kind == "message":
            message = {"role": item.get("role"), "content": _content(item.get("content"), number)}
            if message["role"] == "assistant":
                if not isinstance(message["content"], str):
                    message["content"] = _text(item["content"], number)
                if reasoning:
                    message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if reasoning:
                messages[-1]["reasoning_content"], reasoning = reasoning, ""
            of_kind = "function" if kind == "function_call" else "custom"
            call = {name: item[name] for name in ("name", "namespace", "arguments", "input") if name in item}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": of_kind, of_kind: call})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output"), number)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "compaction":
            summary = unsealed(item.get("encrypted_content"))
            if summary is None:
                told = f"item {number} of input is a compaction of another server: send what it stands for"
                raise invalid(told, "input")
            messages.append({"role": "user", "content": SUMMARY + summary})
        elif kind not in ITEMS:
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


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "namespace" and isinstance(tool.get("tools"), list):
        return {**tool, "tools": [_tool(each) for each in tool["tools"] if isinstance(each, Mapping)]}
    if kind not in ("function", "custom"):
        return dict(tool)
    known = ("name", "description", "parameters", "strict", "format")
    return {"type": kind, kind: {name: tool[name] for name in known if tool.get(name) is not None}}
