"""The forms in which models write calls of tools, each told by the chat template that teaches it.

Special tokens are left out of a sample's text, so a form is read with and without those that its model has.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The tools' names and the JSON schemas of their parameters."""
MOST_CALLS = 128
"""Calls that are read from an answer; further ones are text. Each may be as long as the answer."""
Found = Iterator[tuple[int, int, str, Any]]
"""Calls in a text: begin and end of what belongs to the call, the tool's name, its arguments (an object, if whole)."""


@dataclass(frozen=True)
class ToolForm:
    """One form.

    Attributes:
        family: Models that write it.
        taught_by: A text that templates of this form have, and those of the forms below it in :data:`FORMS` have not.
        read: Finds the whole calls in a text.
        begins: Texts with which a call begins, anywhere in an answer.
        first: Characters with which an answer that is nothing but calls begins.
    """

    family: str
    taught_by: str
    read: Callable[[str, Schemas], Found]
    begins: tuple[str, ...] = ()
    first: str = ""


def form_of(template: str) -> ToolForm:
    """The form that a chat template teaches."""
    return next(form for form in FORMS if form.taught_by in template)


def _between(opens: re.Pattern[str], closes: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str, int]]:
    """What stands between two patterns: the match of the first, the text behind it, and the end of the second.

    It takes time in proportion to the text, whatever a model has written: what no later text closes ends it.
    """
    end = 0
    while (opened := opens.search(text, end)) is not None:
        closed = closes.search(text, opened.end())
        if closed is None:
            return
        end = closed.end()
        yield opened, text[opened.end() : closed.start()], end


def _tagged(opens: str, closes: str, pair_opens: str, pair_closes: str) -> Callable[[str, Schemas], Found]:
    """A reader of calls whose arguments are in tags.

    Args:
        opens, closes: Patterns of a call's begin, which captures the name, and end.
        pair_opens, pair_closes: Of an argument's, within the call.
    """
    call, pair = (re.compile(opens), re.compile(closes)), (re.compile(pair_opens), re.compile(pair_closes))

    def read(text: str, schemas: Schemas) -> Found:
        for opened, body, end in _between(*call, text):
            name = opened[1].strip()
            types = schemas.get(name, {}).get("properties", {})
            pairs = ((each[1].strip(), value) for each, value, _ in _between(*pair, body))
            yield opened.start(), end, name, {key: _value(value, types.get(key)) for key, value in pairs}

    return read


def _objects(opens: str, closes: str) -> Callable[[str, Schemas], Found]:
    """A reader of calls that are JSON objects with name and arguments, between a pattern and "}" with another."""
    call = re.compile(opens + r"(?=\{)", re.MULTILINE), re.compile(r"\}" + closes)

    def read(text: str, _schemas: Schemas) -> Found:
        for opened, body, end in _between(*call, text):
            yield opened.start(), end, *_name_and_arguments(_json(body + "}"))

    return read


def _named(pattern: str, close: str = "") -> Callable[[str, Schemas], Found]:
    """A reader of calls whose name is in the group of a pattern, with a JSON object behind it and then ``close``."""
    opens, closes = re.compile(pattern, re.DOTALL), re.compile(close)

    def read(text: str, schemas: Schemas) -> Found:
        end = 0
        for _ in range(MOST_CALLS):
            found = opens.search(text, end)
            if found is None:
                return
            end = found.end()
            whole = _json_at(text, end)
            closed = None if whole is None else closes.match(text, whole[1])
            if whole is not None and closed is not None and found[1] in schemas:
                end = closed.end()
                yield found.start(), end, found[1], whole[0]

    return read


def _llama(text: str, _schemas: Schemas) -> Found:
    """``{"name": …, "parameters": {…}}``, several parted by semicolons; the whole answer."""
    start = len(text) - len(text.lstrip())
    calls: list[tuple[int, int, str, Any]] = []
    end = start
    while len(calls) < MOST_CALLS and (whole := _json_at(text, end)) is not None:
        at, parted = end, re.compile(r"\s*;?\s*").match(text, whole[1])
        end = whole[1] if parted is None else parted.end()
        calls.append((at, end, *_name_and_arguments(whole[0])))
    if end == len(text):
        yield from calls


def _mistral(text: str, schemas: Schemas) -> Found:
    """``[TOOL_CALLS][{…}, …]`` (v3 to v7), or ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call (v11 and later)."""
    mark = text.rfind("[TOOL_CALLS]")
    listed = _json(text[mark + len("[TOOL_CALLS]") :] if mark >= 0 else text)
    if isinstance(listed, list):
        for call in listed:
            yield max(mark, 0), len(text), *_name_and_arguments(call)
        return
    names = "|".join(map(re.escape, sorted(schemas, key=len, reverse=True)))
    opens = r"(?:\[TOOL_CALLS\]\s*|^\s*|(?<=\})\s*)"  # or where it was: in front, or behind another call
    yield from _named(rf"{opens}({names})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)")(text, schemas)


