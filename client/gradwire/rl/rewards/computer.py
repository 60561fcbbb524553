"""Rewards after collection: scores, and their comparison within a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gradwire.rl.metrics import Mean, Metric, Std, Sum, values_of
from gradwire.rl.rewards.aligner import align_batch
from gradwire.rl.rewards.functions import RewardFunction, Scorer
from gradwire.rl.types import EvaluateResult, Trajectory

logger = logging.getLogger("gradwire.rl")

Mode = Literal["absolute", "relative"]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RewardReport:
    """The result of a reward computation.

    Attributes:
        merging: Means over the scored trajectories, by name, as metrics that merge with those of other reports.
        errors: Number of occurrences of each error.
    """

    merging: Mapping[str, Metric]
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The means as numbers."""
        return values_of(self.merging)


class RewardComputer:
    """Scores trajectories and writes the rewards into them.

    Failed trajectories are not scored; a trajectory that could not be scored has the reason in its evaluation's
    ``error``. Both are excluded from training and from the baselines of their groups.

    Args:
        scorer: A function, a reward model, or any object with ``evaluate``.
        mode: ``absolute``: the reward is the score. ``relative``: it is the score's rank within the group, from 0 for
            the worst to 1 for the best; ties share the mean of their ranks; 0.5 in a group of one or of equal scores.
        default_step_reward: Reward of steps that the scorer does not name.
    """

    def __init__(
        self, scorer: Scorer | Callable[..., Any], mode: Mode = "absolute", *, default_step_reward: float = 0.0
    ) -> None:
        if mode not in ("absolute", "relative"):
            raise ValueError(
                f'mode must be "absolute" or "relative", got {mode!r}. For several objectives: ParetoRewardComputer'
            )
        self.scorer = as_scorer(scorer)
        self.mode = mode
        self.default_step_reward = default_step_reward

    async def compute(self, trajectories: Sequence[Trajectory]) -> RewardReport:
        """Set ``reward`` and ``evaluation`` of the trajectories, and ``reward`` of their steps."""
        ran = [each for each in trajectories if each.status in ("completed", "truncated")]
        results = await self._evaluate(ran)
        align_batch(ran, results, default_step_reward=self.default_step_reward)
        scored = [each for each in ran if each.evaluation is not None and not each.evaluation.error]
        for members in by_group(scored):
            for trajectory, reward in zip(members, self._rewards(members)):
                trajectory.reward = float(reward)
                if trajectory.steps and trajectory.evaluation is not None and not trajectory.evaluation.step_outputs:
                    trajectory.steps[-1].reward = self.default_step_reward + trajectory.reward
        for each in scored:
            logger.debug("trajectory %d.%d: final score %.6g", each.group, each.member, each.reward)
        return _report(trajectories, scored)

    async def _evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        return await self.scorer.evaluate(trajectories)

    def _rewards(self, group: Sequence[Trajectory]) -> Floats:
        scores = np.array([each.evaluation.score for each in group if each.evaluation is not None], np.float64)
        return scores if self.mode == "absolute" else normalised_ranks(scores)

    def close(self) -> None:
        """Release the scorer's resources (sandboxes)."""
        close_scorer(self.scorer)


Reward = RewardComputer | Scorer | Callable[..., Any]


def as_computer(reward: Reward) -> RewardComputer:
    """Return a reward computer unchanged; wrap a scorer or a plain function.

    Raises:
        TypeError: Anything else.
    """
    return reward if isinstance(reward, RewardComputer) else RewardComputer(reward)


def as_scorer(scorer: Scorer | Callable[..., Any]) -> Scorer:
    """Return a scorer unchanged; wrap a plain function.

    Raises:
        TypeError: Anything else.
    """
    if hasattr(scorer, "evaluate"):
        return scorer
    if not callable(scorer):
        raise TypeError(
            f"the reward is {type(scorer).__name__}; it must be a function, a scorer (an object with `evaluate`) or a "
            "RewardComputer"
        )
    return RewardFunction(scorer)


def close_scorer(scorer: object) -> None:
    close = getattr(scorer, "close", None)
    if close is not None:
        close()


