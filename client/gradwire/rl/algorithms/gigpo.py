"""GiGPO with PPO's clipped objective: step-level credit from episodes that pass through the same state.

Feng et al. 2025, Group-in-Group Policy Optimization for LLM Agent Training (arXiv 2505.10978).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import numpy as np

from gradwire.rl.advantages import Floats, gigpo_step_groups, group_advantages, rewards_to_go, subgroup_advantages
from gradwire.rl.algorithms.base import Algorithm, AlgorithmOptions
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.grpo import idle_groups
from gradwire.rl.metrics import Mean, Metric, Std, Sum
from gradwire.rl.rewards.computer import by_group
from gradwire.rl.rows import OF_GROUPS, TrainingBatch, grouped_columns, rows_of, share_prompts, trajectory_weights
from gradwire.rl.types import StepData, Task, Trajectory
from gradwire.wire.options import check_options

logger = logging.getLogger("gradwire.rl.gigpo")

StateHash = Callable[[StepData], Hashable]


def anchor_state(step: StepData) -> Hashable:
    """Return the environment's key of the state in which the step was taken (by default its observation)."""
    key: Hashable = step.state_key
    return key


def _hashable(key: Any) -> Hashable:
    """Return the key, or its text if it contains lists or dicts; equal keys have equal texts."""
    try:
        hash(key)
    except TypeError:
        return repr(key)
    result: Hashable = key
    return result


@dataclass(frozen=True)
class GiGPOCredit:
    """The stages of the computation.

    Attributes:
        episode: ``[trajectories]``, ``A_E``.
        returns: ``[steps]``, ``G_t``, of all trajectories' steps one after the other.
        step: ``[steps]``, ``A_S``.
        advantages: ``[steps]``, ``A_E + omega A_S``.
        step_groups: The step indices of each anchor state, ``G_k``.
    """

    episode: Floats
    returns: Floats
    step: Floats
    advantages: Floats
    step_groups: list[np.ndarray]

    @property
    def singletons(self) -> Mean:
        """Share of steps that are alone at their state and so have no step-level advantage."""
        return Mean(sum(len(group) == 1 for group in self.step_groups), len(self.step))


def gigpo_credit(
    trajectories: Sequence[Trajectory],
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    scale: bool = True,
    state_hash: StateHash = anchor_state,
) -> GiGPOCredit:
    """Compute the advantages of all steps and write them into the steps; each stage is logged at DEBUG.

    Args:
        trajectories: Trajectories with rewards, and steps with rewards; groups may come in any order.
        gamma: Discount per step.
        omega: Weight of the step level.
        scale: Divide by the standard deviations of groups.
        state_hash: Maps a step to a key of its state.
    """
    episode = np.zeros(len(trajectories))
    place = {id(each): index for index, each in enumerate(trajectories)}
    for members in by_group(trajectories):
        at = [place[id(each)] for each in members]
        episode[at] = group_advantages([each.reward for each in members], [len(members)], scale=scale)
    steps = [step for each in trajectories for step in each.steps]
    counts = [len(each.steps) for each in trajectories]
    returns = rewards_to_go([step.reward for step in steps], counts, gamma)
    states = [_hashable(state_hash(step)) for step in steps]
    group_ids = [each.group for each in trajectories for _ in each.steps]
    groups = gigpo_step_groups(group_ids, states)
    keys = np.zeros(len(steps), np.int64)
    for key, members_of_key in enumerate(groups):
        keys[members_of_key] = key
    step_level = subgroup_advantages(returns, keys, scale=scale)
    advantages = np.repeat(episode, counts) + omega * step_level
    for step, advantage in zip(steps, advantages):
        step.advantage = float(advantage)
    credit = GiGPOCredit(episode, returns, step_level, advantages, groups)
    if logger.isEnabledFor(logging.DEBUG):
        _explain(trajectories, states, group_ids, credit)
    return credit


def calculate_advantages(
    batch_of_step_data_lists: Sequence[Sequence[StepData]],
    final_scores_for_rollouts: Sequence[float] | None = None,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    state_hashing_function: StateHash = anchor_state,
    default_step_reward: float = 0.0,
    group_ids: Sequence[int] | None = None,
) -> list[list[StepData]]:
    """Compute GiGPO's advantages ``A_E + omega A_S`` and write them into the steps. Returns the steps.

    A rollout with a NaN among its rewards, one whose evaluation failed, gets advantages of 0 and is no part of its
    group's mean.

    Args:
        batch_of_step_data_lists: The steps of each rollout, with their rewards.
        final_scores_for_rollouts: Score of each rollout for ``A_E``; by default the sum of its steps' rewards.
        omega: Weight of the step level.
        gamma: Discount per step.
        state_hashing_function: Maps a step to a key of its state.
        default_step_reward: Replaces a reward of 0 of the steps that no step output names; a 0.0 that one names stays.
        group_ids: Group of each rollout; by default all started from one state.
    """
    rollouts = [list(steps) for steps in batch_of_step_data_lists]
    scores = final_scores_for_rollouts
    if scores is None:
        scores = [sum(step.reward for step in steps) for steps in rollouts]
    groups = [0] * len(rollouts) if group_ids is None else list(group_ids)
    for name, given in (("final_scores_for_rollouts", scores), ("group_ids", groups)):
        if len(given) != len(rollouts):
            raise ValueError(f"{name} has {len(given)} entries for {len(rollouts)} rollouts")
    for step in (step for steps in rollouts for step in steps):
        if not step.rewarded and not step.reward:
            step.reward = default_step_reward
    trajectories = []
    for member, (group, steps, score) in enumerate(zip(groups, rollouts, scores)):
        if any(math.isnan(step.reward) for step in steps):
            for step in steps:
                step.advantage = 0.0
        else:
            trajectories.append(Trajectory(Task(""), group, member, steps=steps, reward=float(score)))
    gigpo_credit(trajectories, gamma=gamma, omega=omega, state_hash=state_hashing_function)
    return rollouts


