"""Self-verification: the policy may check its answer with tools, within a budget, before it commits to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from gradwire.rl.environments.base import StepResult
from gradwire.rl.environments.tools import Tool, ToolEnvironment
from gradwire.rl.types import Action, State

_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


class SVRLEnvironment(ToolEnvironment):
    """A :class:`ToolEnvironment` in which verification has a cost, and only ``<answer>…</answer>`` commits.

    A turn that neither calls a tool nor commits is asked to do one of the two. When the budget is spent, further
    calls are refused and the policy is told to commit. The state's ``data`` has ``verification_cost``, ``budget``
    and, at the end, ``answer``, for :class:`~gradwire.rl.rewards.SVRLRewardComputer`.

    Args:
        tools: The verification tools; each call costs the tool's ``cost``.
        budget: Budget of all calls of an episode.
    """

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]], *, budget: float = 3.0, **options: Any) -> None:
        super().__init__(tools, **options)
        self.budget = budget

    async def step(self, state: State, action: Action) -> StepResult:
        cost = float(state.data.get("tool_cost", 0.0))
        kept = {"verification_cost": cost, "budget": self.budget}
        committed = _ANSWER.findall(action.raw)
        if committed:
            return StepResult(terminated=True, data=kept | {"answer": committed[-1]})
        if not action.parsed:
            return StepResult("Verify your answer with a tool, or commit: <answer>...</answer>", data=kept)
        if not isinstance(action.parsed, str):
            wanted = sum(tool.cost for call in action.parsed if (tool := self.toolbox.tools.get(call.name)))
            if cost + wanted > self.budget:
                left = max(0.0, self.budget - cost)
                return StepResult(
                    f"error: that costs {wanted:g} and {left:g} of the budget is left. Commit: <answer>...</answer>",
                    data=kept,
                    role="tool",
                )
        result = await super().step(state, action)
        spent = {"verification_cost": float(result.data.get("tool_cost", cost)), "budget": self.budget}
        return StepResult(
            result.observation,
            result.terminated,
            result.truncated,
            result.tool_results,
            {**result.data, **spent},
            "tool",
        )
