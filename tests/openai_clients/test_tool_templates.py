"""Calls and reasoning as the families' own chat templates write them, and Mistral's as its own package encodes them.

The templates are files of packages that ``make openai`` installs: TRL, Axolotl and llama-cpp-python's source.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gradwire_server.doors.http.openai.images import ConversationImages
from gradwire_server.doors.http.openai.tool_forms import FORMS, form_of
from gradwire_server.doors.http.openai.tools import messages_for_template, read_answer
from gradwire_server.tokenizing.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-openai-templates"
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
CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": SEEN}}
ASKED = [{"role": "user", "content": "Add."}]
NOT_READ = {
    "command_a": "writes no calls",
    "falcon_h1": "writes no calls",
    "meetkai-functionary-medium-v3.2": "its form is not read",
    "llama-cpp-deepseek-r1": "is llama.cpp's own, and Jinja2 refuses it",
    "fireworks-ai-llama-3-firefunction-v2": "wants functions in place of tools",
    "Kimi-K2-Instruct": "appends to a list, which no sandbox of Jinja2's lets it",
    "Kimi-K2-Thinking": "appends to a list, which no sandbox of Jinja2's lets it",
}
NOT_WRITTEN = {"FunctionGemma", "Granite 3.0, 3.2 and 3.3", "Phi-4-mini"}
"""Forms of which no package has a template that writes calls."""
ENDS = re.compile(r"(\s|</s>|<\|(im_end|eot_id|eot|eom|END_OF_TURN_TOKEN|CHATBOT_TOKEN|START_OF_TURN_TOKEN)\|>)*$")


def templates() -> dict[str, str]:
    """The templates that write calls, by name."""
    found = {}
    for file in sorted(ENVIRONMENT.rglob("*.jinja")):
        if "tool_calls" in (text := file.read_text()) and not file.stem.endswith("_training"):
            found[file.stem] = text
    return found


TEMPLATES = templates()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="needs the environments of `make openai`"),
]


def answered(folder: Path, template: str, message: dict[str, Any]) -> str:
    """What the template writes of the assistant's message, behind the prompt."""
    (folder / "chat_template.jinja").write_text(template)
    written = ChatTemplate(folder)
    variables = {"tools": [TOOL], "bos_token": "<s>", "eos_token": "</s>"}
    prompt, _ = written.write("default", ASKED, variables | {"add_generation_prompt": True})
    messages = [*ASKED, {"role": "assistant", "content": "", **message}]
    text, _ = written.write("default", messages_for_template(messages, ConversationImages()), variables)
    same = next((at for at, (one, other) in enumerate(zip(text, prompt)) if one != other), min(len(prompt), len(text)))
    if (mark := re.search(r"<[|/\w]{0,20}$", text[:same])) is not None:
        same = mark.start()  # both went on with a mark that begins alike
    return ENDS.sub("", text[same:])


@pytest.mark.skipif(not TEMPLATES, reason="needs the environments of `make openai`")
def test_the_families_have_templates() -> None:
    told = {form_of(text).family for name, text in TEMPLATES.items() if name not in NOT_READ}
    assert told == {form.family for form in FORMS} - NOT_WRITTEN


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_read_as_the_template_writes_it(name: str, tmp_path: Path) -> None:
    if name in NOT_READ:
        pytest.skip(NOT_READ[name])
    template = TEMPLATES[name]
    answer = answered(tmp_path, template, {"tool_calls": [CALL]})
    _, calls = read_answer(answer, template, [TOOL])
    assert [json.loads(each["function"]["arguments"]) for each in calls] == [SEEN], answer


@pytest.mark.skipif(not TEMPLATES, reason="needs the environments of `make openai`")
def test_a_call_is_read_as_granites_template_asks_for_it() -> None:
    (file,) = ENVIRONMENT.rglob("ibm-granite-granite-3.3-2B-Instruct.jinja")
    template = file.read_text()  # it writes no calls
    assert "respond only with <|tool_call|> followed by a JSON list of tools" in template
    answer = f"<|tool_call|>[{json.dumps({'name': 'add', 'arguments': SEEN})}]"
    for text in (answer, answer.removesuffix("]") + ", " + answer.removeprefix("<|tool_call|>[")):
        content, calls = read_answer(text, template, [TOOL])
        assert content is None
        assert [json.loads(each["function"]["arguments"]) for each in calls] == [SEEN] * text.count('"name"')


@pytest.mark.skipif(not TEMPLATES, reason="needs the environments of `make openai`")
def test_a_call_is_read_as_mistral_common_encodes_it() -> None:
    asked = {"name": "add", "arguments": json.dumps(SEEN)}
    command = [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).parent / "mistral_calls.py"), json.dumps(asked)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert set(found) == {"v2", "v3", "v7", "v3 tekken", "v7 tekken", "v11 tekken", "v13 tekken"}
    for version, (with_specials, without) in found.items():
        texts = [with_specials.replace("▁", " ")]  # sentencepiece's spaces
        if "[CALL_ID]" not in with_specials:  # else the server keeps special tokens in the text
            texts.append(without)
        for text in texts:
            content, calls = read_answer(text, "[TOOL_CALLS]", [TOOL])
            assert [json.loads(each["function"]["arguments"]) for each in calls] == [SEEN], (version, text)
            assert content is None
