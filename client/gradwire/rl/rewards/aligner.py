"""Assign the step outputs of a result to the steps of its trajectory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

from gradwire.rl.types import EvaluateResult, StepData, Task, Trajectory

logger = logging.getLogger("gradwire.rl")


class StepAlignmentError(ValueError):
    """A step output names a step that does not exist, or names a step twice."""


def align(trajectory: Trajectory, result: EvaluateResult, *, default_step_reward: float = 0.0) -> None:
    """Write a result into the trajectory: its reward, and each step's reward and metrics.

    A step that no step output names gets ``default_step_reward``. Without any step outputs, the last step
    gets the score: the credit of an episode that is judged by its end.

    Raises:
        StepAlignmentError: An index matches no step, or is given twice. Nothing is written then.
    """
    steps = trajectory.steps
    outputs = result.step_outputs or ()
    rewards: dict[int, int] = {}
    for number, output in enumerate(outputs):
        index = output.step_index if output.step_index >= 0 else len(steps) + output.step_index
        if not 0 <= index < len(steps):
            there = f"steps 0 to {len(steps) - 1}" if steps else "no steps"
            raise StepAlignmentError(
                f"step_outputs[{number}] has step_index {output.step_index}, but the trajectory has {there}; an index "
                "counts the policy's turns, not messages"
            )
        if index in rewards:
            raise StepAlignmentError(
                f"step_outputs[{number}] and step_outputs[{rewards[index]}] are both for step {index}; add them up"
            )
        rewards[index] = number
    name = f"trajectory {trajectory.group}.{trajectory.member}"
    logger.debug("aligner, %s: score %.6g, step outputs %s", name, result.score,
                 [(each.step_index, each.base_reward) for each in outputs])  # fmt: skip
    trajectory.evaluation, trajectory.reward = result, result.score
    for index, step in enumerate(steps):
        if index in rewards:
            output = outputs[rewards[index]]
            step.reward, step.metrics, step.rewarded = output.base_reward, output.metrics, True
        else:
            step.reward, step.metrics, step.rewarded = default_step_reward, {}, False
    if steps and not outputs:
        steps[-1].reward += result.score
        steps[-1].rewarded = True
    logger.debug("aligner, %s: rewards of steps %s", name, [step.reward for step in steps])


def align_batch(
    trajectories: Sequence[Trajectory], results: Sequence[EvaluateResult], *, default_step_reward: float = 0.0
) -> None:
    """Apply :func:`align` to one result per trajectory; errors name the trajectory.

    A result that cannot be aligned is replaced by one with an ``error``, which affects only its own trajectory.

    Raises:
        StepAlignmentError: The numbers of results and trajectories differ.
    """
    if len(trajectories) != len(results):
        raise StepAlignmentError(f"{len(results)} results for {len(trajectories)} trajectories")
    for trajectory, result in zip(trajectories, results):
        try:
            align(trajectory, result, default_step_reward=default_step_reward)
        except StepAlignmentError as error:
            where = f"trajectory {trajectory.group}.{trajectory.member}"
            trajectory.evaluation = EvaluateResult(0.0, error=f"{where}: {error}")
            trajectory.reward = 0.0


def align_rewards_with_step_data(
    eval_results: Sequence[EvaluateResult],
    rollout_step_data: Sequence[Sequence[StepData]],
    mode: Literal["batch", "pointwise"] = "batch",
    *,
    default_step_reward: float = 0.0,
) -> list[list[StepData]]:
    """Write results into the steps: each step's ``reward`` and metrics. Returns the steps.

    The steps of a rollout whose result failed, or names a step that does not exist, have NaN as rewards, which is
    logged; ``calculate_advantages`` leaves that rollout out.

    Args:
        eval_results: One result per rollout.
        rollout_step_data: The steps of each rollout.
        mode: ``"pointwise"``: both belong to one rollout, without a list around them.
        default_step_reward: Reward of steps that no step output names.

    Raises:
        StepAlignmentError: No result can be used; names what is wrong with the first.
    """
    if mode not in ("batch", "pointwise"):
        raise ValueError(f'mode must be "batch" or "pointwise", got {mode!r}')
    results: Any = eval_results
    rollouts: Any = rollout_step_data
    if mode == "pointwise":
        results = [results] if isinstance(results, EvaluateResult) else results
        rollouts = [rollouts] if rollouts and isinstance(rollouts[0], StepData) else rollouts
    if len(results) != len(rollouts):
        raise StepAlignmentError(f"{len(results)} results for {len(rollouts)} rollouts")
    wrong = []
    for number, (result, steps) in enumerate(zip(results, rollouts)):
        try:
            if result.error:
                raise StepAlignmentError(f"no reward: {result.error}")
            align(
                Trajectory(Task(""), member=number, steps=list(steps)), result, default_step_reward=default_step_reward
            )
        except StepAlignmentError as error:
            wrong.append(f"rollout {number}: {error}")
            logger.warning("left out of the advantages, %s", wrong[-1])
            for step in steps:
                step.reward, step.metrics, step.rewarded = math.nan, {}, False
    if results and len(wrong) == len(results):
        raise StepAlignmentError(wrong[0])
    return [list(steps) for steps in rollouts]
