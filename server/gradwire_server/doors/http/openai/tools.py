"""Tools in conversations: what a model's template is given, and calls that are read from its answer.

A model writes a call in the form that its chat template teaches it (:mod:`.tool_forms`). What is not a whole call of a
tool of the request stays text. A forced call has no such form: the answer is held to the JSON schema of one call, and
read as that. Tools of other types that are functions in other words are given to the template as functions, and their
calls are given back as the client knows them.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire_proto.chat import encodable

from gradwire_server.doors.http.openai.call_readers import MOST_CALLS, json_or_none, read_mistral
from gradwire_server.doors.http.openai.images import IMAGE_PART, ConversationImages
from gradwire_server.doors.http.openai.requests import check_encodable, unsupported
from gradwire_server.doors.http.openai.tool_forms import form_of
from gradwire_server.doors.http.openai.unserved import refused, unserved_tool
from gradwire_server.errors import invalid

ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
"""Roles of OpenAI -> the names that templates know."""


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


@dataclass(frozen=True)
class _Known:
    """A tool as the client knows it; a custom one has a text as its input."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass
class OfferedTools:
    """The tools of a request.

    Attributes:
        functions: The functions that the template is given.
        forced: The functions of which one must be called; empty if none must.
        ignored: Names of tools that are ignored.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    forced: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    _known: dict[str, _Known] = field(default_factory=dict)

    def add(self, number: int, tool: Mapping[str, Any], namespace: str = "") -> None:
        """Add a tool in the form of chat completions, or all of a namespace.

        Raises:
            ServiceError: INVALID_ARGUMENT; UNSUPPORTED for a tool without which the answer would be wrong.
        """
        kind = tool.get("type") or "function"
        described = tool.get(kind) if kind in ("function", "custom") else None
        if kind == "namespace" and not namespace and isinstance(tool.get("tools"), list):
            for each in tool["tools"]:
                self.add(number, each if isinstance(each, Mapping) else {}, str(tool.get("name") or "functions"))
        elif kind not in ("function", "custom"):
            name, entry = unserved_tool(str(kind))
            if entry.refusal:
                raise refused("tools", f"tool {number} of type {name!r}", entry.refusal)
            self.ignored.append(f"tools.{name}")
        elif not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise invalid(f"tool {number} has no function with a name", "tools")
        else:
            self._describe(_Known(described["name"], namespace, kind == "custom"), described)

    def _describe(self, known: _Known, described: Mapping[str, Any]) -> None:
        flat = flat_name(known.namespace, known.name)
        if self._known.setdefault(flat, known) != known:
            raise invalid(f"two tools have the name {flat[:100]!r}, of which one is in a namespace or custom", "tools")
        function = {key: value for key, value in described.items() if key not in ("strict", "format")} | {"name": flat}
        if described.get("strict"):
            self.ignored.append("tools.strict")
        if known.custom:
            function["parameters"] = _TEXT_INPUT
            form = described.get("format")
            form = form.get("grammar", form) if isinstance(form, Mapping) else {}
            if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
                self.ignored.append("tools.format")
                told = f"The input follows this grammar ({form.get('syntax')}):\n{form['definition']}"
                function["description"] = f"{described.get('description') or ''}\n{told}".strip()
        self.functions.append({"type": "function", "function": function})

    def choose(self, choice: str | Mapping[str, Any] | None) -> None:
        """Say which of the tools may or must be called.

        Raises:
            ServiceError: INVALID_ARGUMENT for an invalid choice, or a tool that is not there; UNSUPPORTED for a
                choice, or a single tool, that is not served.
        """
        if choice == "none":
            self.functions = []
            return
        if self.ignored and not self.functions:
            raise refused("tools", self.ignored[0].removeprefix("tools."), f"it is the only tool: {_RUN_IT}")
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            named = allowed.get("tools") if isinstance(allowed, Mapping) else None
            self.functions = [self._chosen(each) for each in named or []]
            choice = allowed.get("mode", "auto")
        if choice in (None, "auto"):
            return
        if not self.functions:
            raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
        self.forced = self.functions if choice == "required" else [self._chosen(choice)]

    def _chosen(self, choice: Any) -> dict[str, Any]:
        kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
        if isinstance(kind, str) and kind not in ("function", "custom"):
            raise refused("tool_choice", f"a choice of {kind[:50]!r}", _RUN_IT)
        function = choice.get(kind, choice) if kind else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            one = '{"type": "function", "function": {"name": …}}'
            message = f'tool_choice is "auto", "none", "required", or a tool: {one}'
            raise invalid(message, "tool_choice")
        flat = flat_name(str(function.get("namespace") or ""), name)
        chosen = [tool for tool in self.functions if tool["function"]["name"] == flat]
        if not chosen:
            known = ", ".join(str(tool["function"]["name"]) for tool in self.functions)
            raise invalid(f"tool_choice names {name!r}; the tools are {known}", "tool_choice")
        return chosen[0]

    def as_offered(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call of one of the functions as a call of the tool that the client knows."""
        function = call["function"]
        known = self._known[function["name"]]
        within = {"namespace": known.namespace} if known.namespace else {}
        if not known.custom:
            return call | {"function": {**function, "name": known.name, **within}}
        arguments = json_or_none(function["arguments"])
        text = arguments.get("input") if isinstance(arguments, dict) else None
        custom = {"name": known.name, "input": text if isinstance(text, str) else function["arguments"], **within}
        return {"id": call["id"], "type": "custom", "custom": custom}


_TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool as a function."""
_RUN_IT = "describe a function that the client runs"


def flat_name(namespace: str, name: str) -> str:
    """The name of a tool of a namespace as a function; ``functions`` is the namespace of what has none."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace not in ("", "functions") else name


def offered_tools(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> OfferedTools:
    """The tools of a request and the choice among them, as :meth:`OfferedTools.add` and ``choose`` read them."""
    offered = OfferedTools()
    for number, tool in enumerate(tools):
        offered.add(number, tool)
    offered.choose(choice)
    return offered


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


def _message(number: int, message: Mapping[str, Any], images: ConversationImages) -> dict[str, Any]:
    where = f"messages.{number}"
    role = message.get("role")
    if not isinstance(role, str):
        raise invalid(f"message {number} has no role", where)
    if role not in ROLES:  # a template may write any role, also one that the model has never seen
        raise invalid(f"message {number} has the role {role[:50]!r}; it must be one of {', '.join(ROLES)}", where)
    made = dict(message) | {"role": ROLES[role]}
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
    if (called := made.pop("function_call", None)) is not None and not calls:
        calls = [{"function": called}]
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
    kind = "custom" if isinstance(call, dict) and call.get("type") == "custom" else "function"
    function = call.get(kind) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"message {number} has a tool call without a function's name", "messages")
    arguments = function.get("arguments", {}) if kind == "function" else {"input": function.get("input")}
    if isinstance(arguments, str):
        arguments = json_or_none(arguments or "{}")
        if not isinstance(arguments, dict):
            raise invalid(f"message {number} has a tool call whose arguments are no JSON object", "messages")
    name = flat_name(str(function.get("namespace") or ""), function["name"])
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call(text: str, names: set[str]) -> dict[str, Any] | None:
    call = json_or_none(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in names:
        return None
    return _written(call["name"], call.get("arguments", call.get("parameters", {})))


def _written(name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form, with an id of its own."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": encodable(text)},
    }