def by_group(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return list(groups.values())


def normalised_ranks(scores: npt.ArrayLike) -> Floats:
    """Rank ``[n]`` from 0 (worst) to 1 (best); ties share the mean of their ranks; 0.5 for a single entry."""
    scores = np.asarray(scores, np.float64)
    below = (scores[None, :] < scores[:, None]).sum(axis=1)
    equal = (scores[None, :] == scores[:, None]).sum(axis=1)
    if len(scores) < 2:
        return np.full(len(scores), 0.5)
    return np.asarray((below + (equal - 1) / 2) / (len(scores) - 1), np.float64)


def _report(trajectories: Sequence[Trajectory], scored: Sequence[Trajectory]) -> RewardReport:
    errors: dict[str, int] = {}
    for each in trajectories:
        error = each.evaluation.error if each.evaluation is not None else each.error
        if error:
            errors[error] = errors.get(error, 0) + 1
    metrics: dict[str, list[float]] = {}
    for each in scored:
        assert each.evaluation is not None
        for name, value in {"reward": each.reward, "score": each.evaluation.score, **each.evaluation.metrics}.items():
            metrics.setdefault(name, []).append(value)
    merging: dict[str, Metric] = {f"rewards/{name}": Mean.of(values) for name, values in metrics.items()}
    if scored:
        merging["rewards/reward_std"] = Std.of(metrics["reward"])
    return RewardReport(merging | {"rewards/not_scored": Sum(len(trajectories) - len(scored))}, errors)


class ParetoRewardComputer(RewardComputer):
    """Several objectives at once without weights: non-dominated fronts, and crowding within them.

    Within each group, trajectories are sorted into fronts (the first is dominated by none, the second only by the
    first, …), and within a front those in less crowded regions come first (Deb et al. 2002, NSGA-II). The reward is
    the rank in this order, from 0 to 1.

    Args:
        objectives: Name -> scorer or function, or a list of them; higher is better.
        objective_names: Names of a list's objectives; by default those of their functions.
        default_step_reward: Reward of each step.

    The evaluation's ``metrics`` have the scores under the objectives' names; its score is their mean.
    """

    def __init__(
        self,
        objectives: Mapping[str, Scorer | Callable[..., Any]] | Sequence[Scorer | Callable[..., Any]],
        objective_names: Sequence[str] | None = None,
        *,
        default_step_reward: float = 0.0,
    ) -> None:
        named = objectives if isinstance(objectives, Mapping) else by_name(objectives)
        if objective_names is not None:
            if isinstance(objectives, Mapping) or len({*objective_names}) != len(objectives):
                raise ValueError(
                    f"objective_names must be as many different names as the list of objectives has, {len(objectives)} "
                    f"(a mapping has its own); got {list(objective_names)}"
                )
            named = dict(zip(objective_names, objectives, strict=True))
        if not named:
            raise ValueError("objectives is empty; name at least one")
        self.objectives = {name: as_scorer(scorer) for name, scorer in named.items()}
        super().__init__(next(iter(self.objectives.values())), default_step_reward=default_step_reward)

    async def _evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        verdicts = {name: await scorer.evaluate(trajectories) for name, scorer in self.objectives.items()}
        results = []
        for index in range(len(trajectories)):
            each = {name: column[index] for name, column in verdicts.items()}
            error = "; ".join(f"{name}: {verdict.error}" for name, verdict in each.items() if verdict.error)
            scores = {name: verdict.score for name, verdict in each.items()}
            results.append(EvaluateResult(float(np.mean(list(scores.values()))), metrics=scores, error=error))
        return results

    def _rewards(self, group: Sequence[Trajectory]) -> Floats:
        metrics = [each.evaluation.metrics for each in group if each.evaluation is not None]
        scores = np.array([[metric[name] for name in self.objectives] for metric in metrics], np.float64)
        fronts = pareto_fronts(scores)
        place = -fronts.astype(np.float64)
        for front in range(int(fronts.max(initial=-1)) + 1):
            members = np.flatnonzero(fronts == front)
            # Less than the distance between fronts, ordered by crowding.
            place[members] += normalised_ranks(crowding_distances(scores[members])) / 2
        return normalised_ranks(place)

    def close(self) -> None:
        for scorer in self.objectives.values():
            close_scorer(scorer)


def by_name(scorers: Sequence[Scorer | Callable[..., Any]]) -> dict[str, Scorer | Callable[..., Any]]:
    """Name objectives after their functions, with a number if the name is missing or ambiguous."""
    result: dict[str, Scorer | Callable[..., Any]] = {}
    for number, scorer in enumerate(scorers):
        name = getattr(scorer, "__name__", type(scorer).__name__)
        result[f"{name}_{number}" if name in result or name == "<lambda>" else name] = scorer
    return result


def pareto_fronts(scores: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Compute each entry's front, ``[n, objectives] -> [n]``, from 0; higher is better."""
    scores = np.asarray(scores, np.float64)
    better = (scores[None, :] >= scores[:, None]).all(-1) & (scores[None, :] > scores[:, None]).any(-1)
    fronts, front = np.full(len(scores), -1, np.int64), 0
    while (fronts < 0).any():
        left = fronts < 0
        free = left & ~(better & left[None, :]).any(axis=1)
        fronts[free] = front
        front += 1
    return fronts


def crowding_distances(scores: npt.ArrayLike) -> Floats:
    """Compute crowding distances, ``[n, objectives] -> [n]``: distance of the neighbours, summed over objectives;
    infinite at the ends."""
    scores = np.asarray(scores, np.float64)
    distances = np.zeros(len(scores))
    for column in scores.T:
        order, spread = np.argsort(column, kind="stable"), column.max() - column.min()
        if spread == 0:
            continue
        distances[order[[0, -1]]] = np.inf
        distances[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
    return distances


class SVRLRewardComputer(RewardComputer):
    """Quality of the answer against the cost of its verification: ``quality - cost_weight * cost / budget``.

    For episodes of :class:`~gradwire.rl.environments.SVRLEnvironment`.

    Args:
        scorer: Scores the quality.
        cost_weight: Penalty for spending the whole budget.
        mode, default_step_reward: As in :class:`RewardComputer`.
    """

    def __init__(
        self,
        scorer: Scorer | Callable[..., Any],
        *,
        cost_weight: float = 0.2,
        mode: Mode = "absolute",
        default_step_reward: float = 0.0,
    ) -> None:
        super().__init__(scorer, mode, default_step_reward=default_step_reward)
        self.cost_weight = cost_weight

    async def _evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        results = await super()._evaluate(trajectories)
        return [self._with_cost(trajectory, result) for trajectory, result in zip(trajectories, results)]

    def _with_cost(self, trajectory: Trajectory, result: EvaluateResult) -> EvaluateResult:
        data = trajectory.state.data if trajectory.state is not None else {}
        cost = float(data.get("verification_cost", data.get("tool_cost", 0.0)))
        share = min(1.0, cost / max(float(data.get("budget", cost)), 1e-12)) if cost else 0.0
        metrics = {**result.metrics, "quality": result.score, "verification_cost": cost}
        return replace(result, score=result.score - self.cost_weight * share, metrics=metrics)
