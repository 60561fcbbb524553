"""Agents of PyPI as their users write them: ``programs.py NAME URL KEY TASK``, in an environment that has the package.

Each reads ``a.txt`` and writes ``b.txt`` with tools of its own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

MODEL = "small"


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Its name.
    """
    return Path(path).read_text()


def write_file(path: str, content: str) -> str:
    """Write a file.

    Args:
        path: Its name.
        content: Its text.
    """
    Path(path).write_text(content)
    return "written"


def openai_agents(url: str, key: str, task: str) -> str:
    import openai
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(MODEL, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key))
    tools: list[Any] = [function_tool(read_file), function_tool(write_file)]
    agent = Agent(name="worker", instructions="Work with the files.", model=model, tools=tools)

    async def run() -> str:
        streamed = Runner.run_streamed(agent, task)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    return asyncio.run(run())


def langgraph(url: str, key: str, task: str) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=MODEL)  # type: ignore[arg-type]
    graph = create_react_agent(model, [read_file, write_file])
    return str(graph.invoke({"messages": [("user", task)]})["messages"][-1].content)


def pydantic_ai(url: str, key: str, task: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    return str(Agent(model, tools=[read_file, write_file]).run_sync(task).output)


def smolagents(url: str, key: str, task: str) -> str:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    model = OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key=key)
    agent = CodeAgent(tools=[tool(_described(read_file)), tool(_described(write_file))], model=model, max_steps=4)
    return str(agent.run(task))


def _described(function: Any) -> Any:
    function.__doc__ += "\n    Returns:\n        What is said of it.\n    "
    return function


def crewai(url: str, key: str, task: str) -> str:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    llm = LLM(model=f"openai/{MODEL}", base_url=f"{url}/v1", api_key=key)
    tools = [tool(read_file), tool(write_file)]
    agent = Agent(role="Clerk", goal="Keep the files", backstory="A clerk.", llm=llm, tools=tools)
    done = Crew(agents=[agent], tasks=[Task(description=task, expected_output="a sentence", agent=agent)]).kickoff()
    return str(done)


def mini_swe_agent(url: str, key: str, task: str) -> str:
    import yaml
    from minisweagent import package_dir
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    settings = yaml.safe_load((Path(package_dir) / "config" / "default.yaml").read_text())
    told = settings.get("model", {})
    told["model_kwargs"] = {**told.get("model_kwargs", {}), "api_base": f"{url}/v1", "api_key": key}
    model = LitellmModel(**told | {"model_name": f"openai/{MODEL}", "cost_tracking": "ignore_errors"})
    agent = DefaultAgent(model, LocalEnvironment(**settings.get("environment", {})), **settings["agent"])
    return str(agent.run(task))


if __name__ == "__main__":
    print(globals()[sys.argv[1]](*sys.argv[2:]))