def _explain(
    trajectories: Sequence[Trajectory], states: Sequence[Hashable], group_ids: Sequence[int], credit: GiGPOCredit
) -> None:
    for each, advantage in zip(trajectories, credit.episode):
        logger.debug("A_E  group %d member %d: reward %.4g, A_E %.4g", each.group, each.member, each.reward, advantage)
    for number, members in enumerate(credit.step_groups):
        first = members[0]
        logger.debug("anchor state %d of group %d: %.200r", number, group_ids[first], states[first])
        numbers = ", ".join(f"{value:.4g}" for value in credit.returns[members])
        logger.debug("G_k  %d: steps %s, returns [%s]", number, members.tolist(), numbers)
        logger.debug("A_S  %d: [%s]", number, ", ".join(f"{value:.4g}" for value in credit.step[members]))
    for each in trajectories:
        for step in each.steps:
            logger.debug("A_GiG  group %d member %d step %d: %.4g", each.group, each.member, step.index, step.advantage)


class GiGPOOptions(AlgorithmOptions, total=False):
    """The keyword arguments of :class:`GiGPOAlgorithm`: those of every algorithm, and its own.

    Attributes:
        omega: Weight of the step level, 1 by default; 0 is GRPO over trajectories.
        gamma: Discount per step; 0.95 by default.
        state_hashing_function: Maps a step to a key of its state; by default the environment's ``state_key``.
        default_step_reward: Reward of steps that the reward function does not name; None, the default, leaves it to the
            reward computer.
    """

    omega: float
    gamma: float
    state_hashing_function: StateHash
    default_step_reward: float | None


class GiGPOAlgorithm(Algorithm):
    """PPO's clipped objective with GiGPO's advantages, computed on the client (loss ``gigpo``).

    Args:
        options: ``omega``, ``gamma`` and others: see :class:`GiGPOOptions`.
    """

    compares_groups = True
    takes_own_logprobs = True

    def __init__(
        self,
        service: Any,
        run: Any,
        tasks: Any,
        reward: Any,
        config: AlgorithmConfig | None = None,
        **options: Unpack[GiGPOOptions],
    ) -> None:
        check_options(GiGPOOptions, options, type(self))
        omega, gamma = options.pop("omega", 1.0), options.pop("gamma", 0.95)
        state_hash = options.pop("state_hashing_function", anchor_state)
        default_step_reward = options.pop("default_step_reward", None)
        super().__init__(service, run, tasks, reward, config, **cast("AlgorithmOptions", options))
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be from 0 to 1, got {gamma}")
        self.omega, self.gamma, self.state_hash = omega, gamma, state_hash
        if default_step_reward is not None:
            self.reward.default_step_reward = default_step_reward

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        kwargs = {"reduction": "token_mean", **self._loss_kwargs()}
        credit = gigpo_credit(
            trajectories,
            gamma=self.gamma,
            omega=self.omega,
            scale=bool(kwargs.get("scale_rewards", True)),
            state_hash=self.state_hash,
        )
        rows = rows_of(trajectories)
        weights = dict(zip(map(id, rows), trajectory_weights(rows, kwargs["reduction"])))

        def fields(row: Any) -> dict[str, Any]:
            advantages = row.spread([step.advantage for step in trajectories[row.trajectory].steps])
            return {"advantages": advantages[row.prompt_length :] * weights[id(row)]}

        metrics: dict[str, Metric | float] = {
            "rows": Sum(len(rows)),
            "idle_groups": idle_groups(trajectories),
            "anchor_states": Sum(len(credit.step_groups)),
            "singleton_steps": credit.singletons,
            "episode_advantage_std": Std.of(credit.episode),
            "step_advantage_std": Std.of(credit.step),
        }
        shared = share_prompts(rows, trajectories)
        kwargs, trained = await self._corrected(rows, trajectories, kwargs)
        columns = grouped_columns(rows, trajectories, fields, trained, bool(kwargs.get("sampler_correction")))
        return TrainingBatch("gigpo", kwargs, columns, metrics, () if shared else OF_GROUPS)
