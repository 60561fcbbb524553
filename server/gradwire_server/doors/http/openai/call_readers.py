"""Readers of calls of tools in an answer's text: JSON, tags, or Python, between marks or as the whole answer.

A reader takes time in proportion to the text, whatever a model has written.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gradwire_proto.chat import read_json

Schemas = Mapping[str, Mapping[str, Any]]
"""The tools' names and the JSON schemas of their parameters."""
MOST_CALLS = 128
"""Calls that are read from an answer; further ones are text. Each may be as long as the answer."""
Found = Iterator[tuple[int, int, str, Any]]
"""Calls in a text: begin and end of what belongs to the call, the tool's name, its arguments (an object, if whole)."""
Reader = Callable[[str, Schemas], Found]
PYTHON_MARKS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
"""Special tokens of Llama's, around a code or a text in front of calls."""


def tagged(opens: str, closes: str, pair_opens: str, pair_closes: str) -> Reader:
    """A reader of calls whose arguments are in tags.

    Args:
        opens, closes: Patterns of a call's begin, which captures the name, and end.
        pair_opens, pair_closes: Patterns of an argument's begin and end. The first captures the key, and may capture in
            a group ``text`` what tells that the value is a text, whatever the schema says.
    """
    call, pair = (re.compile(opens), re.compile(closes)), (re.compile(pair_opens), re.compile(pair_closes))

    def read(text: str, schemas: Schemas) -> Found:
        for opened, body, end in _between(*call, text):
            name = opened[1].strip()
            types = schemas.get(name, {}).get("properties", {})
            arguments = {}
            for each, value, _ in _between(*pair, body):
                is_text = each.groupdict().get("text") is not None
                arguments[each[1].strip()] = value if is_text else _value(value, types.get(each[1].strip()))
            yield opened.start(), end, name, arguments

    return read


def written(opens: str, closes: str = "", *, by_key: bool = False) -> Reader:
    """A reader of calls in JSON: an object, or a list of them.

    Args:
        opens: Pattern of what is before a call. If it captures a name, an object has that call's arguments; else each
            has its own name and arguments.
        closes: Pattern of what must be behind it.
        by_key: Whether an object's only key is the name, and its value the arguments.
    """
    before, behind = re.compile(opens, re.DOTALL | re.MULTILINE), re.compile(closes)

    def read(text: str, schemas: Schemas) -> Found:
        end = 0
        for _ in range(MOST_CALLS):
            match = before.search(text, end)
            if match is None:
                return
            end = match.end()
            whole = _json_at(text, end)
            closed = None if whole is None else behind.match(text, whole[1])
            if whole is None or closed is None:
                continue
            name = match[1] if match.groups() else None
            calls = [(name, whole[0])] if name is not None else _named(whole[0], by_key=by_key)
            if any(each in schemas for each, _ in calls):
                end = closed.end()
                yield from ((match.start(), end, *call) for call in calls)

    return read


def python_between(opens: str, closes: str) -> Reader:
    """A reader of :func:`_python_calls` between two marks."""
    marks = re.compile(re.escape(opens)), re.compile(re.escape(closes))

    def read(text: str, _schemas: Schemas) -> Found:
        for opened, body, end in _between(*marks, text):
            yield from ((opened.start(), end, *call) for call in _python_calls(body))

    return read


def read_whole_answer(text: str, _schemas: Schemas) -> Found:
    """The answer is calls and nothing else, as Llama writes them.

    ``{"name": …, "parameters": {…}}``, several parted by semicolons; a list of such; or ``[name(key=value), …]``.
    Before it may be a text that a mark of Python ends.
    """
    end = len(text.rstrip())
    while (mark := next((mark for mark in PYTHON_MARKS if text.endswith(mark, 0, end)), "")) != "":
        end = len(text[: end - len(mark)].rstrip())
    begin = max(text.rfind(mark, 0, end) + len(mark) if mark in text[:end] else 0 for mark in PYTHON_MARKS)
    begin = at = end - len(text[begin:end].lstrip())
    calls = list[tuple[str, Any]]()
    while len(calls) < MOST_CALLS and (whole := _json_at(text, at)) is not None:
        parted = re.compile(r"\s*;?\s*").match(text, whole[1])
        at = whole[1] if parted is None else parted.end()
        calls += _named(whole[0])
    if at < end:
        calls = _python_calls(text[begin:end])
    yield from ((begin, len(text), *call) for call in calls)


def read_mistral(text: str, schemas: Schemas) -> Found:
    """``[TOOL_CALLS][{…}, …]`` (v3 to v7), or ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call (v11 and later)."""
    mark = text.rfind("[TOOL_CALLS]")
    listed = json_or_none(text[mark + len("[TOOL_CALLS]") :] if mark >= 0 else text)
    if isinstance(listed, list):
        for call in _named(listed):
            yield max(mark, 0), len(text), *call
        return
    names = "|".join(map(re.escape, sorted(schemas, key=len, reverse=True)))
    opens = r"(?:\[TOOL_CALLS\]\s*|\A\s*|(?<=\})\s*)"  # or where it was: in front, or behind another call
    yield from written(rf"{opens}({names})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)")(text, schemas)


def read_gemma(text: str, _schemas: Schemas) -> Found:
    """``call:name{key:<escape>text<escape>,other:1}``: bare keys, and texts between marks."""
    for opened, body, end in _between(*_GEMMA, text):
        parts = re.split(r"<escape>|<\|\"\|>", body + "}")
        bare = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
        quoted = [json.dumps(part) if number % 2 else bare.sub(r'\1"\2":', part) for number, part in enumerate(parts)]
        yield opened.start(), end, opened[1], json_or_none("".join(quoted))


_GEMMA = (
    re.compile(r"(?:<start_function_call>|<\|tool_call>)?call:([\w.-]+)(?=\{)"),
    re.compile(r"\}(?:<end_function_call>|<tool_call\|>|(?=\s*call:)|\s*$)"),
)


def _between(opens: re.Pattern[str], closes: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str, int]]:
    """Find texts between two patterns: yields the match of the first, the text behind it, and the end of the second.

    What no later text closes ends it.
    """
    end = 0
    while (opened := opens.search(text, end)) is not None:
        closed = closes.search(text, opened.end())
        if closed is None:
            return
        end = closed.end()
        yield opened, text[opened.end() : closed.start()], end


def _python_calls(text: str) -> list[tuple[str, Any]]:
    """The calls in a list ``[name(key=value), …]``; none if it is not one of calls with nothing but keywords."""
    calls = []
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts
            tree = ast.parse(text.strip(), mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else []:
            if not isinstance(call, ast.Call) or call.args:
                return []
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            calls.append((ast.unparse(call.func), arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls


def _value(text: str, schema: Any) -> Any:
    """An argument written as text: that text where its schema says so, else JSON if it is some."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    value = json_or_none(text)
    return text if value is None and text.strip() != "null" else value


def _named(value: Any, *, by_key: bool = False) -> list[tuple[str, Any]]:
    """Names and arguments of an object, or of a list of them; ("", None) for what is no call."""
    calls: list[tuple[str, Any]] = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
        if by_key and isinstance(call, dict) and len(call) == 1:
            calls += call.items()
        elif isinstance(name, str):
            calls.append((name, call.get("arguments", call.get("parameters", {}))))
        else:
            calls.append(("", None))
    return calls


def json_or_none(text: str) -> Any:
    """Parse a JSON text; None if it is not valid JSON."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return None


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON object or list that begins at a place, and its end."""
    if not text.startswith(("{", "["), start):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value, end
