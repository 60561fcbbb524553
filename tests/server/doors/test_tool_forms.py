"""Calls of tools as the models' families write them, whole, in a stream, and cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gradwire_server.doors.http.openai.call_readers import MOST_CALLS
from gradwire_server.doors.http.openai.images import ConversationImages
from gradwire_server.doors.http.openai.tool_forms import FORMS, ToolForm, form_of
from gradwire_server.doors.http.openai.tools import certain_content, messages_for_template, read_answer

DOCS = Path(__file__).parents[3] / "docs" / "openai.md"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [{"function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "look_up")]
SEEN = {"a": 1, "b": 'x "y"\n{2}'}
JSON = json.dumps(SEEN)


WRITTEN: list[tuple[str, str, str]] = [
    (
        "For each call: <tool_call>\n<function=example_function_name>\n<parameter=example>",
        f"<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n{SEEN['b']}\n</parameter>\n"
        "</function>\n</tool_call>",
        "So.\n",
    ),
    ("<function=example>", f"<function=add>{JSON}</function>", "So.\n"),
    (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
        f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>{SEEN['b']}"
        "</arg_value>\n</tool_call>",
        "So.\n",
    ),
    (
        "<mm:think>",
        f'<tool_call>\n<invoke name="add"><a>1]<]minimax[>[</a><b>{SEEN["b"]}]<]minimax[>[</b></invoke>\n</tool_call>',
        "So.\n",
    ),
    (
        '<minimax:tool_call>\n<invoke name="tool-name-1">',
        f'<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">{SEEN["b"]}'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "So.\n",
    ),
    (
        "<｜DSML｜invoke name=",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
        f'</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">{SEEN["b"]}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "So.\n",
    ),
    (
        "<function name",
        f'<function name="add"><param name="a">1</param><param name="b">{SEEN["b"]}</param></function>',
        "",
    ),
    (
        "open_tag('call'",
        '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        f'<|close|>argument<|sep|><|open|>argument key="b" type="string"<|sep|>{SEEN["b"]}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        "So.\n",
    ),
    (
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "So.\n",
    ),
    ("<tool_calls>\n{}", f'<tool_calls>\n{{"name": "add", "arguments": {JSON}}}\n</tool_calls>', "So.\n"),
    ("<tool_calls>", f'<tool_calls>[{{"name": "add", "arguments": {JSON}}}]</tool_calls>', "So.\n"),
    (
        '<tool_call>\n{"name": <function-name>',
        f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>',
        "So.\n",
    ),
    ("<tool_call> followed by a JSON list", f'<tool_call> [{{"name": "add", "arguments": {JSON}}}]', "So.\n"),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "So.\n",
    ),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        "So.\n",
    ),
    (
        "<|start|>assistant<|channel|>",
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{JSON}<|call|>",
        "So.",
    ),
    (
        "<|start|>assistant<|channel|>",
        f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{JSON}<|call|>",
        "So.",
    ),
    ("<|channel|>", f" to=functions.add{JSON}", ""),  # behind the prompt's <|start|>assistant
    ("<|channel|>", f"commentary to=functions.add json{JSON}", "So.\n"),
    ("<|tool_call_start|>", f"<|tool_call_start|>[add(a=1, b={SEEN['b']!r})]<|tool_call_end|>", "So. "),
    ("[TOOL_CALLS]", f'[TOOL_CALLS] [{{"name": "add", "arguments": {JSON}, "id": "123456789"}}]', "So. "),
    ("[TOOL_CALLS]", f'[{{"name": "add", "arguments": {JSON}}}]', ""),
    ("[TOOL_CALLS]", f"[TOOL_CALLS]add[CALL_ID]12ab[ARGS]{JSON}", "So. "),
    ("[TOOL_CALLS]", f"add{JSON}", ""),
    (
        "<start_function_call>",
        f"<start_function_call>call:add{{a:1,b:<escape>{SEEN['b']}<escape>}}<end_function_call>",
        "So. ",
    ),
    ("<|tool_call>", f'<|tool_call>call:add{{a:1,b:<|"|>{SEEN["b"]}<|"|>}}<tool_call|>', "So. "),
    ("<|START_ACTION|>", f'<|START_ACTION|>[\n{{"tool_name": "add", "parameters": {JSON}}}\n]<|END_ACTION|>', "So. "),
    (
        "followed by a json-formatted list of actions",
        f'Action:\n```json\n[{{"tool_name": "add", "parameters": {JSON}}}]\n```',
        "So.\n",
    ),
    ("<|tool_call|>", f'<|tool_call|>[{{"name": "add", "arguments": {JSON}}}]', "So.\n"),
    ("<|/tool|>", f'<|tool_call|>[{{"name": "add", "arguments": {JSON}}}]<|/tool_call|>', "So.\n"),
    ("functools[{", f'functools[{{"name": "add", "arguments": {JSON}}}]', "So.\n"),
    ("<TOOLCALL>", f'<TOOLCALL>[{{"name": "add", "arguments": {JSON}}}]</TOOLCALL>', "So.\n"),
    ("<|tools_prefix|>", f'<|tools_prefix|>[{{"add": {JSON}}}]<|tools_suffix|>', "So.\n"),
    ("<|function_call|>", f'<|function_call|>{{"name": "add", "arguments": {JSON}}}', "So.\n"),
    (
        "<|tool_call:begin|>",
        f"<|tool_calls|><|tool_call:begin|>call_1<|tool_call:name|>add<|tool_call:args|>{JSON}<|tool_call:end|><|calls|>",
        "So.\n",
    ),
    ("in the format of [func_name1(params_name1=params_value1)]", f"[add(a=1, b={SEEN['b']!r})]", ""),
    ("<|python_start|>", f'<|python_start|>So.<|python_end|>{{"name": "add", "parameters": {JSON}}}', ""),
    ('{"name": function name, "parameters":', f'{{"name": "add", "parameters": {JSON}}}', ""),
]


def test_each_form_is_tested_and_documented() -> None:
    families = [form.family for form in FORMS]
    assert {form_of(template).family for template, *_ in WRITTEN} == set(families)
    page = " ".join(DOCS.read_text().split())
    assert [family for family in families if family not in page] == []


@pytest.mark.parametrize(("template", "call", "before"), WRITTEN)
def test_a_call_is_read_in_the_form_of_its_family(template: str, call: str, before: str) -> None:
    content, calls = read_answer(before + call, template, TOOLS)
    told = call[: call.index("{")] if call.startswith("<|python_start|>") else before
    assert [each["function"]["name"] for each in calls] == ["add"] and content == (told.rstrip() or None)
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


def test_earlier_calls_are_given_as_templates_read_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": JSON}}
    asked = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "content": None}]
    called, plain = messages_for_template(asked, ConversationImages())
    assert (called["content"], plain["content"]) == ("", "")
    assert called["tool_calls"][0]["function"]["arguments"] == SEEN


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.family)
def test_what_is_no_call_is_read_in_one_pass(form: ToolForm) -> None:
    """The front reads answers: 20,000 characters of an unfinished call took it 10 s."""
    parts = [*form.begins, "<tool_call><function=a>", "<tool_call>f<arg_key>", '<invoke name="f">', "{", "{}", '{"a":']
    parts += ["call:f{}", "}f{", "<tool_call>{} ", "[f(a=[", "commentary to=functions.f{", " ", "\n"]
    for part in parts:
        for before in ("", "<tool_call>", "<tool_call><function=f>", "{"):
            text = before + part * (50_000 // len(part))
            content, calls = read_answer(text, form.taught_by[0], TOOLS)
            assert len(calls) <= MOST_CALLS and (calls or content == text)
