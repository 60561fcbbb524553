"""PPO's advantages per step, for inspection of trajectories; training uses the server's per-token advantages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.rl.advantages import gae
from gradwire.rl.rows import Row
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")


def write_step_advantages(
    rows: Sequence[Row],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[npt.NDArray[Any]],
    values: Sequence[npt.NDArray[Any]],
    bootstrap: npt.NDArray[Any],
    loss_kwargs: Mapping[str, Any],
) -> None:
    """Write into each step the mean advantage of its tokens, before whitening and without a KL in the reward.

    Args:
        rewards, values: Per row ``[tokens]``.
        bootstrap: ``[rows]``, value after each row.
        loss_kwargs: Arguments of the loss, for ``gamma``, ``gae_lambda`` and ``use_gae``.
    """
    advantages, _ = gae(
        np.concatenate(rewards),
        np.concatenate(values),
        [len(row.ids) for row in rows],
        gamma=loss_kwargs.get("gamma", 0.99),
        gae_lambda=loss_kwargs.get("gae_lambda", 0.95) if loss_kwargs.get("use_gae", True) else 1.0,
        bootstrap_values=bootstrap,
        mask=np.concatenate([row.written for row in rows]),
    )
    ends = np.cumsum([len(row.ids) for row in rows])
    for row, of_row in zip(rows, np.split(advantages, ends[:-1])):
        trajectory = trajectories[row.trajectory]
        for number in row.ends:
            step = trajectory.steps[number]
            step.advantage = float(of_row[row.step_of == number].mean())
            logger.debug(
                "episode %d.%d step %d: value %.4g, advantage %.4g",
                trajectory.group, trajectory.member, number, step.value or 0.0, step.advantage,
            )  # fmt: skip
