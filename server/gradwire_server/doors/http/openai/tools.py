"""Tools in conversations: what a model's template is given, and calls that are read from its answer.

A model writes a call in the form that its chat template teaches it (:mod:`.tool_forms`). What is not a whole call of a
tool of the request stays text. A forced call has no such form: the answer is held to the JSON schema of one call, and
read as that.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradwire_server.doors.http.openai.call_readers import MOST_CALLS, json_or_none, read_mistral
from gradwire_server.doors.http.openai.images import IMAGE_PART, ConversationImages
from gradwire_server.doors.http.openai.requests import check_encodable, invalid, unsupported
from gradwire_server.doors.http.openai.tool_forms import form_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_answer(
    text: str, template: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[str | None, list[dict[str, Any]]]:
    """The content of an answer and its tool calls in OpenAI's form; the content is None where nothing is left of it.

    Calls that were cut off, or that name no tool of the request, are content.
    """
    schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}
    spans = list(itertools.islice(form_of(template).read(text, schemas), MOST_CALLS))
    left = {span[:2] for span in spans if span[2] not in schemas or not isinstance(span[3], dict | str)}
    rest, calls, end = "", [], 0
    for begin, behind, name, arguments in spans:
        if (begin, behind) in left:
            continue
        if begin >= end:  # else another call of the same list
            rest, end = rest + text[end:begin], behind
        calls.append(_written(name, arguments))
    if not calls:
        return text, []
    return (rest + text[end:]).rstrip() or None, calls


def certain_content(text: str, template: str, names: Iterable[str] = ()) -> str:
    """The beginning of an unfinished answer that is its content, whatever follows: it cannot belong to a call.

    Args:
        names: The tools, with which a call may begin whose mark is a special token.
    """
    form, begun = form_of(template), text.lstrip()
    if form.first and begun.startswith(tuple(form.first)):
        return ""
    if form.read is read_mistral and begun:
        for name in names:
            if name.startswith(begun) or (begun.startswith(name) and begun[len(name) :].lstrip()[:1] in ("", "{", "[")):
                return ""
    size = min((text.find(mark) for mark in form.begins if mark in text), default=len(text))
    for mark in form.begins:
        size = min(size, *(len(text) - part for part in range(1, len(mark)) if text.endswith(mark[:part])), len(text))
    return text[:size].rstrip()


def read_forced(text: str, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The call that :func:`forced_schema` held an answer to; none in an answer that was cut off."""
    call = _call(text, {str(tool["function"]["name"]) for tool in tools})
    return [call] if call is not None else []


def forced(choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools of which one must be called; empty if none must.

    Raises:
        ServiceError: INVALID_ARGUMENT for a choice that is none, or a tool that is not there.
    """
    if choice in (None, "auto", "none"):
        return []
    if not tools:
        raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "required":
        return list(tools)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        message = 'tool_choice is "auto", "none", "required", or a tool: {"type": "function", "function": {"name": …}}'
        raise invalid(message, "tool_choice")
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        known = ", ".join(str(tool["function"]["name"]) for tool in tools)
        raise invalid(f"tool_choice names {name!r}; the tools are {known}", "tool_choice")
    return chosen


def forced_schema(tools: Sequence[Mapping[str, Any]], template: str) -> str:
    """JSON schema of a call of one of these tools, with the keys that the template teaches.

    Raises:
        ServiceError: UNSUPPORTED for tools whose schemas define a name differently.
    """
    key = "parameters" if form_of(template).family.startswith("Llama") else "arguments"
    calls, definitions = [], dict[str, Any]()
    for tool in tools:
        schema = dict(tool["function"].get("parameters") or {"type": "object"})
        for name, definition in dict(schema.pop("$defs", None) or {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise unsupported(f"two tools define {name[:100]!r} differently in their $defs", "tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, key: schema},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    whole = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return json.dumps(whole | ({"$defs": definitions} if definitions else {}))


def messages_for_template(messages: Sequence[Mapping[str, Any]], images: ConversationImages) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text for parts of text, objects for the arguments of calls.

    Args:
        images: Takes their images; where there are some, a content stays in parts.

    Raises:
        ServiceError: INVALID_ARGUMENT; UNSUPPORTED for sound and files.
    """
    return [_message(number, message, images) for number, message in enumerate(messages)]


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools of a request.

    Raises:
        ServiceError: INVALID_ARGUMENT for a tool without a name; UNSUPPORTED for one that is no function.
    """
    checked = []
    for number, tool in enumerate(tools or []):
        if tool.get("type", "function") != "function":
            raise unsupported(f"tool {number} is of type {str(tool['type'])[:50]!r}; there are functions", "tools")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tool {number} has no function with a name", "tools")
        checked.append({"type": "function", "function": function})
    return checked


def _message(number: int, message: Mapping[str, Any], images: ConversationImages) -> dict[str, Any]:
    where = f"messages.{number}"
    role = message.get("role")
    if not isinstance(role, str):
        raise invalid(f"message {number} has no role", where)
    if role not in ROLES:  # a template may write any role, also one that the model has never seen
        raise invalid(f"message {number} has the role {role[:50]!r}; it must be one of {', '.join(ROLES)}", where)
    made = dict(message) | {"role": "system" if role == "developer" else role}
    content = message.get("content")
    if isinstance(content, list):
        parts = [_part(number, part, images) for part in content]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        made["content"] = "".join(texts) if len(texts) == len(parts) else parts
    elif content is None:
        made["content"] = ""
    elif not isinstance(content, str):
        raise invalid(f"the content of message {number} is a {type(content).__name__}, not text", where)
    check_encodable(json.dumps(made, ensure_ascii=False), where)
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise invalid(f"tool_calls of message {number} is a {type(calls).__name__}, not a list", where)
        made["tool_calls"] = [_known_call(number, call) for call in calls]
    elif "tool_calls" in made:
        del made["tool_calls"]
    return made


def _part(number: int, part: Any, images: ConversationImages) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part, dict) and part.get("type") == IMAGE_PART:
        images.add(part, number)
        return {"type": "image"}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    message = f"message {number} has a part of type {str(kind)[:50]!r}; models here read text and images"
    raise unsupported(message, "messages")


def _known_call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"message {number} has a tool call without a function's name", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json_or_none(arguments or "{}")
        if not isinstance(arguments, dict):
            raise invalid(f"message {number} has a tool call whose arguments are no JSON object", "messages")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _call(text: str, names: set[str]) -> dict[str, Any] | None:
    call = json_or_none(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in names:
        return None
    return _written(call["name"], call.get("arguments", call.get("parameters", {})))


def _written(name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form, with an id of its own."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
