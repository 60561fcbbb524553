"""What an answer is made of, in the forms of each family, and that a stream says the same as the whole answer."""

from __future__ import annotations

from typing import Any

import pytest
from gradwire_server.doors.http.openai.reading import AnswerReader, Form, Read, whole

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
QWEN, DEEPSEEK = "</think> <tool_call>", "</think> <｜tool▁call▁begin｜>"
HARMONY = "<|start|> <|channel|> <|message|>"
HARMONY_SPECIALS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
CALL = '{"a": 1}'
CASES: list[tuple[str, Form, str, str, str, int]] = [
    ("Qwen3", Form(QWEN), "<think>\nSo.\nYes.\n</think>\n\nFour.\n", "So.\nYes.", "Four.\n", 0),
    ("Qwen3, thinking", Form(QWEN, begun=True), "So.\n</think>\n\nFour.", "So.", "Four.", 0),
    ("Qwen3, not thinking", Form(QWEN), "Four </think>, <think> is a tag.", "", "Four </think>, <think> is a tag.", 0),
    ("Qwen3, cut", Form(QWEN, begun=True), "So <b </th", "So <b </th", "", 0),
    (
        "Qwen3, call",
        Form(QWEN, TOOLS),
        f'<think>So.</think>\nWell.\n<tool_call>\n{{"name": "add", "arguments": {CALL}}}\n</tool_call>',
        "So.",
        "Well.",
        1,
    ),
    (
        "Qwen3, call within thoughts",
        Form(QWEN, TOOLS),
        '<think>I could <tool_call>{"name": "add", "arguments": {}}</tool_call></think>No.',
        'I could <tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "No.",
        0,
    ),
    (
        "DeepSeek",
        Form(DEEPSEEK, TOOLS, begun=True, specials=("<｜tool▁call▁begin｜>", "<｜User｜>")),
        f"So.\n</think>\n\nFour<｜User｜>.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{CALL}<｜tool▁call▁end｜>",
        "So.",
        "Four.",
        1,
    ),
    ("Magistral", Form("[THINK]", specials=("[THINK]", "[/THINK]")), "[THINK]So.[/THINK]Four.", "So.", "Four.", 0),
    ("Kimi", Form("◁think▷ ◁/think▷"), "◁think▷So.◁/think▷Four.", "So.", "Four.", 0),
    ("Gemma 4", Form("<|channel>"), "<|channel>thought\nSo.<channel|>Four.", "So.", "Four.", 0),
    (
        "gpt-oss",
        Form(HARMONY, specials=HARMONY_SPECIALS),
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Four. a < b",
        "So.",
        "Four. a < b",
        0,
    ),
    (
        "gpt-oss, call",
        Form(HARMONY, TOOLS, specials=HARMONY_SPECIALS),
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{CALL}",
        "So.",
        "Well.",
        1,
    ),
    ("no reasoning", Form("<tool_call>"), "<think>So.</think>Four.", "", "<think>So.</think>Four.", 0),
    ("held to a form", Form(QWEN, reasons=False, begun=True), '{"a": 1}', "", '{"a": 1}', 0),
]


@pytest.mark.parametrize("case", CASES, ids=[name for name, *_ in CASES])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_reasoning_content_and_calls_are_told_apart(case: tuple[str, Form, str, str, str, int], size: int) -> None:
    _, form, text, reasoning, content, calls = case
    found = whole(text, form)
    assert (found.reasoning, found.content.rstrip("\n"), len(found.calls)) == (reasoning, content.rstrip("\n"), calls)
    reader = AnswerReader(form)
    parts = [reader.add(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(reader.end())
    assert _joined(parts) == (found.content, found.reasoning, len(found.calls))
    assert len([part for part in parts if part.content or part.reasoning]) > (2 if size == 1 else 0)


def _joined(parts: list[Read]) -> tuple[str, str, int]:
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), len(parts[-1].calls)
