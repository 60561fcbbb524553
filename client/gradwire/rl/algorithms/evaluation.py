"""Evaluation of a policy on held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb

import numpy as np
import numpy.typing as npt

from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.scored_rollouts import Manager, collect_scored
from gradwire.rl.batching import derive_seed
from gradwire.rl.metrics import Metrics
from gradwire.rl.rewards import RewardComputer
from gradwire.rl.types import Task


async def evaluate(manager: Manager, reward: RewardComputer, tasks: Sequence[Task], config: AlgorithmConfig) -> Metrics:
    """Compute ``eval/`` score, success, steps, tokens and failed. A failed or unscored trajectory scores 0.

    With several trajectories per task also ``eval/pass@k``.
    """
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
        "eval/steps": collected.metrics["rollouts/avg_trajectory_length"].value(),
        "eval/tokens": collected.metrics["rollouts/avg_tokens"].value(),
        "eval/failed": float(sum(not each.ok for each in trajectories)),
        **pass_at_k(scores.reshape(-1, config.eval_trajectories) >= config.success_threshold),
    }


def pass_at_k(solved: npt.NDArray[np.bool_]) -> Metrics:
    """``[tasks, trajectories] -> eval/pass@k`` for k of 1, 2, 4, ... and all; empty for one trajectory per task.

    The unbiased estimate of the probability that at least one of k trajectories solves a task,
    ``1 - C(n - c, k) / C(n, k)`` with c of n solved (Chen et al. 2021, arXiv 2107.03374).
    """
    n = solved.shape[1]
    sizes = sorted({n, *(2**power for power in range(n.bit_length()) if 2**power <= n)}) if n > 1 else []
    right = [int(each) for each in solved.sum(axis=1)]
    return {f"eval/pass@{k}": float(np.mean([1 - comb(n - c, k) / comb(n, k) for c in right])) for k in sizes}
