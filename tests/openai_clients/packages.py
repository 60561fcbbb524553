"""Packages that speak to language models, each as its users call it: ``python packages.py NAME ADDRESS MODEL``.

Each answers ``the cat`` within eight tokens, greedily, so that all of them must say the same; prints it as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Literal

from pydantic import BaseModel

ASKED = "the cat"
MESSAGES = [{"role": "user", "content": ASKED}]


class Weather(BaseModel):
    """The weather at a place."""

    place: Literal["Bern", "Oslo"]


def with_anthropic(address: str, model: str) -> str:
    """Messages, whole and streamed, a tool, a count and a mistake."""
    import anthropic

    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    asked = {"model": model, "max_tokens": 8, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage == whole.usage
    assert client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens == whole.usage.input_tokens
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
    return whole.content[0].text


def with_instructor(address: str, model: str) -> str:
    """An object, by a tool and by a schema; then a text."""
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        held = instructor.from_openai(client, mode=mode)
        told = held.chat.completions.create(model=model, messages=MESSAGES, response_model=Weather, max_tokens=200)
        assert told.place in ("Bern", "Oslo")
    return (
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
        .choices[0]
        .message.content
        or ""
    )


def with_llm(address: str, model: str) -> str:
    """The command-line tool's library, with a model of its configuration."""
    os.environ["LLM_USER_PATH"] = folder = tempfile.mkdtemp()
    with open(f"{folder}/extra-openai-models.yaml", "w") as file:
        json.dump([{"model_id": "here", "model_name": model, "api_base": f"{address}/v1"}], file)
    import llm

    return llm.get_model("here").prompt(ASKED, key="none", stream=True, max_tokens=8, temperature=0).text()


if __name__ == "__main__":
    name, *where = sys.argv[1:]
    print(json.dumps(globals()[f"with_{name}"](*where)))
