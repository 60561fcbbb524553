"""Blocking reward computation after collection, for any object with ``compute_rewards``."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from gradwire.rl.primitives.background import wait_for
from gradwire.rl.rewards import ParetoRewardComputer as AsyncParetoRewardComputer
from gradwire.rl.rewards import RewardComputer as AsyncRewardComputer
from gradwire.rl.rewards import SVRLRewardComputer as AsyncSVRLRewardComputer
from gradwire.rl.rewards.computer import by_name, normalised_ranks
from gradwire.rl.rewards.functions import to_result
from gradwire.rl.threads import called
from gradwire.rl.types import EvaluateResult, Trajectory

Method = Literal["absolute", "relative", "pareto"]
Objective = Callable[[Trajectory], float]


class EachScored:
    """Scores trajectories one by one with a function; a failure costs only its trajectory."""

    def __init__(self, function: Callable[[Trajectory], Any]) -> None:
        self._function = function

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        results = []
        for each in trajectories:
            try:
                results.append(to_result(await called(self._function, each)))
            except Exception as error:  # the user's function may raise anything
                results.append(EvaluateResult(0.0, error=f"{type(error).__name__}: {error}"))
        return results


class ComputedRewards:
    """Scores with an object that has ``compute_rewards(trajectories, method=...)``.

    Args:
        computer: The object; ``method`` is passed if it accepts one.
        method: The method of the computation.
    """

    def __init__(self, computer: Any, method: Method = "absolute") -> None:
        if not callable(getattr(computer, "compute_rewards", None)):
            raise TypeError(
                f"the reward computer is {type(computer).__name__}; it must have compute_rewards(trajectories, "
                "method=...)"
            )
        self._computer, self._method = computer, method
        parameters = inspect.signature(computer.compute_rewards).parameters.values()
        self._takes_method = any(each.name == "method" or each.kind is each.VAR_KEYWORD for each in parameters)

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        options = {"method": self._method} if self._takes_method else {}
        name = type(self._computer).__name__
        try:
            rewards = list(await called(lambda: self._computer.compute_rewards(list(trajectories), **options)))
        except Exception as error:  # the user's object may raise anything
            *_, (_, line) = traceback.walk_tb(error.__traceback__)
            failed = EvaluateResult(0.0, error=f"{name}: {type(error).__name__}: {error} (line {line})")
            return [failed] * len(trajectories)
        if len(rewards) != len(trajectories):
            failed = EvaluateResult(
                0.0, error=f"{name} returned {len(rewards)} rewards for {len(trajectories)} trajectories"
            )
            return [failed] * len(trajectories)
        return [self._result(each) for each in rewards]

    def _result(self, reward: Any) -> EvaluateResult:
        try:
            return to_result(reward)
        except (TypeError, ValueError) as error:
            return EvaluateResult(0.0, error=f"{type(self._computer).__name__}: {error}")


def rewards_by(computer: AsyncRewardComputer, trajectories: Sequence[Trajectory]) -> list[float]:
    """Compute rewards with a computer of the toolkit, write them into the trajectories and return them.

    Trajectories of one group are compared with each other; if no two share a group, all are compared.

    Raises:
        ValueError: A trajectory could not be scored; names it.
    """
    alone = len({each.group for each in trajectories}) == len(trajectories)
    compared = [replace(each, group=0) for each in trajectories] if alone else list(trajectories)
    wait_for(computer.compute(compared))
    for index, (each, scored) in enumerate(zip(trajectories, compared)):
        each.reward, each.evaluation = scored.reward, scored.evaluation
        if scored.evaluation is not None and scored.evaluation.error:
            raise ValueError(f"trajectory {index} could not be scored: {scored.evaluation.error}")
    return [each.reward for each in trajectories]


class ParetoRewardComputer:
    """Several objectives at once without weights: see :class:`gradwire.rl.ParetoRewardComputer`.

    Args:
        objective_functions: Functions ``trajectory -> float``; higher is better.
        objective_names: Their names; by default the functions' own.
        objectives: Alias of ``objective_functions``.
    """

    def __init__(
        self,
        objective_functions: Sequence[Objective] = (),
        objective_names: Sequence[str] | None = None,
        *,
        objectives: Sequence[Objective] = (),
    ) -> None:
        functions = [*objective_functions, *objectives]
        names = list(objective_names) if objective_names is not None else list(by_name(functions))
        if not functions:
            raise ValueError("pass at least one objective: objective_functions=[...]")
        if len(names) != len(functions) or len(set(names)) != len(names):
            raise ValueError(f"objective_names: {len(functions)} objectives need as many different names, got {names}")
        self._scorers = {name: EachScored(function) for name, function in zip(names, functions)}

    def compute_rewards(self, trajectories: Sequence[Trajectory], method: Method = "pareto") -> list[float]:
        """Return the rewards.

        ``pareto``: the rank by fronts and crowding, 0 to 1. ``absolute``: the mean of the objectives; ``relative``:
        its rank, 0 to 1. The objectives are in each trajectory's ``evaluation.metrics``.
        """
        computer = AsyncParetoRewardComputer(self._scorers)
        rewards = rewards_by(computer, trajectories)
        if _checked(method) == "pareto":
            return rewards
        scores = [each.evaluation.score for each in trajectories if each.evaluation is not None]
        return scores if method == "absolute" else normalised_ranks(scores).tolist()


class SVRLRewardComputer:
    """Quality of the answer minus the cost of its verification: see :class:`gradwire.rl.SVRLRewardComputer`.

    Args:
        quality: ``trajectory -> float``; by default 1 if ``<answer>…</answer>`` is the task's ``ground_truth``.
        cost_weight: Penalty for spending the whole budget.
    """

    def __init__(self, quality: Objective | None = None, *, cost_weight: float = 0.2) -> None:
        self._quality, self._cost_weight = EachScored(quality or answered), cost_weight

    def compute_rewards(self, trajectories: Sequence[Trajectory], method: Method = "absolute") -> list[float]:
        """Return the rewards. ``absolute``: the score. ``relative``: its rank, 0 to 1."""
        if _checked(method) == "pareto":
            raise ValueError('SVRLRewardComputer has one objective; method is "absolute" or "relative"')
        mode: Any = method
        return rewards_by(
            AsyncSVRLRewardComputer(self._quality, cost_weight=self._cost_weight, mode=mode), trajectories
        )


def answered(trajectory: Trajectory) -> float:
    """Return 1 if the committed answer of an episode of :class:`SVRLEnvironment` is the ground truth."""
    if trajectory.ground_truth is None:
        raise ValueError("the task has no ground_truth; use prompts with one, or SVRLRewardComputer(quality=...)")
    answer = trajectory.state.data.get("answer") if trajectory.state is not None else None
    return float(answer is not None and str(answer).strip() == str(trajectory.ground_truth).strip())


def _checked(method: str) -> str:
    if method not in ("absolute", "relative", "pareto"):
        raise ValueError(f'method must be "absolute", "relative" or "pareto", got {method!r}')
    return method
