"""Several rewards as one: their weighted sum."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire.rl.rewards.computer import as_scorer, close_scorer
from gradwire.rl.rewards.functions import Scorer
from gradwire.rl.types import EvaluateResult, StepOutput, Trajectory


class WeightedReward:
    """A scorer whose score is the weighted sum of others'; each one's own is logged as a metric of its name.

    A trajectory that one of them cannot score has no score.

    Args:
        rewards: Name -> a scorer or function.
        weights: Name -> its weight; 1 by default.
    """

    def __init__(
        self, rewards: Mapping[str, Scorer | Callable[..., Any]], weights: Mapping[str, float] | None = None
    ) -> None:
        if not rewards:
            raise ValueError("there are no rewards; give at least one")
        if unknown := [name for name in weights or {} if name not in rewards]:
            raise ValueError(f"weights names {unknown[0]!r}, which is none of {', '.join(rewards)}")
        self._scorers = {name: as_scorer(each) for name, each in rewards.items()}
        self._weights = {name: float((weights or {}).get(name, 1.0)) for name in rewards}

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        found = await asyncio.gather(*(each.evaluate(trajectories) for each in self._scorers.values()))
        return [
            self._sum(trajectory, dict(zip(self._scorers, each))) for trajectory, each in zip(trajectories, zip(*found))
        ]

    def close(self) -> None:
        """Release the scorers' resources."""
        for each in self._scorers.values():
            close_scorer(each)

    def _sum(self, trajectory: Trajectory, results: Mapping[str, EvaluateResult]) -> EvaluateResult:
        """One result of each scorer -> theirs together.

        Where one rewards single steps, what the others give for the whole counts as given at the last step.
        """
        if failed := [each.error for each in results.values() if each.error]:
            return EvaluateResult(0.0, error=failed[0])
        weights, metrics = self._weights, dict[str, float]()
        for name, each in results.items():
            metrics |= {name: each.score, **{f"{name}/{key}": value for key, value in each.metrics.items()}}
        reason = "; ".join(f"{name}: {each.reason}" for name, each in results.items() if each.reason)
        score = sum(weights[name] * each.score for name, each in results.items())
        last = max(len(trajectory.steps) - 1, 0)
        steps: dict[int, float] = {}
        for name, each in results.items():
            given = [(step.step_index, step.base_reward) for step in each.step_outputs or ()]
            for index, reward in given if each.scored_by_steps else [*given, (last, each.score)]:
                at = index if index >= 0 else last + 1 + index
                steps[at] = steps.get(at, 0.0) + weights[name] * reward
        if not any(each.step_outputs for each in results.values()):
            return EvaluateResult(score, metrics=metrics, reason=reason)
        outputs = tuple(StepOutput(index, reward) for index, reward in sorted(steps.items()))
        return EvaluateResult(score, outputs, metrics, reason, scored_by_steps=True)
