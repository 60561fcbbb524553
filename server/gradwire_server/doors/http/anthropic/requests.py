"""Requests for messages, and the conversations that their blocks are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from gradwire_http.models import BoundedModel
from pydantic import ConfigDict, Field

from gradwire_server.doors.http.openai.requests import (
    MAX_TOKENS,
    ChatRequest,
    JsonSchemaFormat,
    ResponseFormat,
    unsupported,
)
from gradwire_server.doors.http.openai.unserved import DoorRequest
from gradwire_server.errors import invalid

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_PLACE: dict[str, Any] = {
    "path": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
}
_PLACE |= {"file_text": _TEXT, "view_range": {"type": "array", "items": _NUMBER}}


def _of_commands(*commands: str, **more: Any) -> dict[str, Any]:
    properties = {"command": {"type": "string", "enum": list(commands)}, **_PLACE, **more}
    return {"type": "object", "properties": properties, "required": ["command"]}


_EDITS = ("view", "create", "str_replace", "insert")
_BASH = {"command": _TEXT, "restart": {"type": "boolean"}}
KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bash": ("Run a command in a shell that stays open.", {"type": "object", "properties": _BASH}),
    "text_editor": ("Read and edit files.", _of_commands(*_EDITS)),
    "memory": (
        "Read and edit files that are kept.",
        _of_commands(*_EDITS, "delete", "rename", old_path=_TEXT, new_path=_TEXT),
    ),
}
"""Beginning of a type -> a description and the schema of its input (Anthropic's API reference)."""


def known_tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tool of a known type as a function; None for another."""
    kind, _, _date = str(tool.get("type")).rpartition("_")
    if kind not in KNOWN or not isinstance(tool.get("name"), str):
        return None
    description, parameters = KNOWN[kind]
    return {"name": tool["name"], "description": description, "parameters": parameters}


Text = str | list[dict[str, Any]]


class ToolChoice(BoundedModel):
    """Whether tools are called."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""


class Thinking(BoundedModel):
    """Whether the model is to think first: its template's ``enable_thinking``."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(BoundedModel):
    """The form of the text, and how much to think."""

    model_config = ConfigDict(extra="ignore")

    format: dict[str, Any] | None = None
    effort: str | None = None

    def response_format(self) -> ResponseFormat | None:
        """The same as chat completions have it."""
        form = self.format
        if form is None:
            return None
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise invalid("output_config.format is of type json_schema, with a schema", "output_config")
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=form["schema"]))


class CountRequest(DoorRequest):
    """``POST /v1/messages/count_tokens``, and what messages share with it."""

    door = "count_tokens"

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: Text | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self, **options: Any) -> ChatRequest:
        """The same as a request for a chat completion, with these options."""
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system, "system")}]
        choice = self.tool_choice
        prefilled = self.messages[-1].get("role") == "assistant"
        chat = ChatRequest.model_construct(
            model=self.model,
            messages=[*system, *(found for each in self.messages for found in _messages(each))],
            tools=[_tool(tool) for tool in self.tools or []] or None,
            tool_choice=None if choice is None else _choice(choice),
            enable_thinking=None if self.thinking is None else self.thinking.type != "disabled",
            reasoning_effort=None if self.output_config is None else self.output_config.effort,
            response_format=None if self.output_config is None else self.output_config.response_format(),
            continue_final_message=prefilled or None,
            **options,
        )
        chat.ignore(self.ignored)
        return chat


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    door = "messages"

    max_tokens: int = Field(ge=1, lt=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def chat(self, **options: Any) -> ChatRequest:
        """See :meth:`CountRequest.chat`."""
        return super().chat(
            max_completion_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            **options,
        )


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message as messages of a chat: results of tools are messages of their own, before what else is said."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"a message has the role {str(role)[:50]!r}; there are user and assistant", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"a message has content of type {type(content).__name__}, not text or blocks", "messages")
    answer: dict[str, Any] = {"role": role}
    parts, calls, results, thought = [], [], [], ""
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind == "tool_use":
            call = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": call})
        elif kind == "tool_result":
            result = block.get("content")
            if not isinstance(result, str | list | None):
                raise invalid("a tool_result has content that is neither text nor blocks", "messages")
            told = result if isinstance(result, str) else [_part(part) for part in result or []]
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told})
        elif kind == "thinking":
            thought += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            parts.append(_part(block))
    if thought:
        answer["reasoning_content"] = thought
    if calls:
        answer["tool_calls"] = calls
    return [*results, answer | {"content": parts}] if parts or calls or not results else results


def _part(block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
        }
    if isinstance(source, Mapping):
        return {"type": "image_url", "image_url": {"url": str(source.get("url"))}}
    message = f"a block is of type {str(kind)[:50]!r}; there are text, image, tool_use, tool_result and thinking"
    raise unsupported(message, "messages")


def _text(content: Text, field: str) -> str:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in content if block.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise invalid(f"{field} has a block that is no text", field)
    return "".join(map(str, texts))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if (known := known_tool(tool)) is not None:
        return {"type": "function", "function": known}
    if tool.get("type") not in (None, "custom"):
        return dict(tool)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
