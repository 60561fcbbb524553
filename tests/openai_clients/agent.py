"""An agent of Pydantic AI, as its users write one: ``python agent.py BASE_URL MODEL``. Prints its output as JSON."""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather at a place."""

    place: Literal["Bern", "Oslo"]
    sky: Literal["clear", "cloudy"]


def main(base_url: str, name: str) -> None:
    """Run the agent once."""
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    agent = Agent(model, output_type=Weather, instructions="Tell the weather.")
    result = agent.run_sync("How is the weather in Oslo?", model_settings={"max_tokens": 200, "seed": 1})
    assert result.usage.output_tokens > 0
    print(result.output.model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
