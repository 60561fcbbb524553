"""Complete episodes of many environments at once.

``E`` environments, ``N`` episodes, ``C`` columns of the policy, ``T`` steps of all episodes one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradwire.router.features import Floats
from gradwire.router.policy import LinearPolicy
from gradwire.router.world import Episodes, Integers, World


@dataclass(frozen=True)
class Rollout:
    """Episodes under one policy.

    Attributes:
        episodes: Outcomes of the episodes.
        x: ``[T, C]``, the policy's input at each step.
        starts: ``[N]``, index of each episode's first step: its planner's step, the only one with a decision.
        modes, logprobs: ``[N]``, the decisions and their log-probabilities.
        values: ``[T]``, outputs of the policy's value head.
        rewards: ``[T]``.
    """

    episodes: Episodes
    x: Floats
    starts: Integers
    modes: Integers
    logprobs: Floats
    values: Floats
    rewards: Floats

    @property
    def step_of(self) -> Integers:
        """``[T]``: the index of each step in its episode, from 0."""
        return _steps_within(self.episodes.steps)

    def padded(self, numbers: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """``[T] -> [N, longest]`` and its mask: one row per episode, zeros after its end."""
        steps = self.episodes.steps
        mask = np.arange(steps.max(initial=1)) < steps[:, None]
        rows = np.zeros(mask.shape)
        rows[mask] = numbers
        return rows, mask


def _steps_within(steps: Integers) -> Integers:
    return np.arange(steps.sum()) - np.repeat(steps.cumsum() - steps, steps)


def collect(
    world: World, policy: LinearPolicy, rng: np.random.Generator, environments: int, rollout_length: int
) -> Rollout:
    """Collect episodes until each environment has taken ``rollout_length`` steps; the last episode is completed.

    Each environment draws its next request when its episode ends, so that all are in a planner's step at once: a wave
    of decisions is one matrix product. An environment that has taken its steps leaves the waves.
    """
    taken = np.zeros(environments, dtype=np.int64)
    waves: list[tuple[Floats, Integers, Floats, Episodes]] = []
    while len(active := np.flatnonzero(taken < rollout_length)):
        x = world.draw(rng, len(active))
        seen = policy.features.expand(x)
        modes, logprobs = policy.act(seen, rng)
        episodes = world.play(x, modes, rng)
        taken[active] += episodes.steps
        waves.append((seen, modes, logprobs, episodes))
    return _join(world, policy, waves)


def _join(world: World, policy: LinearPolicy, waves: list[tuple[Floats, Integers, Floats, Episodes]]) -> Rollout:
    requests, modes, logprobs = (np.concatenate([wave[part] for wave in waves]) for part in range(3))
    episodes = Episodes(
        **{name: np.concatenate([getattr(wave[3], name) for wave in waves]) for name in vars(waves[0][3])}
    )
    steps = episodes.steps
    starts = steps.cumsum() - steps
    x = world.at_step(np.repeat(requests, steps, axis=0), _steps_within(steps), np.repeat(steps, steps))
    rewards = np.repeat(episodes.step_reward, steps)
    rewards[starts + steps - 1] += episodes.last_reward
    return Rollout(episodes, x, starts, modes, logprobs, policy.values(x), rewards)


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """Concatenate rollouts under the same policy, in order."""
    if len(rollouts) == 1:
        return rollouts[0]
    episodes = Episodes(
        **{
            name: np.concatenate([getattr(each.episodes, name) for each in rollouts])
            for name in vars(rollouts[0].episodes)
        }
    )
    joined = {
        name: np.concatenate([getattr(each, name) for each in rollouts])
        for name in ("x", "modes", "logprobs", "values", "rewards")
    }
    return Rollout(episodes=episodes, starts=episodes.steps.cumsum() - episodes.steps, **joined)
