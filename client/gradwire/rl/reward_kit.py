"""The four stages of credit assignment as separate calls: episodes, sandboxed rewards, alignment, advantages.

For custom loops over :class:`~gradwire.rl.RLRolloutWorker`; :class:`~gradwire.rl.GiGPOAlgorithm` runs the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from gradwire.rl.algorithms.gigpo import StateHash, anchor_state, gigpo_credit
from gradwire.rl.rewards.aligner import StepAlignmentError, align
from gradwire.rl.rewards.functions import RewardFunction
from gradwire.rl.rewards.sandbox import SandboxLimits
from gradwire.rl.types import Action, EvaluateResult, Message, StepData, Task, Trajectory


class RewardSandbox:
    """Runs a reward function over conversations, in the sandbox.

    Args:
        function: A function or ``@reward_function``, see ``docs/reward_functions.md``; it may take ``messages``,
            ``ground_truth``, ``response``, ``prompt`` and ``steps``.
        batch: The function takes lists of these; all conversations form one group.
        limits: Limits of one evaluation.
    """

    def __init__(
        self, function: Callable[..., Any], *, batch: bool = False, limits: SandboxLimits | None = None
    ) -> None:
        self._function = (
            function if isinstance(function, RewardFunction) else RewardFunction(function, batch=batch, limits=limits)
        )

    async def execute_user_reward_code(
        self, rollouts_messages: Sequence[Sequence[Message]], ground_truths: Sequence[Any]
    ) -> list[EvaluateResult]:
        """Evaluate the conversations, in order; a failure affects only its own conversation and sets its ``error``.

        Args:
            rollouts_messages: The conversations.
            ground_truths: One per conversation.
        """
        if len(rollouts_messages) != len(ground_truths):
            raise ValueError(f"there are {len(rollouts_messages)} rollouts and {len(ground_truths)} ground truths")
        rollouts = [
            told(messages, truth, member)
            for member, (messages, truth) in enumerate(zip(rollouts_messages, ground_truths))
        ]
        return await self._function.evaluate(rollouts)

    def close(self) -> None:
        """Stop the sandbox's processes."""
        self._function.close()


def told(messages: Sequence[Message], ground_truth: Any, member: int) -> Trajectory:
    """Build a trajectory from a conversation: one step per assistant turn, without tokens."""
    first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    steps: list[StepData] = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            seen = messages[at - 1]["content"] if at else ""
            none, action = np.zeros(0, np.int64), Action(message["content"])
            steps.append(StepData(len(steps), seen, seen, none, action, none, none.astype(np.float32)))
    opening = list(messages[:first])
    prompt = opening[0]["content"] if len(opening) == 1 and opening[0]["role"] == "user" else opening
    return Trajectory(Task(prompt, ground_truth), member=member, steps=steps, messages=tuple(messages))


def align_rewards_with_step_data(
    eval_results: Sequence[EvaluateResult],
    rollout_step_data: Sequence[Sequence[StepData]],
    mode: Literal["batch", "pointwise"] = "batch",
    *,
    default_step_reward: float = 0.0,
) -> list[list[StepData]]:
    """Write results into the steps: each step's ``reward`` and metrics. Returns the steps.

    Args:
        eval_results: One result per rollout.
        rollout_step_data: The steps of each rollout.
        mode: ``"pointwise"``: both belong to one rollout, without a list around them.
        default_step_reward: Reward of steps that no step output names.

    Raises:
        StepAlignmentError: A result failed or names a step that does not exist; names the rollout.
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
    for number, (result, steps) in enumerate(zip(results, rollouts)):
        if result.error:
            raise StepAlignmentError(f"rollout {number} has no reward: {result.error}")
        try:
            align(
                Trajectory(Task(""), member=number, steps=list(steps)), result, default_step_reward=default_step_reward
            )
        except StepAlignmentError as error:
            raise StepAlignmentError(f"rollout {number}: {error}") from None
    return [list(steps) for steps in rollouts]


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
    trajectories = [
        Trajectory(Task(""), group, member, steps=steps, reward=float(score))
        for member, (group, steps, score) in enumerate(zip(groups, rollouts, scores))
    ]
    gigpo_credit(trajectories, gamma=gamma, omega=omega, state_hash=state_hashing_function)
    return rollouts
