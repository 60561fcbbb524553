"""Responses, messages and tokenizers, by the `openai` package as it is and by the events that Anthropic publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire.sync
import httpx
import jsonschema
import openai
import pytest
from support.saying_model import saying_model
from support.server import free_port
from support.tinker import HttpServer

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS}
ANSWER = "<think>cat</think>the mat"
HELLO = [{"role": "user", "content": "hello cat"}]


@pytest.fixture(scope="module")
def thinking(openai_server: HttpServer, client: openai.OpenAI) -> Iterator[str]:
    """A run that has learned to answer ``hello cat`` with :data:`ANSWER`."""
    with gradwire.sync.connect(openai_server.address, connect_timeout=120) as service:
        run = service.create_run("tiny", lora=16, seed=1)
        asked = {"model": "tiny", "messages": HELLO}
        prompt = httpx.post(f"{openai_server.url}/tokenize", json=asked).json()["tokens"]
        answer = {"model": "tiny", "prompt": ANSWER, "add_special_tokens": False}
        ids = [*httpx.post(f"{openai_server.url}/tokenize", json=answer).json()["tokens"], 2]
        mask = [0] * len(prompt) + [1] * len(ids)
        for _ in range(60):
            run.forward_backward({"input_ids": [prompt + ids], "loss_mask": [mask]}, "causal_lm")
            last = run.optim_step(learning_rate=0.02)
        last.result()
        yield run.run_id
        service.delete_run(run.run_id)


def test_a_response_is_what_its_stream_makes(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "input": "hello cat",
        "instructions": "Be brief.",
        "max_output_tokens": 12,
        "extra_body": {"seed": 2},
    }
    whole = client.responses.create(**options, include=["message.output_text.logprobs"])
    (message,) = whole.output
    assert whole.status == "incomplete" and whole.incomplete_details and whole.usage and message.type == "message"
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == 12
    (part,) = message.content
    assert part.type == "output_text" and part.text == whole.output_text and part.logprobs
    events: list[Any] = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final, kinds = events[-1].response, [event.type for event in events]
    assert final.output_text == whole.output_text and final.usage and whole.usage
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}  # of one token or of several, as the front comes to it


def test_a_response_goes_on_from_one_that_is_kept(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_output_tokens": 8, "extra_body": {"seed": 3}}
    first = client.responses.create(**options, input="the cat")
    assert client.responses.retrieve(first.id) == first
    told = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": " a mat"}]},
    ]
    second = client.responses.create(**options, input=told[2:], previous_response_id=first.id)
    whole = client.responses.create(**options, input=told, store=False)
    assert second.output_text == whole.output_text and second.usage and whole.usage
    assert second.usage.total_tokens == whole.usage.total_tokens
    referred = [told[0], {"type": "item_reference", "id": first.output[0].id}, told[2]]
    assert client.responses.create(**options, input=referred).output_text == whole.output_text
    listed = client.responses.input_items.list(second.id).data
    assert [item.role for item in listed] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for gone in (first.id, whole.id):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.create(**options, input="more", previous_response_id=gone)


def test_a_response_calls_tools_and_follows_a_schema(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "tools": [ADD], "extra_body": {"seed": 3}}
    forced: Any = {"type": "function", "name": "add"}
    with client.responses.stream(**options, input="hello cat", tool_choice=forced) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    (call,) = response.output
    assert kinds[2:-1] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert call.type == "function_call" and call.name == "add" and response.status == "completed"
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    given: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    answered = client.responses.create(**options, input=given, previous_response_id=response.id, max_output_tokens=4)
    assert answered.usage is not None and response.usage is not None
    assert answered.usage.input_tokens > response.usage.input_tokens
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": PARAMETERS}}
    held = client.responses.create(model="tiny", input="hello", text=form)
    jsonschema.validate(json.loads(held.output_text), PARAMETERS)


def test_reasoning_has_a_place_of_its_own_at_every_door(
    client: openai.OpenAI, openai_server: HttpServer, thinking: str
) -> None:
    options: dict[str, Any] = {"model": thinking, "temperature": 0}
    chat = client.chat.completions.create(**options, messages=HELLO).choices[0]  # type: ignore[arg-type]
    assert (chat.message.reasoning_content, chat.message.content) == ("cat", "the mat")  # type: ignore[attr-defined]
    thought = text = ""
    for chunk in client.chat.completions.create(**options, messages=HELLO, stream=True):  # type: ignore[arg-type]
        delta = chunk.choices[0].delta.model_dump()
        thought, text = thought + (delta.get("reasoning_content") or ""), text + (delta["content"] or "")
    assert (thought, text) == ("cat", "the mat")
    response = client.responses.create(**options, input=HELLO)  # type: ignore[arg-type]
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == "cat"
    assert message.type == "message" and response.output_text == "the mat"
    assert response.usage is not None and 0 < response.usage.output_tokens_details.reasoning_tokens < 12
    body = {**options, "messages": HELLO, "max_tokens": 40}
    blocks = httpx.post(f"{openai_server.url}/v1/messages", json=body).json()["content"]
    assert blocks == [
        {"type": "thinking", "thinking": "cat", "signature": ""},
        {"type": "text", "text": "the mat"},
    ]


def _prompt_tokens(usage: dict[str, int]) -> int:
    """Anthropic counts known tokens apart."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def test_messages_are_anthropics(openai_server: HttpServer, thinking: str) -> None:
    url = f"{openai_server.url}/v1/messages"
    body: dict[str, Any] = {"model": thinking, "messages": HELLO, "max_tokens": 40, "temperature": 0}
    whole = httpx.post(url, json=body).json()
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "end_turn")
    counted = httpx.post(f"{url}/count_tokens", json={"model": thinking, "messages": HELLO}).json()
    assert counted == {"input_tokens": _prompt_tokens(whole["usage"])}
    events = _events(httpx.post(url, json=body | {"stream": True}))
    kinds = [name for name, _ in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert all(name == event["type"] for name, event in events)
    assert [event["index"] for name, event in events if name == "content_block_start"] == [0, 1]
    texts = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in texts) == "cat"
    assert "".join(delta.get("text", "") for delta in texts) == "the mat"
    assert (
        events[-2][1]["delta"]["stop_reason"] == "end_turn"
        and _prompt_tokens(events[-2][1]["usage"]) == counted["input_tokens"]
    )
    stopped = httpx.post(url, json=body | {"stop_sequences": ["zz", " mat"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " mat")
    assert stopped["content"][-1]["text"] == "the"
    prefilled = [*HELLO, {"role": "assistant", "content": "<think>cat</think>the"}]
    more = httpx.post(url, json=body | {"messages": prefilled}).json()
    assert more["content"] == [{"type": "text", "text": " mat"}] and more["usage"]["output_tokens"] < 8


def test_messages_have_tools_and_refusals(openai_server: HttpServer) -> None:
    url = f"{openai_server.url}/v1/messages"
    tools = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    body: dict[str, Any] = {"model": "tiny", "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 100}
    body |= {"messages": HELLO, "tools": tools, "tool_choice": {"type": "any"}}
    called = httpx.post(url, json=body).json()
    (use,) = called["content"]
    assert called["stop_reason"] == "tool_use" and use["type"] == "tool_use" and use["name"] == "add"
    jsonschema.validate(use["input"], PARAMETERS)
    parts = [
        event["delta"] for name, event in _events(httpx.post(url, json=body | {"stream": True})) if "block_d" in name
    ]
    jsonschema.validate(json.loads("".join(part["partial_json"] for part in parts)), PARAMETERS)
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "3"}]}
    told = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answered = httpx.post(url, json=body | {"messages": told, "tool_choice": {"type": "auto"}, "max_tokens": 3}).json()
    assert _prompt_tokens(answered["usage"]) > _prompt_tokens(called["usage"])
    for wrong, kind, words in (
        ({"model": "none"}, "not_found_error", "there is no model"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        ({"wrong": 1}, "invalid_request_error", "not a parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "invalid_request_error", "'sound'"),
        ({"messages": [{"role": "user", "content": "cat " * 2000}]}, "invalid_request_error", "context"),
        ({"tools": [{"type": "computer_20251124", "name": "computer"}]}, "invalid_request_error", "client calls"),
    ):
        for stream in (False, True):
            refused = httpx.post(url, json=body | wrong | {"stream": stream})
            error = refused.json()
            assert 400 <= refused.status_code < 500 and error["type"] == "error", refused.text
            assert error["error"]["type"] == kind and words in error["error"]["message"]


def test_tokenizers_are_vllms(openai_server: HttpServer, client: openai.OpenAI) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{openai_server.url}{path}", json={"model": "tiny", **body}).json()

    found = post("/tokenize", prompt="the café", return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 1024
    assert found["tokens"][0] == 1 and found["token_strs"][0] == "<s>"
    assert post("/detokenize", tokens=found["tokens"])["prompt"] == "<s>the café"
    assert post("/tokenize", prompt="the café", add_special_tokens=False)["tokens"] == found["tokens"][1:]
    chat = post("/tokenize", messages=HELLO)
    asked: Any = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)  # type: ignore[arg-type]
    assert chat["count"] == asked.usage.prompt_tokens
    assert "give a prompt" in post("/tokenize")["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        client.embeddings.create(model="tiny", input="a")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"type": "computer_call"}]}, "input", "computer_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "input_file"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input", "no item"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "no response"),
    ({"tools": [{"type": "web_search"}]}, "tools", "web_search is not served here; it is the only tool"),
    ({"tools": [{"type": "mcp", "server_label": "a"}, ADD]}, "tools", "connect to the server in the client"),
    ({"tools": [{"type": "web_search"}, ADD], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    ({"tools": [ADD, {"type": "custom", "name": "add"}]}, "tools", "two tools have the name"),
    ({"background": True}, "background", "as a stream"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"client_meta": {}}, "client_meta", "not a parameter"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}}, "text", "Invalid type"),
    ({"input": "cat " * 2000}, "input", "context"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{param} {words}" for _, param, words in BAD])
def test_mistakes_in_responses_are_explained(
    openai_server: HttpServer, body: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        whole = {"model": "tiny", "input": "a", "stream": stream} | body
        answer = httpx.post(f"{openai_server.url}/v1/responses", json=whole)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404) and words in error["message"] and error["param"] == param


def _events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream and their names."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.slow
def test_a_template_for_tools_beside_the_default_one_is_used(tmp_path: Path) -> None:
    call, stop = "<start_function_call>call:add{a:1}<end_function_call>", "<start_function_response>"
    model = saying_model(tmp_path / "model", {"\n": [call], call: [stop], stop: ["made up"]})
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ '\\n' }}")
    (model / "additional_chat_templates").mkdir()
    with_tools = (
        "{{ tools | tojson }}<start_function_call>{% for m in messages %}{{ m.content }}{% endfor %}{{ '\\n' }}"
    )
    (model / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    server = HttpServer(model, tmp_path / "state", free_port())
    server.start()
    try:
        asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 9, "temperature": 0}
        url = f"{server.url}/v1/chat/completions"
        plain = httpx.post(url, json=asked, timeout=300).json()
        tooled = httpx.post(url, json=asked | {"tools": [{"type": "function", "function": ADD}]}, timeout=300).json()
        assert tooled["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 10
        assert plain["choices"][0]["finish_reason"] == "length" and tooled["usage"]["completion_tokens"] == 2
        message = tooled["choices"][0]["message"]  # nothing that the model would have said of the tool's answer
        assert [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]] == [{"a": 1}], message
        assert message["content"] is None and tooled["choices"][0]["finish_reason"] == "tool_calls"
    finally:
        server.end()
