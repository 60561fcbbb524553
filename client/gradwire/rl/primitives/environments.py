"""Environments with their own loop: ``reset``, then ``step`` until ``is_terminal``; no rewards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.rl.environments import SVRLEnvironment as AsyncSVRLEnvironment
from gradwire.rl.environments import Tool
from gradwire.rl.primitives.background import wait_for
from gradwire.rl.primitives.inference_module import InferenceModule
from gradwire.rl.primitives.tools import tools_of
from gradwire.rl.types import AnyTask, Message, Prompt, Task, ToolResult
from gradwire.rl.types import State as AsyncState


@dataclass
class State:
    """The state of an episode; the environment changes or replaces it.

    Attributes:
        prompt: The default of the next prompt: text, or messages.
        response: The last response.
        step_count: Number of steps taken.
        done: The environment's own flag for the end.
        data: Data of the environment.
    """

    prompt: Prompt = ""
    response: str = ""
    step_count: int = 0
    done: bool = False
    data: dict[str, Any] = field(default_factory=dict)


class BaseEnvironment:
    """Base class: override ``reset`` and other methods as needed.

    One object serves many episodes, in threads: the data of an episode belongs in its :class:`State`, or in attributes
    that ``reset`` sets (each episode has a shallow copy).

    Args:
        inference: The inference module that ``step`` uses; in rollouts, the policy.
        prompts: Texts, messages, rows or tasks; an episode has one of them as ``self.task``.
        max_steps: Maximum number of steps per episode; None: until ``is_terminal``.
        options: Arguments of other classes in a multiple inheritance.

    Attributes:
        task: The episode's task, with ``prompt`` and ``ground_truth``; an empty one if there are no prompts.
        rng: A ``random.Random`` that is the same for all episodes of a group.
        stop: Strings at which a response ends.
    """

    stop: Sequence[str] = ()

    def __init__(
        self,
        inference: InferenceModule | None = None,
        prompts: Iterable[AnyTask] = (),
        max_steps: int | None = None,
    ) -> None:
        self.inference: Any = inference
        self.prompts = [Task.of(each) for each in prompts]
        self.max_steps = max_steps
        self.task = Task("")
        self.rng = random.Random(0)

    def reset(self) -> State:
        """Return the start state of an episode; by default with the task's prompt."""
        return State(prompt=self.task.prompt)

    def step(self, state: State) -> State:
        """Take one turn: by default, generate a response to ``build_prompt`` and apply ``update_state``."""
        (response,) = self.inference.generate([self.build_prompt(state)])
        state = self.update_state(state, response)
        state.step_count += 1
        return state

    def is_terminal(self, state: State) -> bool:
        """Whether the episode is over."""
        return state.done or (self.max_steps is not None and state.step_count >= self.max_steps)

    def build_prompt(self, state: State) -> Prompt:
        """Build the policy's prompt."""
        return state.prompt

    def update_state(self, state: State, response: str) -> State:
        """Return the state after a response; by default the same state with the response added."""
        state.response = response
        return state

    def tasks(self, start: int = 0) -> Iterator[Task]:
        """Yield the tasks of successive episodes without end: the prompts in turn."""
        while True:
            yield self.prompts[start % len(self.prompts)] if self.prompts else Task("", task_id=f"episode {start}")
            start += 1


class SimpleTextEnvironment(BaseEnvironment):
    """A prompt and a response; with more steps, the policy continues its own text."""

    def __init__(
        self, inference: InferenceModule | None = None, prompts: Iterable[AnyTask] = (), max_steps: int | None = 1
    ) -> None:
        super().__init__(inference, prompts, max_steps)
        if not self.prompts:
            raise ValueError("prompts is empty; give at least one")

    def update_state(self, state: State, response: str) -> State:
        state.response = response
        if isinstance(state.prompt, str):
            state.prompt += response
        else:
            state.prompt = [*state.prompt, {"role": "assistant", "content": response}]
        return state


class ConversationEnvironment(BaseEnvironment):
    """A dialogue of ``max_steps`` turns.

    Args:
        respond: ``(state) -> text`` of the other side, None to end it; or override :meth:`respond`.
        system: A system message before the task's prompt.
    """

    def __init__(
        self,
        inference: InferenceModule | None = None,
        prompts: Iterable[AnyTask] = (),
        max_steps: int | None = 8,
        respond: Callable[[State], str | None] | None = None,
        system: str = "",
    ) -> None:
        super().__init__(inference, prompts, max_steps)
        self._respond, self.system = respond, system

    def reset(self) -> State:
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self.task.prompt
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return State(prompt=messages)

    def respond(self, state: State) -> str | None:
        """Return the other side's answer to ``state.response``; None ends the conversation."""
        return self._respond(state) if self._respond is not None else None

    def update_state(self, state: State, response: str) -> State:
        state.response = response
        messages: list[Message] = [*as_list(state.prompt), {"role": "assistant", "content": response}]
        said = self.respond(state)
        if said is None:
            state.done = True
        else:
            messages.append({"role": "user", "content": said})
        state.prompt = messages
        return state


class SVRLEnvironment(BaseEnvironment):
    """Self-verification: tools may check an answer, within a budget, before ``<answer>…</answer>`` commits to it.

    Args:
        tools: Functions, tools, or names of registered ones; each call costs the tool's ``cost`` (1 by default).
        budget: Budget of all calls of an episode.
        prompts: Questions, with a ``ground_truth`` for :class:`SVRLRewardComputer`.
        max_steps: The policy's limit of turns.
    """

    stop = ("</tool_call>",)

    def __init__(
        self,
        inference: InferenceModule | None = None,
        tools: Iterable[str | Tool | Callable[..., Any]] = (),
        budget: float = 10.0,
        prompts: Iterable[AnyTask] = (),
        max_steps: int | None = 8,
    ) -> None:
        super().__init__(inference, prompts, max_steps)
        self.budget = budget
        self._world = AsyncSVRLEnvironment(tools_of(tools), budget=budget, max_turns=max_steps or 1_000_000)

    def reset(self) -> State:
        return self._seen(State(), self._world.reset(self.task, 0))

    def update_state(self, state: State, response: str) -> State:
        before: AsyncState = state.data["world"]
        action = self._world.parse_action(before, response)
        result = wait_for(self._world.step(before, action))
        state.response = response
        tool_results: list[ToolResult] = [*state.data.get("tool_results", ()), *result.tool_results]
        state.data["tool_results"] = tool_results
        return self._seen(state, self._world.update_state(before, action, result))

    def _seen(self, state: State, world: AsyncState) -> State:
        state.data.update(world.data)
        state.data["world"] = world
        state.prompt, state.done = world.messages, world.terminated or world.truncated
        return state


def as_list(prompt: Prompt) -> list[Message]:
    """Convert the prompt to messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
