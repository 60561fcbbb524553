"""Calls of tools as the models' own chat templates write them, from the collection of templates in TRL."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gradwire_server.doors.http.openai.tool_forms import form_of
from gradwire_server.doors.http.openai.tools import read_answer
from jinja2.sandbox import ImmutableSandboxedEnvironment

SEEN = {"a": 1, "b": 'x "y" {2}'}
PARAMETERS = {"a": {"type": "integer", "description": "One."}, "b": {"type": "string", "description": "Another."}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": PARAMETERS, "required": ["a", "b"]},
    },
}
NOT_READ = {"lfm2": "its template writes no calls", "muse_glimmer": "its form is not read"}
FAMILIES = {
    "Hermes, Qwen2.5, Qwen3", "Qwen3.5, Qwen3-Coder", "GLM-4.5 and later", "gpt-oss", "Gemma 4", "LFM2",
    "Llama 3.1, 3.2, 3.3",
}  # fmt: skip
END_OF_TURN = re.compile(r"<\|(im_end|eot_id|eot)\|>\s*$")


def templates() -> Mapping[str, str]:
    """The templates that write calls, by name."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return {}
    files = sorted(Path(next(iter(spec.submodule_search_locations)), "chat_templates").glob("*.jinja"))
    texts = {file.stem: file.read_text() for file in files if not file.stem.endswith("_training")}
    return {name: text for name, text in texts.items() if "tools" in text and "tool_calls" in text}


TEMPLATES = templates()


def rendered(template: str, messages: list[dict[str, Any]], *, prompt: bool) -> str:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "2026-01-01"}
    text = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    variables = {"tools": [TOOL], "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt}
    return environment.from_string(text).render(messages=messages, **variables)


@pytest.mark.skipif(not TEMPLATES, reason="needs TRL: make parity")
def test_the_families_have_templates() -> None:
    assert {form_of(text).family for name, text in TEMPLATES.items() if name not in NOT_READ} >= FAMILIES


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_read_as_the_template_writes_it(name: str) -> None:
    if name in NOT_READ:
        pytest.skip(NOT_READ[name])
    template = TEMPLATES[name]
    asked = [{"role": "user", "content": "Add."}]
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": SEEN}}
    whole = rendered(template, [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], prompt=False)
    prompt = rendered(template, asked, prompt=True)
    same = next((at for at, (one, other) in enumerate(zip(whole, prompt)) if one != other), len(prompt))
    _, calls = read_answer(END_OF_TURN.sub("", whole[same:]), template, [TOOL])
    assert [json.loads(each["function"]["arguments"]) for each in calls] == [SEEN], whole[same:]