def _pythonic(text: str, _schemas: Schemas) -> Found:
    """``[name(key=value, …), …]``, the whole answer (Llama 4)."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts
            tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                yield 0, len(text), "", None
                continue
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            yield 0, len(text), ast.unparse(call.func), arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return


def _marked_pythonic(text: str, schemas: Schemas) -> Found:
    """The same list between marks (LFM2)."""
    for opened, body, end in _between(*_LFM2, text):
        for *_, name, arguments in _pythonic(body, schemas):
            yield opened.start(), end, name, arguments


_LFM2 = re.compile(re.escape("<|tool_call_start|>")), re.compile(re.escape("<|tool_call_end|>"))


def _gemma(text: str, _schemas: Schemas) -> Found:
    """``call:name{key:<escape>text<escape>,other:1}``: bare keys, and texts between marks."""
    for opened, body, end in _between(*_GEMMA, text):
        parts = re.split(r"<escape>|<\|\"\|>", body + "}")
        bare = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
        written = [json.dumps(part) if number % 2 else bare.sub(r'\1"\2":', part) for number, part in enumerate(parts)]
        yield opened.start(), end, opened[1], _json("".join(written))


_GEMMA = (
    re.compile(r"(?:<start_function_call>|<\|tool_call>)?call:([\w.-]+)(?=\{)"),
    re.compile(r"\}(?:<end_function_call>|<tool_call\|>|(?=\s*call:)|\s*$)"),
)

FORMS = (
    ToolForm(
        "Qwen3.5, Qwen3-Coder",
        "<function=",
        _tagged(
            r"<tool_call>\s*<function=([^>\n]{1,256})>",
            r"</function>\s*</tool_call>",
            r"<parameter=([^>\n]{1,256})>\n?",
            r"\n?</parameter>",
        ),
        ("<tool_call>",),
    ),
    ToolForm(
        "GLM-4.5 and later",
        "<arg_key>",
        _tagged(
            r"<tool_call>\s*([\w.-]+)",
            r"</tool_call>",
            r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>",
            r"</arg_value>",
        ),
        ("<tool_call>",),
    ),
    ToolForm(
        "MiniMax-M2",
        "<invoke name=",
        _tagged(
            r"(?:<minimax:tool_call>\s*)?<invoke name=\"([^\"]{1,256})\">",
            r"</invoke>(?:\s*</minimax:tool_call>)?",
            r"<parameter name=\"([^\"]{1,256})\">\n?",
            r"\n?</parameter>",
        ),
        ("<minimax:tool_call>", "<invoke name="),
    ),
    ToolForm(
        "MiniMax-M1",
        "<tool_calls>",
        _objects(r"(?:<tool_calls>\s*|^)", r"(?:\s*</tool_calls>|(?=\n))"),
        ("<tool_calls>",),
    ),
    ToolForm(
        "Hermes, Qwen2.5, Qwen3",
        "<tool_call>",
        _objects(r"<tool_call>\s*", r"\s*</tool_call>"),
        ("<tool_call>",),
    ),
    ToolForm(
        "DeepSeek-V3, R1, V3.1",
        "<｜tool▁call▁begin｜>",
        _named(
            r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\s*```json\s*)",
            r"\s*(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?\s*",
        ),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ),
    ToolForm(
        "gpt-oss",
        "<|channel|>",
        _named(
            r"(?:<\|start\|>assistant)?(?:(?:<\|channel\|>)?commentary)?\s{0,3}to=functions\.([\w.-]+)\s*"
            r"(?:<\|channel\|>commentary\s*)?(?:<\|constrain\|>)?(?:json)?(?:<\|message\|>)?\s*",
            r"(?:<\|call\|>)?",
        ),
        ("<|start|>", "<|channel|>", "commentary to=", " to=functions."),
    ),
    ToolForm("Mistral", "[TOOL_CALLS]", _mistral, ("[TOOL_CALLS]",), "["),
    ToolForm("FunctionGemma", "<start_function_call>", _gemma, ("<start_function_call>", "call:")),
    ToolForm("Gemma 4", "<|tool_call>", _gemma, ("<|tool_call>", "call:")),
    ToolForm("LFM2", "<|tool_call_start|>", _marked_pythonic, ("<|tool_call_start|>",)),
    ToolForm("Llama 4", "[func_name1(", _pythonic, (), "["),
    ToolForm("Llama 3.1, 3.2, 3.3", "", _llama, (), "{"),
)
"""Every form; a template's is the first one that it teaches, and the last is that of all others."""


def _value(text: str, schema: Any) -> Any:
    """An argument written as text: that text where its schema says so, else JSON if it is some."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    value = _json(text)
    return text if value is None and text.strip() != "null" else value


def _name_and_arguments(call: Any) -> tuple[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "", None
    return call["name"], call.get("arguments", call.get("parameters", {}))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON object that begins at a place, and its end."""
    if not text.startswith("{", start):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value, end
