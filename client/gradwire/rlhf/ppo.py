"""Stage two: PPO on the policy against the reward model, with an adaptive KL coefficient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.errors import OperationError
from gradwire.rl.advantages import gae
from gradwire.rl.algorithms import AlgorithmConfig, PPOAlgorithm
from gradwire.rl.metrics import Mean, Metric, Std
from gradwire.rl.rows import TrainingBatch
from gradwire.rl.types import EvaluateResult, Trajectory
from gradwire.rlhf.config import TrainingConfig
from gradwire.rlhf.reward_model import RewardModel

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
        reference: The reference of the KL.
        settings: Settings of the training.
        folder: Folder of ``metrics.jsonl``.
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
        reference: str,
        context_tokens: int,
        folder: Path,
        tokenizer: Any = None,
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
            context_tokens=context_tokens - settings.max_new_tokens,
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
        super().__init__(service, run, prompts, Scorer(model), config, tokenizer=tokenizer)
        self._settings, self._reference = settings, reference
        self.kl = AdaptiveKL(settings.init_kl_coef, settings.target_kl)

    def skip_to(self, step: int, kl_coef: float) -> None:
        """Continue after this many steps; the run already has the state after them."""
        self.state = replace(self.state, iteration=step)
        self.kl = replace(self.kl, coef=kl_coef)
        self._reporter.forget(step)

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        batch = await super().training_batch(trajectories)
        columns, coef = batch.columns, self.kl.coef
        masks = [np.asarray(mask, bool) for mask in columns["loss_mask"]]
        theirs = await self.run.compute_logprobs(
            {"input_ids": columns["input_ids"], "loss_mask": columns["loss_mask"]},
            model=self._reference,
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

    async def _learn(self, iteration: int, trajectories: list[Trajectory], minibatches: int) -> dict[str, Metric]:
        if not any(each.ok for each in trajectories):
            first = trajectories[0]
            unscored = first.evaluation.error if first.evaluation is not None else ""
            raise OperationError(
                f"step {iteration + 1}: none of {len(trajectories)} answers can be trained on: "
                f"{first.error or unscored or 'the policy wrote nothing'}"
            )
        return await super()._learn(iteration, trajectories, minibatches)
