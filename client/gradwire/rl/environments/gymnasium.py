"""Gymnasium environments with textual observations and actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.extras import require
from gradwire.rl.environments.base import BaseEnvironment, StepResult, first_messages
from gradwire.rl.types import Action, State, Task


class GymnasiumEnvironment(BaseEnvironment):
    """One Gymnasium environment per episode: created, reset with the episode's seed, and closed.

    Args:
        make: An environment id for ``gymnasium.make``, or ``task -> environment``.
        parse: Converts the policy's text to an action. A ``ValueError``, or an action outside
            ``action_space``, is reported to the policy, and the environment does not step.
        describe: Converts an observation to text.
        system: A system message.
        max_turns: The policy's limit of turns.
        stop: Strings at which a turn ends.

    The environment's own rewards are kept in the state's ``data["env_rewards"]``, one per step: see
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
        # text spaces have few characters
        space = None if isinstance(move, str) else getattr(world, "action_space", None)
        if space is not None and not space.contains(move):
            return StepResult(f"error: {move!r} is not an action: {space}", data={"env_rewards": (*rewards, 0.0)})
        observation, reward, terminated, truncated, info = world.step(move)
        data = {"info": info, "env_rewards": (*rewards, float(reward))}
        return StepResult(self._describe(observation), bool(terminated), bool(truncated), data=data)

    def close(self, state: State) -> None:
        state.data["world"].close()
