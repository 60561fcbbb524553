"""Requests of real agents, recorded by ``make agents`` and shrunk, are answered as their parsers read answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents.real_agents import AGENTS, ROOT
from agents.recorder import BODIES
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model

RECORDED = [
    (path.stem, number, each)
    for path in sorted(BODIES.glob("*.json"))
    for number, each in enumerate(json.loads(path.read_text()))
]
ASIDE = "Two files"  # of scripted_policy.py
HERE, DOCS = Path(__file__).parent, ROOT / "docs" / "openai.md"
MARKS = ("<!-- agents: written by make agents -->\n", "<!-- end -->")
EVENT: Any = TypeAdapter(ResponseStreamEvent)
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bodies")
    model = tiny_model(folder / "model", context_length=32_768)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--losses", str(Path(__file__).with_name("scripted_policy.py"))]
    with HttpServer(model, folder / "state", free_port(), *flags, name="small") as server:
        yield server.url


@pytest.mark.long
@pytest.mark.parametrize(("name", "number", "each"), RECORDED, ids=[f"{name} {number}" for name, number, _ in RECORDED])
def test_an_agents_request_is_answered(url: str, name: str, number: int, each: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/v1/{each['path']}", json=each["body"] | {"temperature": 0}, timeout=120)
    assert answer.status_code == 200, answer.text
    ignored = {*answer.headers.get("gradwire-ignored", "").split(", ")}
    assert ignored >= {*each["ignored"].split(", ")} - {""}
    assert READERS[each["path"], bool(each["body"].get("stream"))](answer) == ASIDE


def _chat(answer: httpx.Response) -> str:
    return ChatCompletion.model_validate(answer.json()).choices[0].message.content or ""


def _chat_stream(answer: httpx.Response) -> str:
    *lines, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert last == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[-1].finish_reason == "stop"
    assert chunks[-1].usage is None or chunks[-1].usage.completion_tokens == len(ASIDE) + 1
    return "".join(choice.delta.content or "" for choice in choices)


def _response(answer: httpx.Response) -> str:
    return Response.model_validate(answer.json()).output_text


def _response_stream(answer: httpx.Response) -> str:
    events = [EVENT.validate_json(block.partition("\ndata: ")[2]) for block in answer.text.strip().split("\n\n")]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def _message(answer: httpx.Response) -> str:
    (block,) = answer.json()["content"]
    return str(block["text"])


def _message_stream(answer: httpx.Response) -> str:
    blocks = [block.split("\ndata: ") for block in answer.text.strip().split("\n\n")]
    events = [json.loads(data) for _, data in blocks]
    assert [head for head, _ in blocks] == [f"event: {event['type']}" for event in events]
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


READERS = {
    ("chat/completions", False): _chat,
    ("chat/completions", True): _chat_stream,
    ("responses", False): _response,
    ("responses", True): _response_stream,
    ("messages", False): _message,
    ("messages", True): _message_stream,
}
"""Of a path, and of whether the answer is a stream: what reads the text, and checks the answer's form."""


@pytest.mark.long
def test_the_base_url_answers_to_who_asks_whether_it_is_there(url: str) -> None:
    assert httpx.head(url).status_code == httpx.get(f"{url}/").status_code == 200


def test_the_documentation_names_the_agents() -> None:
    """``GRADWIRE_WRITE_DOCS=1 make agents`` writes the table."""
    pinned = json.loads((HERE / "package.json").read_text())["dependencies"]
    others = [*HERE.glob("requirements/*.txt"), ROOT / "tests" / "openai_clients" / "requirements" / "aider.txt"]
    for line in "\n".join(each.read_text() for each in others).split():
        package, _, release = line.partition("==")
        pinned[package.partition("[")[0]] = release
    table = "| agent | version | set | ignored |\n| --- | --- | --- | --- |\n"
    for name, agent in AGENTS.items():
        ignored = {each for of, _, body in RECORDED if of == name for each in body["ignored"].split(", ")} - {""}
        named = ", ".join(f"`{each}`" for each in sorted(ignored))
        table += f"| {agent.package} | {pinned[agent.package]} | {agent.pointed} | {named} |\n"
    before, rest = DOCS.read_text().split(MARKS[0])
    written, after = rest.split(MARKS[1], 1)
    if os.environ.get("GRADWIRE_WRITE_DOCS"):
        DOCS.write_text(before + MARKS[0] + table + MARKS[1] + after)
    else:
        assert written == table


def test_no_recorded_body_has_prose_or_identities() -> None:
    assert len({name for name, _, _ in RECORDED}) >= 10
    for path in BODIES.glob("*.json"):
        assert path.stat().st_size < 16_000


@pytest.mark.long
def test_more_tokens_than_fit_are_clipped(url: str) -> None:
    messages = [{"role": "user", "content": "a" * 20_000}]
    for path in ("messages", "chat/completions"):
        body: dict[str, Any] = {"model": "small", "max_tokens": 32_000, "messages": messages}
        answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
    body["messages"] = [{"role": "user", "content": "a" * 40_000}]
    full = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert full.status_code == 400 and full.json()["error"]["code"] == "context_length_exceeded"
