"""The synthetic world as a Gymnasium environment, for other trainers; needs ``gradwire[gymnasium]``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.extras import require

require("gymnasium", "gymnasium", "RouterEnvironment")

import gymnasium as gym  # noqa: E402

from gradwire.router.features import Floats  # noqa: E402
from gradwire.router.world import LONGEST, Episodes, RewardWeights, World  # noqa: E402

Observation = npt.NDArray[np.float32]


class RouterEnvironment(gym.Env[Observation, np.int64]):
    """One request per episode: the planner's step chooses a mode, and the agents that it calls take the other steps.

    The action of an agent's step is ignored: the chosen collaboration continues. ``info["action_mask"]`` shows
    it: all modes at the planner's step, only the chosen one afterwards. Rewards are those of
    :class:`~gradwire.router.world.World`, step by step.

    Args:
        episode_length: Maximum number of steps of an episode.
        weights: Weights of the reward.

    Attributes:
        world: The underlying world.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  gymnasium's own declaration

    def __init__(self, episode_length: int = LONGEST, weights: RewardWeights | None = None) -> None:
        self.world = World(episode_length, weights)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (len(self.world.features),), np.float32)
        self.action_space = gym.spaces.Discrete(len(self.world.modes))
        self._request: Floats = np.zeros((1, len(self.world.features)))
        self._mode: int | None = None
        self._episode: Episodes | None = None
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Any]:
        """Return the next request as its planner sees it; ``options`` may set one: ``{"features": [...]}``."""
        super().reset(seed=seed)
        if options and "features" in options:
            self._request = self.world.features.vector(options["features"])[None]
        else:
            self._request = self.world.draw(self.np_random, 1)
        self._mode, self._episode, self._step = None, None, 0
        return self._observe(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Choose a mode, or let its agents continue.

        Raises:
            RuntimeError: The episode is over, or none was started.
            ValueError: The action is not a mode.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not a mode; modes are 0 to {len(self.world.modes) - 1}")
        if self._episode is None:
            if self._step or not self._request.any():
                raise RuntimeError("the episode is over: call reset() before the next step")
            self._mode = int(action)
            self._episode = self.world.play(self._request, np.array([self._mode]), self.np_random)
        self._step += 1
        steps = int(self._episode.steps[0])
        reward, over = float(self._episode.step_reward[0]), self._step == steps
        info: dict[str, Any] = self._info() | {"mode": self.world.modes[self._mode or 0]}
        observation = self._observe(steps)
        if over:
            reward += float(self._episode.last_reward[0])
            info |= {"is_success": bool(self._episode.success[0]), "quality": float(self._episode.quality[0])}
            info |= {"cost": float(self._episode.cost[0]), "latency": float(self._episode.latency[0])}
            self._episode = None
        return observation, reward, over, False, info

    def _observe(self, steps: int = 1) -> Observation:
        seen = self.world.at_step(self._request.copy(), np.array([self._step]), np.array([steps]))
        observation: Observation = seen[0].astype(np.float32)
        return observation

    def _info(self) -> dict[str, Any]:
        mask = np.ones(len(self.world.modes), dtype=np.int8)
        if self._mode is not None:
            mask[:] = 0
            mask[self._mode] = 1
        return {"action_mask": mask}
