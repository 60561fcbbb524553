"""The environment interfaces: interaction, without rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gradwire.rl.generation import InferenceModule, SamplingParams
from gradwire.rl.types import Action, Message, Prompt, State, Task, ToolResult, Trajectory

History = Literal["template", "keep"]
HISTORIES: tuple[History, ...] = get_args(History)


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to an action.

    Attributes:
        observation: Text for the policy; empty if there is none.
        terminated: The episode ended by its own rules, including the task's limit of turns.
        truncated: A limit that is not the task's cut it off: a time limit, a full context.
        tool_results: Results of the tools that the action called.
        data: Changes to the state's ``data``.
        role: Role of the observation's message.
    """

    observation: str = ""
    terminated: bool = False
    truncated: bool = False
    tool_results: tuple[ToolResult, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    role: str = "user"


class BaseEnvironment(ABC):
    """An environment that serves any number of episodes at once; the data of one episode is in its :class:`State`.

    ``reset`` and ``step`` may be ``async def``. Plain methods run in their own thread, so that a slow one delays only
    its own episode; set ``blocking = False`` if they return immediately.

    Attributes:
        max_steps: The task's own limit of turns: the episode ends (``terminated``) with the last one, and an unsolved
            task counts as failed. None: the task has no limit, and an episode that reaches ``max_steps_per_rollout`` is
            ``truncated``.
        stop: Strings at which the policy's response ends.
        history: Reasoning in the prompts of later turns. ``"template"``: as the model's chat template writes it; one
            that drops it makes each turn a training row of its own. ``"keep"``: what was sampled stays in the prompt,
            so that a conversation is one row. The same as for a rollout session.
    """

    blocking: bool = True
    max_steps: int | None = None
    stop: tuple[str, ...] = ()
    history: History = "template"

    @abstractmethod
    def reset(self, task: Task, seed: int) -> State | Awaitable[State]:
        """Return the start state of an episode; the same for the same task and seed."""

    @abstractmethod
    def step(self, state: State, action: Action) -> StepResult | Awaitable[StepResult]:
        """Return the environment's answer to the action."""

    def parse_action(self, state: State, raw: str) -> Action:
        """Interpret the policy's text. Must not raise for any text: an invalid action is an action too."""
        return Action(raw, raw.strip())

    def is_terminal(self, state: State) -> bool:
        return state.terminated or state.truncated

    def build_prompt(self, state: State) -> Prompt:
        """Build the policy's prompt: by default the whole conversation."""
        return state.messages

    def observation(self, state: State) -> str:
        """Return the newest text that the policy sees."""
        for message in reversed(state.messages):
            if message["role"] != "assistant":
                return message["content"]
        return ""

    def state_key(self, state: State) -> Hashable:
        """Return the key that identifies states in state-level credit (GiGPO's anchors): by default the observation."""
        return self.observation(state)

    def update_state(self, state: State, action: Action, result: StepResult) -> State:
        """Build the next state: the conversation grows by the action and the observation, if any."""
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

    def close(self, state: State) -> None:  # noqa: B027 - most environments have nothing to release
        """Release what the state of a finished episode holds (processes, files)."""


@dataclass(frozen=True)
class Policy:
    """The policy as an :class:`EpisodeEnvironment` plays it: a sampler with its parameters.

    Attributes:
        inference: The sampler.
        params: Sampling parameters.
        max_steps: Truncate the episode after this many of the policy's turns.
    """

    inference: InferenceModule
    params: SamplingParams
    max_steps: int


class EpisodeEnvironment(ABC):
    """An environment that runs its own loop: a program that calls the policy by itself, as agents do."""

    @abstractmethod
    async def play(self, trajectory: Trajectory, policy: Policy) -> None:
        """Run the episode of ``trajectory.task`` and write into the trajectory what the policy did.

        Sets its steps, messages, state and status. An exception fails the episode; a cancellation (a time limit, a
        collection that has enough) must end whatever it started.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what the environment holds. It can be used again."""


Environment = BaseEnvironment | EpisodeEnvironment
"""Anything that episodes run in."""


def first_messages(task: Task, system: str = "") -> tuple[Message, ...]:
    """Return the task's prompt as messages, after a system message if there is one."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if isinstance(task.prompt, str):
        messages.append({"role": "user", "content": task.prompt})
    else:
        messages.extend(task.prompt)
    return tuple(messages)
