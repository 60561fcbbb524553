"""The agents that are run against a server: how each is pointed at it, and what the scripted policy says to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NODE = ROOT / ".node-agents"
MODEL = "small"


@dataclass(frozen=True)
class Server:
    """Where an agent finds its model: the address of the doors, and a key of it."""

    url: str
    key: str = "none"


@dataclass(frozen=True)
class Agent:
    """One program.

    Attributes:
        package: Its name in its registry, whose version the documentation has.
        marks: Texts that only the prompts of its main conversation have, beside its name in brackets.
        steps: What the policy says in each turn; ``{folder}`` is where the task is.
        command: (folder, server) -> the command and its environment; writes the configuration that it needs.
        pointed: How a user points it at a server, for the documentation.
        program: The program whose presence says that ``make agents`` has installed it.
        one_sequence: Whether it sends its answers back as they were, so that its task is one sequence of tokens.
    """

    package: str
    marks: tuple[str, ...]
    steps: tuple[str, ...]
    command: Callable[[Path, Server, str], tuple[list[str], dict[str, str]]]
    pointed: str
    program: Path
    one_sequence: bool = True


def call(name: str, **arguments: Any) -> str:
    """A tool call as Qwen writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thought(text: str) -> str:
    """Reasoning as Qwen writes it."""
    return f"<think>\n{text}\n</think>\n\n"


DONE = "b.txt has twice the number of a.txt."


def _codex(folder: Path, server: Server, task: str) -> tuple[list[str], dict[str, str]]:
    settings = f'model = "{MODEL}"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\n'
    settings += f'base_url = "{server.url}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    (folder.parent / "config.toml").write_text(settings)
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(CODEX), "exec", *flags, task], {"CODEX_HOME": str(folder.parent), "OPENAI_API_KEY": server.key}


def _claude(folder: Path, server: Server, task: str) -> tuple[list[str], dict[str, str]]:
    env = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": server.key, "ANTHROPIC_MODEL": MODEL}
    env |= {"ANTHROPIC_SMALL_FAST_MODEL": MODEL, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return [str(CLAUDE), "-p", task, "--allowedTools", "Bash,Read,Write"], env


def _opencode(folder: Path, server: Server, task: str) -> tuple[list[str], dict[str, str]]:
    options = {"baseURL": f"{server.url}/v1", "apiKey": server.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {}}}
    settings = {"provider": {"here": provider}, "model": f"here/{MODEL}", "autoupdate": False, "share": "disabled"}
    (folder.parent / "opencode.json").write_text(json.dumps(settings))
    return [str(OPENCODE), "run", task], {"OPENCODE_CONFIG": str(folder.parent / "opencode.json")}


def _qwen(folder: Path, server: Server, task: str) -> tuple[list[str], dict[str, str]]:
    env = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key, "OPENAI_MODEL": MODEL}
    return [str(QWEN), "--auth-type", "openai", "--yolo", "-p", task], env


def _pi(folder: Path, server: Server, task: str) -> tuple[list[str], dict[str, str]]:
    provider = {"baseUrl": f"{server.url}/v1", "apiKey": server.key, "api": "openai-completions"}
    home = folder.parent / ".pi" / "agent"
    home.mkdir(parents=True, exist_ok=True)
    (home / "models.json").write_text(json.dumps({"providers": {"here": provider | {"models": [{"id": MODEL}]}}}))
    return [str(PI), "-p", "--provider", "here", "--model", MODEL, task], {}


