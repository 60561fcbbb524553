"""PPO with the server's value head."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.rl.advantages import gae
from gradwire.rl.algorithms.base import Algorithm
from gradwire.rl.metrics import Mean, Metric, Sum
from gradwire.rl.rows import Row, TrainingBatch, rows_of
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")


def token_rewards(row: Row, trajectory: Trajectory) -> np.ndarray:
    """``[tokens]``: each step's reward at its last token, and the trajectory's at the very last.

    Without step outputs the last step's reward is the trajectory's and counts once. A score that is the sum of
    the step outputs is not added to them.
    """
    rewards = row.at_ends([step.reward for step in trajectory.steps])
    verdict = trajectory.evaluation
    if row.last and verdict is not None and verdict.step_outputs and not verdict.scored_by_steps:
        rewards[np.flatnonzero(row.written)[-1]] += trajectory.reward
    return rewards


def write_step_advantages(
    rows: Sequence[Row],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[npt.NDArray[Any]],
    values: Sequence[npt.NDArray[Any]],
    bootstrap: npt.NDArray[Any],
    loss_kwargs: Mapping[str, Any],
) -> None:
    """Write into each step the mean advantage of its tokens, before whitening and without a KL in the reward.

    For who inspects trajectories; training uses the server's advantages of tokens.

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


class PPOAlgorithm(Algorithm):
    """Proximal policy optimisation (loss ``enhanced_ppo``): per-token advantages from a critic.

    The run needs ``head="value"``. Values of the state before each token are computed once, before the first pass, and
    are the baseline of all passes. The end of a completed episode has value 0, whether it ended by its rules, by its
    own limit of turns, or with a response of ``max_tokens`` that the environment accepted as the last. Only a
    ``truncated`` episode is bootstrapped, with the value of the last state in which the policy wrote, which is the last
    trained value of the episode. (Values of states that no token follows are not trained. They drift, and bootstrapping
    from them amplifies the drift.)

    A trajectory of several rows (its prompts do not continue each other) passes the remaining return from row to row
    as the discounted value of the next row's first state.
    """

    needs_head = "value"

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        rows = rows_of(trajectories)
        if not rows:
            return TrainingBatch("enhanced_ppo", {}, {}, {})
        scored = await self.run.compute_values(
            {"input_ids": [row.ids for row in rows], "loss_mask": [row.written for row in rows]}
        )
        values, bootstrap = [], np.zeros(len(rows), np.float32)
        cut: list[int] = []
        for index, (row, each) in enumerate(zip(rows, scored)):
            of_row = np.zeros(len(row.ids), np.float32)
            of_row[row.written] = each
            values.append(of_row)
            if row.last and trajectories[row.trajectory].status == "truncated":
                cut.append(index)
                bootstrap[index] = each[-1]
            elif not row.last:
                bootstrap[index] = scored[index + 1][0]
        for row, of_row in zip(rows, values):
            steps = trajectories[row.trajectory].steps
            for step in row.ends:
                steps[step].value = float(of_row[np.argmax(row.step_of == step)])
        rewards = [token_rewards(row, trajectories[row.trajectory]) for row in rows]
        kwargs = {"gamma": 1.0, "whiten_advantages": True, **self.config.kl_kwargs(), **self.config.loss_kwargs}
        kwargs, trained = await self._corrected(rows, trajectories, kwargs)
        columns: dict[str, list[Any]] = {
            "input_ids": [row.ids for row in rows],
            "loss_mask": [row.written for row in rows],
            "old_log_probs": [row.logprobs for row in rows] if trained is None else trained,
            "rewards": rewards,
            "old_values": values,
            "bootstrap_values": bootstrap.tolist(),
        }
        if trained is not None:
            columns["sampler_log_probs"] = [row.logprobs for row in rows]
        write_step_advantages(rows, trajectories, rewards, values, bootstrap, kwargs)
        if cut and kwargs["gamma"] == 1.0:
            self._reporter.warn_once(
                "bootstrapped",
                "%d of %d episodes were cut off (max_steps_per_rollout is %d) and are bootstrapped without a "
                "discount (gamma is 1). If that number of turns is the task's own limit, set the environment's "
                "max_steps to it: running out of turns then counts as a failure",
                len(cut), len(trajectories), self.config.max_steps_per_rollout,
            )  # fmt: skip
        metrics: dict[str, Metric | float] = {"rows": Sum(len(rows)), "bootstrapped": Sum(len(cut))}
        if cut:
            metrics["bootstrap_value"] = Mean.of(bootstrap[cut])
        return TrainingBatch("enhanced_ppo", kwargs, columns, metrics)
