"""Generation with tools, for every inference module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire.rl.environments.tools import Tool, ToolEnvironment
from gradwire.rl.generation import SamplingParams
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import Trajectory


class ToolGeneration:
    """Adds :meth:`batch_generate_with_tools` to an inference module."""

    async def batch_generate_with_tools(
        self: Any,
        prompts: Sequence[str],
        available_tools: Sequence[Tool | Callable[..., Any]] = (),
        *,
        params: SamplingParams | None = None,
        max_turns: int = 8,
        num_parallel: int = 64,
    ) -> list[Trajectory]:
        """Let the model call tools until it answers, for all prompts at once; return the conversations in order."""
        environment = ToolEnvironment(available_tools, max_turns=max_turns)
        manager = RolloutManager(self, environment, num_parallel=num_parallel, params=params or SamplingParams())
        return (await manager.collect(prompts)).trajectories
