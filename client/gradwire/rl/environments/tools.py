"""Tools that a policy can call, and the environment that runs them."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import anyio

from gradwire.rl.environments.base import BaseEnvironment, History, StepResult, first_messages
from gradwire.rl.threads import called
from gradwire.rl.types import Action, State, Task, ToolCall, ToolResult

JSON_TYPES: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call.

    Attributes:
        name, description: Shown to the policy.
        function: Takes the arguments by name and returns anything (its ``str`` is the result); may be ``async``.
        parameters: JSON schema of the arguments.
        cost: Cost of one call, in the units of a budget.
        timeout_s: A call that takes longer fails.
    """

    name: str
    description: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cost: float = 1.0
    timeout_s: float = 10.0

    @staticmethod
    def of(function: Tool | Callable[..., Any]) -> Tool:
        """Build a tool from a function: its name, docstring and signature."""
        if isinstance(function, Tool):
            return function
        if not callable(function):
            raise TypeError(f"a tool is a function or a Tool, got {function!r}: pass the function itself")
        hints = get_type_hints(function)
        properties, required = {}, []
        for name, parameter in inspect.signature(function).parameters.items():
            kind = JSON_TYPES.get(getattr(hints.get(name), "__origin__", hints.get(name)))
            properties[name] = {"type": kind} if kind else {}
            if parameter.default is inspect.Parameter.empty:
                required.append(name)
        schema = {"type": "object", "properties": properties, "required": required}
        return Tool(function.__name__, inspect.getdoc(function) or "", function, schema)

    def schema(self) -> dict[str, Any]:
        """The schema that chat templates and OpenAI-compatible endpoints accept."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Toolbox:
    """Tools by name. A call never raises: an unknown name, wrong arguments, an exception or a timeout is a result."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()) -> None:
        self.tools = {tool.name: tool for tool in map(Tool.of, tools)}

    def describe(self) -> str:
        """Describe the tools to the policy, for models without a tool template."""
        lines = [
            'Call a tool with <tool_call>{"name": ..., "arguments": {...}}</tool_call>. The tools:',
            *(
                f"- {t.name}({', '.join(t.parameters.get('properties', {}))}): {t.description}"
                for t in self.tools.values()
            ),
        ]
        return "\n".join(lines)

    async def call(self, call: ToolCall) -> ToolResult:
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return ToolResult(call, "", f"there is no tool {call.name!r}; there are: {known}")
        try:
            inspect.signature(tool.function).bind(**call.arguments)
        except TypeError as error:
            return ToolResult(call, "", f"{call.name}: {error}")
        try:
            with anyio.fail_after(tool.timeout_s):
                content = await called(functools.partial(tool.function, **call.arguments))
        except TimeoutError:
            return ToolResult(call, "", f"{call.name} took more than {tool.timeout_s:g} s", tool.cost)
        except Exception as error:  # a tool is the user's code: the policy gets to see its failure
            return ToolResult(call, "", f"{call.name}: {type(error).__name__}: {error}", tool.cost)
        return ToolResult(
            call, content if isinstance(content, str) else json.dumps(content, default=str), cost=tool.cost
        )


def parse_tool_calls(text: str) -> tuple[tuple[ToolCall, ...], str]:
    """Parse the calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` in a text, and collect the
    errors."""
    calls: list[ToolCall] = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
        except (json.JSONDecodeError, RecursionError) as error:
            return tuple(calls), f"a tool call is not JSON: {error}"
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return tuple(calls), 'a tool call is a JSON object with "name" and "arguments"'
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return tuple(calls), f"the arguments of {call['name']} are not a JSON object"
        calls.append(ToolCall(call["name"], arguments))
    return tuple(calls), ""


class ToolEnvironment(BaseEnvironment):
    """An environment with tools; the policy ends the episode by an answer without a tool call.

    Args:
        tools: Functions or :class:`Tool` objects.
        max_turns: The policy's limit of turns.
        system: Text before the description of the tools.
        describe_tools: Describe the tools in the system message.
        stop: Strings at which a turn ends.
        history: As for :class:`BaseEnvironment`.

    :meth:`parse_action` defines the format of calls; override it for another format. Its ``parsed`` is the
    tuple of calls.
    """

    blocking = False

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        max_turns: int = 8,
        system: str = "",
        describe_tools: bool = True,
        stop: tuple[str, ...] = ("</tool_call>",),
        history: History = "template",
    ) -> None:
        self.toolbox = Toolbox(tools)
        self.max_steps = max_turns
        self.stop = stop
        self.history = history
        described = self.toolbox.describe() if describe_tools and self.toolbox.tools else ""
        self.system = "\n\n".join(part for part in (system, described) if part)

    def reset(self, task: Task, seed: int) -> State:
        return State(task, first_messages(task, self.system), data={"seed": seed, "tool_cost": 0.0, "tool_calls": 0})

    def parse_action(self, state: State, raw: str) -> Action:
        # A stop string ends the text before it, so the closing tag must be restored.
        opened = raw.count("<tool_call>") > raw.count("</tool_call>")
        calls, wrong = parse_tool_calls(raw + "</tool_call>" if opened else raw)
        return Action(raw, wrong or calls)

    async def step(self, state: State, action: Action) -> StepResult:
        if isinstance(action.parsed, str):
            return StepResult(f"error: {action.parsed}", role="tool")
        if not action.parsed:
            return StepResult(terminated=True, data={"answer": action.raw.strip()})
        results = tuple([await self.toolbox.call(call) for call in action.parsed])
        data = {
            "tool_cost": state.data.get("tool_cost", 0.0) + sum(result.cost for result in results),
            "tool_calls": state.data.get("tool_calls", 0) + len(results),
        }
        return StepResult(self.show(results), tool_results=results, data=data, role="tool")

    def show(self, results: tuple[ToolResult, ...]) -> str:
        """Format the results of tools as an observation."""
        return "\n".join(f"error: {result.error}" if result.error else result.content for result in results)
