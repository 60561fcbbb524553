"""Packages that speak to language models, each as its users call it: ``python packages.py NAME ADDRESS MODEL``.

Each answers ``the cat`` within eight tokens, greedily, so that all of them must say the same; prints it as JSON.
The first line of a function's docstring is what the table of ``docs/openai.md`` says was tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

ASKED = "the cat"
MESSAGES: list[Any] = [{"role": "user", "content": ASKED}]


class Weather(BaseModel, extra="forbid"):
    """The weather at a place."""

    place: Literal["Bern", "Oslo"]


def with_openai(address: str, model: str) -> str:
    """chat, streams, `parse`, responses that follow each other"""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    with client.chat.completions.stream(**asked) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == whole
    parsed = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Weather, max_tokens=200)
    assert parsed.choices[0].message.parsed is not None
    options: dict[str, Any] = {"model": model, "max_output_tokens": 16, "temperature": 0}
    first = client.responses.create(**options, input=ASKED)
    with client.responses.stream(**options, input=ASKED, previous_response_id=first.id) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    told = client.responses.parse(model=model, input=ASKED, text_format=Weather, max_output_tokens=200)
    assert told.output_parsed is not None
    return whole or ""


def with_anthropic(address: str, model: str) -> str:
    """messages, streams, tools, counts"""
    import anthropic

    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "max_tokens": 8, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    counts = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (whole, final)]
    assert counts == [client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens] * 2
    tool = {"name": "tell", "description": "Tells.", "input_schema": Weather.model_json_schema()}
    options = {**asked, "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "any"}}
    with client.messages.stream(**options) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    Weather.model_validate(called.content[0].input)
    try:
        client.messages.create(**asked | {"model": "none"})
    except anthropic.NotFoundError as error:
        assert "there is no model" in str(error)
    return str(whole.content[0].text)


def with_instructor(address: str, model: str) -> str:
    """objects by a tool and by a schema"""
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        held = instructor.from_openai(client, mode=mode)
        told = held.chat.completions.create(model=model, messages=MESSAGES, response_model=Weather, max_tokens=200)
        assert told.place in ("Bern", "Oslo")
    chat = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
    return chat.choices[0].message.content or ""


def with_llm(address: str, model: str) -> str:
    """a model of its `extra-openai-models.yaml`"""
    os.environ["LLM_USER_PATH"] = folder = tempfile.mkdtemp()
    with open(f"{folder}/extra-openai-models.yaml", "w") as file:
        json.dump([{"model_id": "here", "model_name": model, "api_base": f"{address}/v1"}], file)
    import llm

    return str(llm.get_model("here").prompt(ASKED, key="none", stream=True, max_tokens=8, temperature=0).text())


def with_litellm(address: str, model: str) -> str:
    """`completion`, streams, `responses`, `anthropic/` models, its error for a full context"""
    import litellm

    name, there = f"openai/{model}", {"api_base": f"{address}/v1", "api_key": "none"}
    asked: dict[str, Any] = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **there}
    whole = litellm.completion(**asked).choices[0].message.content
    chunks = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(chunks) == whole
    response = litellm.responses(model=name, input=ASKED, max_output_tokens=16, **there)
    assert response.output[0].content[0].text
    options = asked | {"model": f"anthropic/{model}", "api_base": address, "temperature": 0}
    assert litellm.completion(**options).choices[0].message.content == whole
    try:
        litellm.completion(**asked | {"messages": [{"role": "user", "content": ASKED * 9000}]})
    except litellm.ContextWindowExceededError:
        return str(whole)
    raise AssertionError("a prompt beyond the context was taken")


def with_langchain(address: str, model: str) -> str:
    """`invoke`, `stream`, bound tools, structured output, responses; and `ChatAnthropic`"""
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    there: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": "none", "model": model}
    chat = ChatOpenAI(**there, max_tokens=8, temperature=0)
    whole = chat.invoke(ASKED).content
    assert "".join(str(chunk.content) for chunk in chat.stream(ASKED)) == whole
    longer = ChatOpenAI(**there, max_tokens=200)
    for method in ("json_schema", "function_calling"):
        assert isinstance(longer.with_structured_output(Weather, method=method).invoke(ASKED), Weather)
    (call,) = longer.bind_tools([Weather], tool_choice="required").invoke(ASKED).tool_calls
    Weather.model_validate(call["args"])
    assert ChatOpenAI(**there, max_tokens=16, use_responses_api=True).invoke(ASKED).text
    there["base_url"] = address
    assert ChatAnthropic(**there, max_tokens=8, temperature=0).invoke(ASKED).content == whole
    return str(whole)


def with_dspy(address: str, model: str) -> str:
    """`Predict` and `ChainOfThought` with its adapter for JSON"""
    import dspy
    import litellm

    known = {"supports_response_schema": True, "litellm_provider": "openai", "mode": "chat"}
    litellm.register_model({f"openai/{model}": known, model: known})
    lm = dspy.LM(f"openai/{model}", api_base=f"{address}/v1", api_key="none", max_tokens=400, cache=False)
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    told = dspy.Predict("question -> place: Literal['Bern', 'Oslo']")(question=ASKED)
    assert told.place in ("Bern", "Oslo")
    signature = "question -> sure: bool"
    assert isinstance(dspy.ChainOfThought(signature)(question=ASKED, config={"seed": 3}).sure, bool)
    return str(lm(messages=MESSAGES, max_tokens=8, temperature=0)[0])


def with_outlines(address: str, model: str) -> str:
    """types by `from_openai`; choices, expressions and grammars by `from_vllm`"""
    import openai
    import outlines
    from outlines.types import CFG, Regex

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    Weather.model_validate_json(str(outlines.from_openai(client, model)(ASKED, Weather, max_tokens=200)))
    vllm = outlines.from_vllm(client, model)
    Weather.model_validate_json(str(vllm(ASKED, Weather, max_tokens=200)))
    assert vllm(ASKED, Literal["Bern", "Oslo"], max_tokens=20) in ("Bern", "Oslo")
    assert str(vllm(ASKED, Regex("[0-9]{3}"), max_tokens=20)).isdigit()
    assert str(vllm(ASKED, CFG('start: "a" | "b"'), max_tokens=20)) in ("a", "b")
    return str(vllm(ASKED, max_tokens=8, temperature=0))


def with_guidance(address: str, model: str) -> str:
    """`models.OpenAI` with `gen`, `json`; `VLLMModel` with `select`, `regex`"""
    import guidance
    from guidance.models.experimental import VLLMModel

    there: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": "none", "echo": False}
    told = guidance.models.OpenAI(model, **there)
    with guidance.user():
        told += ASKED
    with guidance.assistant():
        whole = told + guidance.gen("said", max_tokens=8, temperature=1e-6)  # it leaves a 0 out, which is 1 then
        held = told + guidance.json("weather", schema=Weather, max_tokens=200)
    Weather.model_validate_json(held["weather"])
    vllm = VLLMModel(model, **there)
    with guidance.user():
        vllm += ASKED
    with guidance.assistant():
        assert (vllm + guidance.select(["Bern", "Oslo"], name="place"))["place"] in ("Bern", "Oslo")
        assert (vllm + guidance.gen("digits", regex="[0-9]{3}", max_tokens=20))["digits"].isdigit()
    return str(whole["said"])


def with_inspect_ai(address: str, model: str) -> str:
    """a task with a tool, by the default of `openai/`, with responses, and by `anthropic/`"""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def weather() -> Any:
        async def execute(place: str) -> str:
            """Tell the weather.

            Args:
                place: Where.
            """
            return f"clear in {place}"

        return execute

    url = f"{address}/v1"
    models = [
        get_model(f"openai/{model}", base_url=url, api_key="none"),
        get_model(f"openai/{model}", base_url=url, api_key="none", responses_api=True),
        get_model(f"anthropic/{model}", base_url=address, api_key="none"),
    ]
    task = Task([Sample(input=ASKED, target="cat")], solver=[use_tools(weather()), generate()], scorer=includes())
    logs = eval(task, model=models, max_tokens=16, display="none", log_dir=tempfile.mkdtemp())
    assert [log.status for log in logs] == ["success"] * 3, logs[0].error
    chat = asyncio.run(models[0].generate(ASKED, config={"max_tokens": 8, "temperature": 0}))  # type: ignore[arg-type]
    return chat.completion


def with_pydantic_ai(address: str, model: str) -> str:
    """an agent with an output type, by chat, by responses, and by Anthropic's messages"""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(model, provider=provider), output_type=Weather, instructions="Tell the weather.")
        told = agent.run_sync(ASKED, model_settings={"max_tokens": 200, "seed": 1})
        assert told.output.place in ("Bern", "Oslo") and told.usage.output_tokens > 0
    plain = Agent(OpenAIChatModel(model, provider=provider))
    return plain.run_sync(ASKED, model_settings={"max_tokens": 8, "temperature": 0}).output


DISTRIBUTIONS = {"langchain": "langchain-openai", "inspect_ai": "inspect-ai", "pydantic_ai": "pydantic-ai-slim"}

if __name__ == "__main__":
    name, *where = sys.argv[1:]
    said = globals()[f"with_{name}"](*where)
    print(json.dumps({"said": said, "version": version(DISTRIBUTIONS.get(name, name))}))
