"""What the doors ignore, flatten and refuse: the table against OpenAI's package, and through the doors."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import httpx
import openai
import pytest
from gradwire_server.doors.http.anthropic.requests import CountRequest, MessagesRequest
from gradwire_server.doors.http.openai.requests import ChatRequest, CompletionRequest
from gradwire_server.doors.http.openai.responses.compaction import SUMMARY, sealed, unsealed
from gradwire_server.doors.http.openai.responses.requests import ResponseRequest
from gradwire_server.doors.http.openai.unserved import FIELDS, TOOLS, DoorRequest, unserved_tool
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams
from openai.types.responses.tool_param import ToolParam
from support.tinker import HttpServer

HELLO: Any = [{"role": "user", "content": "hello cat"}]
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
ADD: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS}
NAMESPACE: Any = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [ADD]}
PATCH: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}


@pytest.mark.parametrize(
    ("request_type", "params"),
    [(ChatRequest, ChatParams), (CompletionRequest, CompletionParams), (ResponseRequest, ResponseParams)],
)
def test_every_field_of_openais_package_is_served_or_in_the_table(request_type: type[DoorRequest], params: Any) -> None:
    served, unserved = {*request_type.model_fields}, {name for name in FIELDS[request_type.door] if "." not in name}
    assert {*get_type_hints(params)} - served - unserved == set()
    assert not served & unserved


def test_every_tool_of_openais_package_is_a_function_or_in_the_table() -> None:
    kinds = {get_args(get_type_hints(each)["type"])[0] for each in get_args(ToolParam)}
    assert {"web_search", "namespace"} <= kinds
    assert {kind for kind in kinds if unserved_tool(kind)[0] not in TOOLS} == {"function", "custom", "namespace"}
    assert unserved_tool("web_search_20260209")[0] == "web_search" and unserved_tool("web_searching")[1].refusal


@pytest.mark.parametrize("request_type", [CountRequest, MessagesRequest])
def test_messages_declare_nothing_that_the_table_ignores(request_type: type[DoorRequest]) -> None:
    assert not {*request_type.model_fields} & {*FIELDS[request_type.door]}


IGNORED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": "a", "user": "me", "store": None, "use_beam_search": False}, "user"),
    (
        "chat/completions",
        {
            "messages": HELLO, "verbosity": "low", "prediction": {"type": "content", "content": "a"},
            "parallel_tool_calls": False, "modalities": ["text"], "reasoning_effort": "high",
        },
        "parallel_tool_calls, prediction, verbosity, reasoning_effort",
    ),
    (
        "responses",
        {
            "input": "a", "client_metadata": {"a": "b"}, "tools": [ADD, {"type": "web_search"}], "metadata": {"a": "b"},
            "parallel_tool_calls": True, "reasoning": {"effort": "high", "summary": "auto"}, "truncation": "auto",
            "include": ["reasoning.encrypted_content", "file_search_call.results"],
        },
        "client_metadata, reasoning.summary, truncation, include.file_search_call.results, tools.web_search,"
        " reasoning.effort",
    ),
    (
        "messages",
        {
            "messages": HELLO, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "mcp_servers": [],
            "context_management": {"edits": []}, "tools": [{"type": "web_search_20260209", "name": "web_search"},
            {"name": "add", "input_schema": PARAMETERS, "strict": True}],
        },
        "context_management, tools.web_search, thinking, output_config.effort",
    ),
    ("messages/count_tokens", {"messages": HELLO, "cache_control": {"type": "ephemeral"}}, "cache_control"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "names"), IGNORED, ids=[path for path, _, _ in IGNORED])
def test_what_is_ignored_is_named_in_a_header(
    openai_server: HttpServer, path: str, body: dict[str, Any], names: str
) -> None:
    limit = {"responses": "max_output_tokens", "messages/count_tokens": ""}.get(path, "max_tokens")
    for stream in (False, True) if limit else (None,):
        whole = {"model": "tiny", "stream": stream, limit: 2} | body if limit else {"model": "tiny"} | body
        answer = httpx.post(f"{openai_server.url}/v1/{path}", json=whole, timeout=300)
        assert answer.status_code == 200, answer.text
        assert sorted(answer.headers["gradwire-ignored"].split(", ")) == sorted(names.split(", "))
    refused = httpx.post(f"{openai_server.url}/v1/{path}", json={**body, "model": "none", limit or "tools": None})
    assert refused.status_code in (400, 404) and "gradwire-ignored" not in refused.headers


def test_tools_of_a_namespace_and_custom_tools_come_back_as_they_were_given(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "tools": [NAMESPACE, PATCH], "input": "hello cat"}
    choice: Any = {"type": "function", "name": "add", "namespace": "sums"}
    with client.responses.stream(**options, tool_choice=choice) as stream:
        (call,) = list(stream)[-1].response.output  # type: ignore[union-attr]
    assert call.type == "function_call" and (call.namespace, call.name) == ("sums", "add")
    assert json.loads(call.arguments)["a"] in (1, 2)
    chosen: Any = {"type": "custom", "name": "patch"}
    events = list(client.responses.create(**options, tool_choice=chosen, stream=True, max_output_tokens=700))
    (custom,) = events[-1].response.output  # type: ignore[union-attr]
    assert custom.type == "custom_tool_call" and custom.name == "patch"
    written = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert written == [custom.input]
    history = [
        {"role": "user", "content": "hello cat"},
        call.model_dump(exclude_none=True),
        custom.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": [{"type": "input_text", "text": "k"}]},
    ]
    more = client.responses.create(**options | {"input": history}, max_output_tokens=2)
    flat = [
        {"type": "function", "function": {"name": "sums__add", "description": "Adds.", "parameters": PARAMETERS}},
        {"type": "custom", "custom": {name: PATCH[name] for name in ("name", "format")}},
    ]
    turn = [
        {"id": call.call_id, "type": "function", "function": {"name": "sums__add", "arguments": call.arguments}},
        {"id": custom.call_id, "type": "custom", "custom": {"name": "patch", "input": custom.input}},
    ]
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": turn},
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
        {"role": "tool", "tool_call_id": custom.call_id, "content": "k"},
    ]
    told = client.chat.completions.create(model="tiny", messages=messages, tools=flat, max_tokens=2)  # type: ignore[arg-type]
    assert more.usage and told.usage and more.usage.input_tokens == told.usage.prompt_tokens


def test_the_older_functions_are_tools(client: openai.OpenAI) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
    options: dict[str, Any] = {"model": "tiny", "functions": [function], "function_call": {"name": "add"}, "seed": 1}
    choice = client.chat.completions.create(**options, messages=HELLO).choices[0]
    called: Any = choice.message.function_call
    assert choice.finish_reason == "function_call" and called.name == "add" and choice.message.tool_calls is None
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, messages=HELLO, stream=True)]
    assert chunks[-1].delta.function_call.arguments == called.arguments  # type: ignore[union-attr]
    turn = {"role": "assistant", "content": None, "function_call": called.model_dump()}
    messages: Any = [*HELLO, turn, {"role": "function", "name": "add", "content": "3"}]
    more = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert more.usage and more.usage.prompt_tokens > 20


def test_reasoning_comes_back_without_a_stored_response(client: openai.OpenAI) -> None:
    assert unsealed(sealed("the café")) == "the café" and unsealed("gAAAA") is unsealed(None) is None
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": sealed("the cat " * 9)}
    counts = []
    for before in ([], [reasoning], [reasoning | {"encrypted_content": "gAAAA"}]):
        told: Any = [*HELLO, *before, {"role": "assistant", "content": "the mat"}, *HELLO]
        response = client.responses.create(model="tiny", input=told, max_output_tokens=1, store=False)
        assert response.usage is not None
        counts.append(response.usage.input_tokens)
    assert counts[0] == counts[2] < counts[1] - 9


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the package: users' messages are no outputs
def test_a_conversation_is_counted_and_compacted(client: openai.OpenAI, openai_server: HttpServer) -> None:
    told: Any = [*HELLO, {"role": "assistant", "content": "the cat sat"}, {"role": "user", "content": "and"}]
    counted = client.responses.input_tokens.count(model="tiny", input=told, instructions="Be brief.", tools=[ADD])
    whole: Any = client.responses.create(model="tiny", input=told, instructions="Be brief.", tools=[ADD])
    assert counted.input_tokens == whole.usage.input_tokens
    compacted: Any = client.responses.compact(model="tiny", input=told, extra_body={"seed": 1})
    *asked, summary = compacted.output
    assert [item.content[0].text for item in asked] == ["hello cat", "and"]
    assert summary.type == "compaction" and compacted.usage.input_tokens > counted.input_tokens // 2
    text = unsealed(summary.encrypted_content)
    went_on: Any = client.responses.create(model="tiny", input=[*compacted.output, *HELLO], max_output_tokens=1)
    shown = [*HELLO, {"role": "user", "content": "and"}, {"role": "user", "content": SUMMARY + text}, *HELLO]
    same: Any = client.responses.create(model="tiny", input=shown, max_output_tokens=1)
    assert text and went_on.usage.input_tokens == same.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="a compaction of another server"):
        client.responses.create(model="tiny", input=[{"type": "compaction", "encrypted_content": "gAAAA"}])
    with pytest.raises(openai.BadRequestError, match="go on with previous_response_id"):
        client.conversations.create()
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert "POST to /v1/responses" in httpx.get(f"{openai_server.url}/v1/responses", headers=upgrade).text


def test_tools_that_anthropics_models_know_are_functions(openai_server: HttpServer) -> None:
    kinds = {"bash_20250124": "bash", "text_editor_20250728": "edit", "memory_20250818": "memory"}
    tools = [{"type": kind, "name": name} for kind, name in kinds.items()]
    counts = []
    for given in ([], tools):
        body = {"model": "tiny", "messages": HELLO, "tools": given}
        counts.append(httpx.post(f"{openai_server.url}/v1/messages/count_tokens", json=body).json()["input_tokens"])
    assert counts[1] > counts[0] + 100
    body = {"model": "tiny", "messages": HELLO, "tools": tools, "tool_choice": {"type": "tool", "name": "none"}}
    refused = httpx.post(f"{openai_server.url}/v1/messages", json=body | {"max_tokens": 1}).json()
    assert "the tools are bash, edit, memory" in refused["error"]["message"]