def _aider(folder: Path, server: Server, task: str) -> tuple[list[str], dict[str, str]]:
    flags = ["--model", f"openai/{MODEL}", "--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings"]
    flags += ["--no-analytics", "--edit-format", "whole", "--message", task, "a.txt", "b.txt"]
    return [str(AIDER), *flags], {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": server.key}


def _python(environment: str, name: str) -> Callable[[Path, Server, str], tuple[list[str], dict[str, str]]]:
    def command(folder: Path, server: Server, task: str) -> tuple[list[str], dict[str, str]]:
        program = [str(_venv(environment, "python")), str(Path(__file__).with_name("programs.py")), name]
        return [*program, server.url, server.key, task], {}

    return command


def _venv(environment: str, program: str) -> Path:
    return ROOT / f".venv-agents-{environment}" / "bin" / program


def _node(name: str) -> Path:
    return NODE / "node_modules" / ".bin" / name


CODEX, CLAUDE, OPENCODE, QWEN, PI = map(_node, ("codex", "claude", "opencode", "qwen", "pi"))
AIDER = ROOT / ".venv-openai-aider" / "bin" / "aider"
WITH_FUNCTIONS = (
    thought("I read it.") + call("read_file", path="a.txt"),
    call("write_file", path="b.txt", content="42"),
    DONE,
)
CODE = "Thought: I read it.\n<code>\n{}\n</code>"

AGENTS: Mapping[str, Agent] = {
    "codex": Agent(
        "@openai/codex",
        ('"exec_command"',),
        (
            thought("I read it.") + call("exec_command", cmd="cat a.txt") + "\n" + call("exec_command", cmd="ls"),
            call("exec_command", cmd="echo 42 > b.txt"),
            DONE,
        ),
        _codex,
        '`config.toml`: `model_providers.X` with `base_url = "URL/v1"`, `env_key`, `wire_api = "responses"`',
        CODEX,
    ),
    "claude": Agent(
        "@anthropic-ai/claude-code",
        ('"Write"',),
        (
            thought("I read it.") + call("Read", file_path="{folder}/a.txt") + "\n" + call("Bash", command="ls"),
            call("Write", file_path="{folder}/b.txt", content="42"),
            DONE,
        ),
        _claude,
        "`ANTHROPIC_BASE_URL=URL`, `ANTHROPIC_API_KEY`, `ANTHROPIC_MODEL` and `ANTHROPIC_SMALL_FAST_MODEL`",
        CLAUDE,
    ),
    "opencode": Agent(
        "opencode-ai",
        ('"bash"',),
        (
            thought("I read it.") + call("read", filePath="{folder}/a.txt"),
            call("write", filePath="{folder}/b.txt", content="42"),
            DONE,
        ),
        _opencode,
        "`opencode.json`: a provider with `@ai-sdk/openai-compatible`, `baseURL` and `apiKey`",
        OPENCODE,
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code",
        ('"write_file"',),
        (
            thought("I read it.") + call("read_file", file_path="{folder}/a.txt"),
            call("write_file", file_path="{folder}/b.txt", content="42"),
            DONE,
        ),
        _qwen,
        "`OPENAI_BASE_URL=URL/v1`, `OPENAI_API_KEY`, `OPENAI_MODEL`, `--auth-type openai`",
        QWEN,
    ),
    "pi": Agent(
        "@mariozechner/pi-coding-agent",
        ('"bash"',),
        (
            thought("I read it.") + call("read", path="a.txt") + "\n" + call("bash", command="ls"),
            call("write", path="b.txt", content="42"),
            DONE,
        ),
        _pi,
        "`~/.pi/agent/models.json`: a provider with `baseUrl`, `apiKey` and `api: openai-completions`",
        PI,
    ),
    "aider": Agent(
        "aider-chat",
        (),
        (thought("Twice is 42.") + "b.txt\n```\n42\n```\n",),
        _aider,
        "`--model openai/NAME`, `OPENAI_API_BASE=URL/v1`, `OPENAI_API_KEY`",
        AIDER,
    ),
    "mini_swe_agent": Agent(
        "mini-swe-agent",
        (),
        (
            thought("I read it.") + call("bash", command="cat a.txt"),
            call("bash", command="echo 42 > b.txt"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
        _python("sdk", "mini_swe_agent"),
        "`LitellmModel(model_name=\"openai/NAME\", model_kwargs={\"api_base\": \"URL/v1\", …})`",
        _venv("sdk", "mini-extra"),
    ),
    "smolagents": Agent(
        "smolagents",
        (),
        (
            CODE.format("print(read_file('a.txt'))"),
            CODE.format("write_file('b.txt', '42')\nfinal_answer('done')"),
        ),
        _python("sdk", "smolagents"),
        '`OpenAIServerModel(NAME, api_base="URL/v1", api_key=…)`',
        _venv("sdk", "smolagent"),
        one_sequence=False,  # it writes the calls that it read from an answer into it
    ),
    "openai_agents": Agent(
        "openai-agents",
        (),
        WITH_FUNCTIONS,
        _python("sdk", "openai_agents"),
        '`OpenAIResponsesModel(NAME, openai.AsyncOpenAI(base_url="URL/v1"))`',
        _venv("sdk", "python"),
    ),
    "langgraph": Agent(
        "langgraph",
        (),
        WITH_FUNCTIONS,
        _python("sdk", "langgraph"),
        '`create_react_agent(ChatOpenAI(base_url="URL/v1", model=NAME), …)`',
        _venv("sdk", "python"),
    ),
    "pydantic_ai": Agent(
        "pydantic-ai-slim",
        (),
        WITH_FUNCTIONS,
        _python("sdk", "pydantic_ai"),
        '`OpenAIProvider(base_url="URL/v1")`',
        _venv("sdk", "python"),
    ),
    "crewai": Agent(
        "crewai",
        (),
        WITH_FUNCTIONS,
        _python("crewai", "crewai"),
        '`LLM(model="openai/NAME", base_url="URL/v1", api_key=…)`',
        _venv("crewai", "crewai"),
    ),
}  # fmt: skip


def clean_environment(home: Path) -> dict[str, str]:
    """An environment without what points programs elsewhere, with a home of its own."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    quiet = {"DO_NOT_TRACK": "1", "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "NO_COLOR": "1"}
    quiet |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "PI_OFFLINE": "1"}
    return kept | quiet | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TERM": "dumb"}
