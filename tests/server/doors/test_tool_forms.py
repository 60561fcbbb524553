"""Calls of tools as the models' families write them, whole, in a stream, and cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gradwire_server.doors.http.openai.tool_forms import FORMS, MOST_CALLS, ToolForm, form_of
from gradwire_server.doors.http.openai.tools import certain_content, read_answer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [{"function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "look_up")]
SEEN = {"a": 1, "b": 'x "y"\n{2}'}
JSON = json.dumps(SEEN)


WRITTEN: list[tuple[str, str, str, str]] = [
    (
        "Qwen3.5, Qwen3-Coder",
        "For each call: <tool_call>\n<function=example_function_name>\n<parameter=example>",
        f"<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n{SEEN['b']}\n</parameter>\n"
        "</function>\n</tool_call>",
        "So.\n",
    ),
    (
        "GLM-4.5 and later",
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
        f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>{SEEN['b']}"
        "</arg_value>\n</tool_call>",
        "So.\n",
    ),
    (
        "MiniMax-M2",
        '<minimax:tool_call>\n<invoke name="tool-name-1">',
        f'<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">{SEEN["b"]}'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "So.\n",
    ),
    ("MiniMax-M1", "<tool_calls>\n{}", f'<tool_calls>\n{{"name": "add", "arguments": {JSON}}}\n</tool_calls>', "So.\n"),
    (
        "Hermes, Qwen2.5, Qwen3",
        '<tool_call>\n{"name": <function-name>',
        f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>',
        "So.\n",
    ),
    (
        "DeepSeek-V3, R1, V3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "So.\n",
    ),
    (
        "DeepSeek-V3, R1, V3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        "So.\n",
    ),
    (
        "gpt-oss",
        "<|start|>assistant<|channel|>",
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{JSON}<|call|>",
        "So.",
    ),
    (
        "gpt-oss",
        "<|start|>assistant<|channel|>",
        f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{JSON}<|call|>",
        "So.",
    ),
    ("gpt-oss", "<|channel|>", f" to=functions.add{JSON}", ""),  # behind the prompt's <|start|>assistant
    ("LFM2", "<|tool_call_start|>", f"<|tool_call_start|>[add(a=1, b={SEEN['b']!r})]<|tool_call_end|>", "So. "),
    ("gpt-oss", "<|channel|>", f"commentary to=functions.add json{JSON}", "So.\n"),
    ("Mistral", "[TOOL_CALLS]", f'[TOOL_CALLS] [{{"name": "add", "arguments": {JSON}, "id": "123456789"}}]', "So. "),
    ("Mistral", "[TOOL_CALLS]", f'[{{"name": "add", "arguments": {JSON}}}]', ""),
    ("Mistral", "[TOOL_CALLS]", f"[TOOL_CALLS]add[CALL_ID]12ab[ARGS]{JSON}", "So. "),
    ("Mistral", "[TOOL_CALLS]", f"add{JSON}", ""),
    (
        "FunctionGemma",
        "<start_function_call>",
        f"<start_function_call>call:add{{a:1,b:<escape>{SEEN['b']}<escape>}}<end_function_call>",
        "So. ",
    ),
    ("Gemma 4", "<|tool_call>", f'<|tool_call>call:add{{a:1,b:<|"|>{SEEN["b"]}<|"|>}}<tool_call|>', "So. "),
    ("Llama 4", "in the format of [func_name1(params_name1=params_value1)]", f"[add(a=1, b={SEEN['b']!r})]", ""),
    ("Llama 3.1, 3.2, 3.3", '{"name": function name, "parameters":', f'{{"name": "add", "parameters": {JSON}}}', ""),
]


def test_each_form_is_tested() -> None:
    assert {family for family, *_ in WRITTEN} == {form.family for form in FORMS}


@pytest.mark.parametrize(("family", "template", "call", "before"), WRITTEN)
def test_a_call_is_read_in_the_form_of_its_family(family: str, template: str, call: str, before: str) -> None:
    assert form_of(template).family == family
    content, calls = read_answer(before + call, template, TOOLS)
    assert [each["function"]["name"] for each in calls] == ["add"] and content == (before.rstrip() or None)
    assert json.loads(calls[0]["function"]["arguments"]) == SEEN
    other = call.replace("add", "sub")
    assert read_answer(before + other, template, TOOLS) == (before + other, [])
    sent = [certain_content((before + call)[:end], template, ["add"]) for end in range(len(before + call))]
    assert sent == sorted(sent, key=len) and all(before.startswith(part) for part in sent)
    cut = before + call[: call.index("x")]
    assert read_answer(cut, template, TOOLS) == (cut, [])


@pytest.mark.parametrize(
    ("template", "text", "names"),
    [
        ("[TOOL_CALLS]", 'add{"a": 1}look_up{}', ["add", "look_up"]),
        ("[TOOL_CALLS]", 'you add{"a": 1}', []),
        ("{", '{"name": "add", "parameters": {}}; {"name": "look_up", "parameters": {}}', ["add", "look_up"]),
        ("{", '{"name": "add", "parameters": {}} and', []),
        ("[func_name1(", "[add(a=1), look_up(b='c')]", ["add", "look_up"]),
        ("[func_name1(", "[add(1)]", []),
        ("[func_name1(", "[" * 10_000, []),
        ("<arg_key>", "<tool_call>add\n</tool_call><tool_call>look_up</tool_call>", ["add", "look_up"]),
    ],
)
def test_several_calls_and_what_is_none(template: str, text: str, names: list[str]) -> None:
    content, calls = read_answer(text, template, TOOLS)
    assert [each["function"]["name"] for each in calls] == names and content == (None if names else text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.family)
def test_what_is_no_call_is_read_in_one_pass(form: ToolForm) -> None:
    """The front reads answers: 20,000 characters of an unfinished call took it 10 s."""
    parts = [*form.begins, "<tool_call><function=a>", "<tool_call>f<arg_key>", '<invoke name="f">', "{", "{}", '{"a":']
    parts += ["call:f{}", "}f{", "<tool_call>{} ", "[f(a=[", "commentary to=functions.f{", " ", "\n"]
    for part in parts:
        for before in ("", "<tool_call>", "<tool_call><function=f>", "{"):
            text = before + part * (50_000 // len(part))
            content, calls = read_answer(text, form.taught_by, TOOLS)
            assert len(calls) <= MOST_CALLS and (calls or content == text)
