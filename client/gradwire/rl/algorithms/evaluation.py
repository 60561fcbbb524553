"""How well a policy does on tasks that it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gradwire.rl.algorithms.collecting import Metrics, collect_scored
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.batching import derive_seed
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.rollouts import RolloutManager
from gradwire.rl.types import Task


async def evaluate(
    manager: RolloutManager, reward: RewardComputer, tasks: Sequence[Task], config: AlgorithmConfig
) -> Metrics:
    """``eval/`` score, success, steps, tokens and failed. A trajectory that failed, or was not scored, scores 0."""
    collected = await collect_scored(
        manager,
        reward,
        tasks,
        "evaluation",
        group_size=config.eval_trajectories,
        params=replace(config.sampling, temperature=config.eval_temperature),
        seed=derive_seed(config.seed, "evaluation"),
    )
    trajectories = collected.trajectories
    scores = np.array([each.evaluation.score if each.ok and each.evaluation else 0.0 for each in trajectories])
    return {
        "eval/score": float(scores.mean()),
        "eval/success": float((scores >= config.success_threshold).mean()),
        "eval/steps": collected.metrics["rollouts/avg_trajectory_length"],
        "eval/tokens": collected.metrics["rollouts/avg_tokens"],
        "eval/failed": float(sum(not each.ok for each in trajectories)),
    }
