"""Scores from other sources: a reward model on the server, or the environment itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.errors import GradwireError
from gradwire.rl.generation import ChatCodec, TextCodec
from gradwire.rl.prompts import ChatTemplate
from gradwire.rl.types import EvaluateResult, StepOutput, Trajectory


class RewardModel:
    """A run with a reward head, used as a scorer.

    Args:
        run: A ``TrainingClient`` whose run has ``head="reward"``.
        codec: The reward model's tokenizer, whose chat template formats conversations (their contents are joined if it
            has none); without one the reward model reads the exact tokens of the policy's last prompt and response,
            which is right if both share one tokenizer.
        template: Formats conversations instead of the tokenizer's chat template.
        center, scale: The score is ``(reward - center) / scale``.
        max_tokens: Maximum row length; a longer row loses its beginning.
    """

    def __init__(
        self,
        run: Any,
        *,
        codec: TextCodec | None = None,
        template: ChatTemplate | None = None,
        center: float = 0.0,
        scale: float = 1.0,
        max_tokens: int | None = None,
    ) -> None:
        if template is not None and codec is None:
            raise ValueError("a template produces text, so a codec is needed as well")
        self._run, self._codec, self._template = run, codec, template
        self._center, self._scale, self._max_tokens = center, scale, max_tokens

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        written = [each for each in trajectories if each.steps]
        verdicts = iter(await self._verdicts(written) if written else ())
        nothing = EvaluateResult(0.0, error="the reward model: the policy wrote nothing")
        return [next(verdicts) if each.steps else nothing for each in trajectories]

    async def _verdicts(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        rows = [row[-self._max_tokens :] if self._max_tokens else row for row in await self._rows(trajectories)]
        try:
            rewards = await self._run.compute_rewards({"input_ids": [row.tolist() for row in rows]})
        except GradwireError as error:
            return [EvaluateResult(0.0, error=f"the reward model: {error}")] * len(trajectories)
        scores = (np.asarray(rewards, np.float64) - self._center) / self._scale
        return [EvaluateResult(float(score), metrics={"reward_model": float(score)}) for score in scores]

    async def _rows(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        if self._codec is None:
            return [np.concatenate([t.steps[-1].prompt_ids, t.steps[-1].response_ids]) for t in trajectories]
        if self._template is not None:
            return list(await self._codec.encode([self._template(t.messages) for t in trajectories]))
        return [await self._row(self._codec, t) for t in trajectories]

    async def _row(self, codec: TextCodec, trajectory: Trajectory) -> np.ndarray:
        if isinstance(codec, ChatCodec):
            rendered = await codec.render(trajectory.messages, add_generation_prompt=False)
            if rendered is not None:
                return rendered
        (row,) = await codec.encode(["".join(message["content"] for message in trajectory.messages)])
        return row


class EnvironmentReward:
    """The environment's own rewards: the evaluation that it gave the trajectory, as
    :class:`~gradwire.rl.AgentEnvironment` does, or ``data["env_rewards"]``, whose sum is the score and each of which is
    its step's reward."""

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        return [self._of(trajectory) for trajectory in trajectories]

    def _of(self, trajectory: Trajectory) -> EvaluateResult:
        if trajectory.evaluation is not None:
            return trajectory.evaluation
        rewards = trajectory.state.data.get("env_rewards") if trajectory.state is not None else None
        if rewards is None:
            return EvaluateResult(
                0.0,
                error='the environment gives no rewards of its own: its step() returns data={"env_rewards": [...]}, '
                "one number for each step so far (an AgentEnvironment has reward=…); or choose another reward",
            )
        return EvaluateResult(
            float(sum(rewards)), tuple(StepOutput(index, float(reward)) for index, reward in enumerate(rewards))
        )


def environment_reward() -> EnvironmentReward:
    """Return the scorer of environments with own rewards: see :class:`EnvironmentReward`."""
    return EnvironmentReward()
