"""Stage two: PPO on the policy against the reward model, with an adaptive KL coefficient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from gradwire.errors import OperationError
from gradwire.loop.training_loop import Plan
from gradwire.rl.advantages import gae
from gradwire.rl.algorithms import AlgorithmConfig, AlgorithmOptions, PPOAlgorithm
from gradwire.rl.algorithms.sources import Part
from gradwire.rl.algorithms.update import Update
from gradwire.rl.metrics import Mean, Metric, Std
from gradwire.rl.rows import TrainingBatch
from gradwire.rl.types import EvaluateResult, Trajectory
from gradwire.rlhf.config import TrainingConfig
from gradwire.rlhf.origins import Origin
from gradwire.rlhf.reward_model import RewardModel
from gradwire.rlhf.state import POLICY, TrainingState

KL_GAIN = 0.1
KL_ERROR = 0.2


@dataclass(frozen=True)
class AdaptiveKL:
    """An adaptive KL coefficient: ``coef (1 + 0.1 clip(kl / target - 1, -0.2, 0.2))`` after each step.

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2, with ``kl`` of a whole answer in nats.
    """

    coef: float
    target: float | None

    def after(self, kl: float) -> AdaptiveKL:
        """Return the controller after a step with this mean KL."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -KL_ERROR), KL_ERROR)
        return replace(self, coef=self.coef * (1 + KL_GAIN * error))


class Scorer:
    """A reward model as the scorer of rollouts; scores are in standard deviations from the mean rating."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        details = self._model.details
        prompts = [str(each.task.prompt) for each in trajectories]
        scores = await self._model.score_async(prompts, [each.response for each in trajectories])
        return [
            EvaluateResult((float(score) - details.mean) / details.std, metrics={"score": float(score)})
            for score in scores
        ]


class FeedbackPPO(PPOAlgorithm):
    """PPO with the KL to a reference in each token's reward (loss ``enhanced_ppo``).

    Metrics in addition to the algorithm's own: ``train/kl`` (nats per answer), ``train/kl_coef``, ``train/value_error``
    and ``train/score_std``; ``rewards/score`` is the mean score.

    Args:
        settings: Settings of the training.
        origin: The initial weights, which are the reference of the KL.
        folder: Folder of ``metrics.jsonl``.
        state: Has the file of the policy's loop.
        options: ``tokenizer``, ``loggers`` and others: see :class:`~gradwire.rl.AlgorithmOptions`.
    """

    straggler_s = None  # independent of timing: a resumed training equals an uninterrupted one, also on a busy machine

    def __init__(
        self,
        service: Any,
        run: Any,
        prompts: Sequence[str],
        model: RewardModel,
        settings: TrainingConfig,
        *,
        origin: Origin,
        folder: Path,
        state: TrainingState,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        config = AlgorithmConfig(
            batch_size=settings.batch_size,
            group_size=1,
            ppo_epochs=settings.ppo_epochs,
            num_minibatches=settings.batch_size // settings.mini_batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            learning_rate=settings.learning_rate,
            max_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            context_tokens=origin.context_tokens - settings.max_new_tokens,
            num_parallel=settings.batch_size,
            seed=settings.seed,
            checkpoint_dir=folder,
            on_failure="warn",  # this step ends the training here, with an error of this package
            loss_kwargs={
                "gamma": settings.gamma,
                "gae_lambda": settings.lam,
                "clip_epsilon": settings.cliprange,
                "value_loss_coef": settings.vf_coef,
                "entropy_coef": 0.0,
            },
        )
        self._settings, self._origin, self._position = settings, origin, state
        self.kl = AdaptiveKL(settings.init_kl_coef, settings.target_kl)
        super().__init__(service, run, prompts, Scorer(model), config, **options)

    def _plan(self) -> Plan:
        return Plan("policy", first=0, save_every=None, keep=1)

    def _state_file(self) -> Path:
        return self._position.file(POLICY)

    def _state(self) -> Mapping[str, Any]:
        return {**super()._state(), "kl_coef": self.kl.coef}

    def _restore(self, state: Mapping[str, Any], *, logged: bool) -> None:
        super()._restore(state, logged=logged)
        self.kl = replace(self.kl, coef=state["kl_coef"])

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        batch = await super().training_batch(trajectories)
        columns, coef = batch.columns, self.kl.coef
        masks = [np.asarray(mask, bool) for mask in columns["loss_mask"]]
        theirs = await self.run.compute_logprobs(
            {"input_ids": columns["input_ids"], "loss_mask": columns["loss_mask"]},
            model=self._origin.reference(await self.run.info()),
            temperature=self.config.temperature,
        )
        rewards, values, lengths, kls = [], [], [], []
        for index, (mask, reference) in enumerate(zip(masks, theirs)):
            difference = np.asarray(columns["old_log_probs"][index])[mask] - np.asarray(reference)
            shaped = np.array(columns["rewards"][index], np.float32)
            shaped[mask] -= coef * difference
            columns["rewards"][index] = shaped
            rewards.append(shaped[mask])
            values.append(np.asarray(columns["old_values"][index])[mask])
            lengths.append(len(difference))
            kls.append(float(difference.sum()))
        estimated = np.concatenate(values)
        _, returns = gae(
            np.concatenate(rewards), estimated, lengths, gamma=self._settings.gamma, gae_lambda=self._settings.lam
        )
        kl = float(np.mean(kls))
        self.kl = self.kl.after(kl)
        scores = [each.evaluation.metrics["score"] for each in trajectories if each.evaluation is not None]
        figures: dict[str, Metric | float] = {
            "kl": Mean.of(kls),
            "kl_coef": coef,
            "value_error": Mean.of((estimated - returns) ** 2),
            "score_std": Std.of(scores),
        }
        return replace(batch, metrics={**batch.metrics, **figures})

    async def _learn(self, update: Update, part: Part, minibatches: int) -> dict[str, Metric]:
        if not any(each.ok for each in part.trajectories):
            first = part.trajectories[0]
            unscored = first.evaluation.error if first.evaluation is not None else ""
            raise OperationError(
                f"step {update.iteration + 1}: none of {len(part.trajectories)} answers can be trained on: "
                f"{first.error or unscored or 'the policy wrote nothing'}"
            )
        return await super()._learn(update, part, minibatches)
