"""What an environment is: interaction, and nothing of rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.rl.types import Action, Message, Prompt, State, Task, ToolResult


@dataclass(frozen=True)
class StepResult:
    """What the world answered to an action.

    Attributes:
        observation: text for the policy; empty when there is nothing to say.
        terminated: the episode is over by its own rules, a limit of turns that belongs to the task among them.
        truncated: it was cut off by a limit that is not the task's: a time limit, a full context.
        tool_results: of the tools that the action called.
        data: changes to the state's ``data``.
        role: of the observation's message.
    """

    observation: str = ""
    terminated: bool = False
    truncated: bool = False
    tool_results: tuple[ToolResult, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    role: str = "user"


class BaseEnvironment(ABC):
    """An environment serves any number of episodes at once: what belongs to one is in its :class:`State`.

    ``reset`` and ``step`` may be ``async def``. Plain ones run in a thread of their own, so that a slow one holds up
    its own episode only; set ``blocking = False`` where they return at once.

    Attributes:
        max_steps: the task's own limit of turns: the episode ends (``terminated``) with the last one, and what is not
            done by then has failed. None: the task has none, and where the rollouts stop (``max_steps_per_rollout``)
            the episode is ``truncated``.
        stop: strings at which the policy's writing ends.
    """

    blocking: bool = True
    max_steps: int | None = None
    stop: tuple[str, ...] = ()

    @abstractmethod
    def reset(self, task: Task, seed: int) -> State | Awaitable[State]:
        """The state that an episode starts from; the same for the same task and seed."""

    @abstractmethod
    def step(self, state: State, action: Action) -> StepResult | Awaitable[StepResult]:
        """What the world answers."""

    def parse_action(self, state: State, raw: str) -> Action:
        """What the policy's text means here. May not raise on any text: a bad action is an action too."""
        return Action(raw, raw.strip())

    def is_terminal(self, state: State) -> bool:
        return state.terminated or state.truncated

    def build_prompt(self, state: State) -> Prompt:
        """What the policy is given: by default the whole conversation."""
        return state.messages

    def observation(self, state: State) -> str:
        """The text that the policy sees last."""
        for message in reversed(state.messages):
            if message["role"] != "assistant":
                return message["content"]
        return ""

    def state_key(self, state: State) -> Hashable:
        """What tells states apart where credit is given per state (GiGPO's anchors): by default the observation."""
        return self.observation(state)

    def update_state(self, state: State, action: Action, result: StepResult) -> State:
        """The next state: the conversation grows by the action and, where there is one, the observation."""
        messages: list[Message] = [*state.messages, {"role": "assistant", "content": action.raw}]
        if result.observation:
            messages.append({"role": result.role, "content": result.observation})
        step = state.step + 1
        last = self.max_steps is not None and step >= self.max_steps
        return state.having(
            messages=tuple(messages),
            step=step,
            terminated=result.terminated or (last and not result.truncated),
            truncated=result.truncated,
            data=result.data,
        )

    def close(self, state: State) -> None:  # noqa: B027 - most have nothing to let go of
        """The episode is over: lets go of what its state holds (processes, files)."""


def first_messages(task: Task, system: str = "") -> tuple[Message, ...]:
    """The task's prompt as messages, after a system message if there is one."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if isinstance(task.prompt, str):
        messages.append({"role": "user", "content": task.prompt})
    else:
        messages.extend(task.prompt)
    return tuple(messages)
