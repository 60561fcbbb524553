"""Chat templates as they come with a model: where they are found, and what they may not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gradwire_proto.chat import TemplateError
from gradwire_server.tokenizing.chat_template import ChatTemplate

USER = [{"role": "user", "content": "{{ 7 * 7 }}"}]


def template(folder: Path, source: str, **config: object) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    return ChatTemplate(folder)


def test_a_conversation_is_data(tmp_path: Path) -> None:
    found = template(tmp_path, "{{ bos_token }}{{ messages[0].content }}", bos_token={"content": "<s>"})
    assert found.write("default", USER, {}) == ("<s>{{ 7 * 7 }}", [])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ range(10 ** 9) | list }}",
        "{% include '/etc/passwd' %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_a_template_reaches_nothing(tmp_path: Path, source: str) -> None:
    found = template(tmp_path, source)
    try:
        text, _ = found.write("default", USER, {})
    except TemplateError:
        return
    assert text.strip() == "", text


def test_where_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = ChatTemplate(tmp_path)
    assert (found.choose(None, None), found.choose(None, [{}])) == ("default", "tool_use")
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("d")
    found = ChatTemplate(tmp_path)
    assert found.write("default", USER, {})[0] == "c"
    assert found.write(found.choose("short", None), USER, {})[0] == "d"
    with pytest.raises(TemplateError, match="no chat template 'long'; it has default, tool_use, short"):
        found.choose("long", None)


def test_reasoning_is_found_under_either_name(tmp_path: Path) -> None:
    found = template(tmp_path, "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}")
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert found.write("default", [{"role": "assistant", name: "so"}], {})[0] == "soso"


DEEPSEEKS = """{% for message in messages %}{% if message['content'] is none %}{% for tool in message['tool_calls'] -%}
{{ tool['function']['name'] + '\n' + tool['function']['arguments'] + ';' }}{% endfor %}{% else -%}
{{ message['content'] + ';' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": None}], ids=str)
@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'], ids=str)
def test_calls_are_written_by_a_template_that_wants_no_content_and_texts(
    tmp_path: Path, content: dict[str, object], arguments: object
) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}], **content}
    found = template(tmp_path, DEEPSEEKS)
    assert found.write("default", [called, {"role": "assistant", "content": ""}], {})[0] == 'add\n{"a": "é"};;'


def test_tools_are_in_the_message_where_a_template_reads_them_there(tmp_path: Path) -> None:
    turn = "{{ '<|' + message.role + '|>' + message.content }}{% if message.tools %}{{ '<|tool|>' + message['tools'] "
    found = template(
        tmp_path, "{% for message in messages %}" + turn + "+ '<|/tool|>' }}{% endif %}<|end|>{% endfor %}"
    )
    add = {"name": "add", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": add}]
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    conversation = [{"role": "user", "content": "Hi"}, called, {"role": "tool", "content": "2"}]
    turns = '<|user|>Hi<|end|><|assistant|><|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|><|end|>'
    shown = f"<|tool|>{json.dumps([add])}<|/tool|><|end|>{turns}<|tool|>2<|end|>"
    told = {"role": "system", "content": "Be kind."}
    assert found.write("default", conversation, {"tools": tools})[0] == "<|system|>" + shown
    assert found.write("default", [told, *conversation], {"tools": tools})[0] == "<|system|>Be kind." + shown
    assert found.write("default", conversation[:1], {"tools": None})[0] == "<|user|>Hi<|end|>"


def test_a_tool_may_lack_the_description_that_a_template_adds_to_texts(tmp_path: Path) -> None:
    found = template(
        tmp_path, "{% for tool in tools %}{{ '// ' + tool.function.description + tool.function.name }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert found.write("default", USER, {"tools": tools})[0] == "// look"
    with pytest.raises(TemplateError, match="name"):
        found.write("default", USER, {"tools": [{"type": "function", "function": {"description": "d"}}]})


def test_a_word_before_a_call_is_a_thought_where_a_template_takes_one_of_both(tmp_path: Path) -> None:
    source = (
        "{% for message in messages %}{% if message.content and message.thinking %}{{ raise_exception('both') }}"
        "{% endif %}[{{ message.thinking }}|{{ message.content }}]{% endfor %}"
    )
    found = template(tmp_path, source)
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    said = {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": [call]}
    assert found.write("default", [said], {})[0] == "[hm\n\nI look.|]"
    with pytest.raises(TemplateError, match="both"):
        found.write("default", [{**said, "tool_calls": None}], {})
