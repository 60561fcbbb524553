"""Gymnasium environments whose observations can be written as text, and whose actions can be read from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.rl.environments.base import BaseEnvironment, StepResult, first_messages
from gradwire.rl.extras import require
from gradwire.rl.types import Action, State, Task


class GymnasiumEnvironment(BaseEnvironment):
    """One Gymnasium environment an episode, made, reset with the episode's seed and closed.

    Args:
        make: an environment id for ``gymnasium.make``, or ``task -> environment``.
        parse: the policy's text -> an action of the environment; a ``ValueError``, or an action that is not in its
            ``action_space``, is told to the policy, and the environment does not move.
        describe: an observation -> text.
        system: a system message.
        max_turns: of the policy.
        stop: strings at which a turn ends.

    The environment's own rewards are kept in the state's ``data["env_rewards"]``, one a step: see
    :func:`~gradwire.rl.rewards.environment_reward`.
    """

    def __init__(
        self,
        make: str | Callable[[Task], Any],
        *,
        parse: Callable[[str], Any] = str.strip,
        describe: Callable[[Any], str] = str,
        system: str = "",
        max_turns: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> None:
        if isinstance(make, str):
            require("gymnasium", "gymnasium", "GymnasiumEnvironment")
        self._make = make
        self._parse = parse
        self._describe = describe
        self.system = system
        self.max_steps = max_turns
        self.stop = stop

    def reset(self, task: Task, seed: int) -> State:
        make = self._make
        world = (
            require("gymnasium", "gymnasium", "GymnasiumEnvironment").make(make)
            if isinstance(make, str)
            else make(task)
        )
        observation, info = world.reset(seed=seed)
        messages = first_messages(task, self.system)
        messages += ({"role": "user", "content": self._describe(observation)},)
        return State(task, messages, data={"world": world, "info": info, "env_rewards": ()})

    def step(self, state: State, action: Action) -> StepResult:
        rewards = state.data["env_rewards"]
        try:
            move = self._parse(action.raw)
        except ValueError as error:
            return StepResult(f"error: {error}", data={"env_rewards": (*rewards, 0.0)})
        world = state.data["world"]
        space = None if isinstance(move, str) else getattr(world, "action_space", None)  # worlds of text list few signs
        if space is not None and not space.contains(move):
            return StepResult(f"error: {move!r} is not an action: {space}", data={"env_rewards": (*rewards, 0.0)})
        observation, reward, terminated, truncated, info = world.step(move)
        data = {"info": info, "env_rewards": (*rewards, float(reward))}
        return StepResult(self._describe(observation), bool(terminated), bool(truncated), data=data)

    def close(self, state: State) -> None:
        state.data["world"].close()
