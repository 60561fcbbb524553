"""Settings of the algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradwire.rl.generation import SamplingParams


@dataclass(frozen=True)
class AlgorithmConfig:
    """What every algorithm takes.

    Attributes:
        batch_size: tasks an iteration.
        group_size: trajectories a task.
        ppo_epochs: passes over the trajectories of an iteration.
        num_minibatches: parts that a pass is cut into, each an optimizer step; groups stay whole.
        gradient_accumulation_steps: minibatches an optimizer step instead of one; they may be of several passes, and
            the last step of an iteration takes what is left.
        learning_rate: of AdamW.
        warmup_iterations: over which the learning rate rises to that.
        max_grad_norm: the gradient is scaled down to it.
        weight_decay: of AdamW.
        loss_kwargs: arguments of the loss beyond what the algorithm sets; they have the last word.
        reference_model: what KL is measured against: ``"base"``, ``"ema"``, a checkpoint, a model; None: no KL.
        beta: weight of the KL.
        reference_ema: decay of the reference ``"ema"``, which follows the policy each iteration; None: it does not.
        max_tokens, temperature, top_k, top_p: of sampling. The loss scores at the same temperature.
        num_parallel: episodes under way at once.
        max_steps_per_rollout: an episode that the environment has not ended by then is truncated.
        rollout_timeout_s: of an episode.
        context_tokens: longest prompt.
        on_stale: what becomes of groups that are older than ``train(mode="async", max_staleness=)`` allows. ``drop``:
            they are replaced by new ones. ``correct``: they are trained on, and each token is weighed by the truncated
            ratio of its probability under the policy that is trained to that under the one that wrote it (losses that
            have ``sampler_correction``, or weigh by importance anyway).
        dynamic_sampling: groups whose rewards are all equal are dropped, and other tasks are sampled in their place
            (Yu et al. 2025, DAPO).
        max_resampling: rounds of resampling an iteration, after which it goes on with what there is.
        on_failure: ``stop``: an iteration in which every episode or every reward failed ends the training, with the
            first failure and its place. ``warn``: it is skipped, with a warning.
        max_staleness: iterations that rollouts may be behind the policy that trains on them. 0: each waits for the
            other. 1: the next rollouts are collected while this iteration trains. Whatever it is, log-probabilities
            of the sampler are what the ratios are taken to, which corrects for it.
        replay_fraction: groups from the replay buffer, as a share of ``batch_size``; where the algorithm's loss can.
        seed: of tasks, environments and sampling.
        eval_every: iterations between evaluations; 0: never.
        eval_temperature: 0 is greedy.
        eval_trajectories: an evaluation task.
        success_threshold: a score from which a held-out trajectory counts as a success.
        checkpoint_dir: for the state, recorded trajectories and the log, ``metrics.jsonl``; None: the log alone is
            written, to ``runs/RUN_ID``, and ``resume`` cannot go on from there.
        save_every: iterations between checkpoints; 0: never.
        record_every: record the trajectories of every so many iterations; 0: none.
    """

    batch_size: int = 16
    group_size: int = 8
    ppo_epochs: int = 1
    num_minibatches: int = 1
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    warmup_iterations: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reference_model: str | None = None
    beta: float = 0.01
    reference_ema: float | None = None
    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    num_parallel: int = 256
    max_steps_per_rollout: int = 16
    rollout_timeout_s: float | None = None
    context_tokens: int | None = None
    max_staleness: int = 0
    on_stale: Literal["drop", "correct"] = "drop"
    dynamic_sampling: bool = False
    max_resampling: int = 10
    on_failure: Literal["stop", "warn"] = "stop"
    replay_fraction: float = 0.0
    seed: int = 0
    eval_every: int = 0
    eval_temperature: float = 0.0
    eval_trajectories: int = 1
    success_threshold: float = 1.0
    checkpoint_dir: Path | str | None = None
    save_every: int = 0
    record_every: int = 0

    def __post_init__(self) -> None:
        counts = (
            "batch_size", "group_size", "ppo_epochs", "num_minibatches", "gradient_accumulation_steps", "max_tokens",
            "num_parallel", "max_steps_per_rollout", "eval_trajectories", "max_resampling",
        )  # fmt: skip
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; this is {getattr(self, name)}")
        for name in (
            "max_staleness",
            "eval_every",
            "save_every",
            "record_every",
            "warmup_iterations",
            "replay_fraction",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; this is {getattr(self, name)}")
        for name, choices in (("on_stale", ("drop", "correct")), ("on_failure", ("stop", "warn"))):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} must be "{choices[0]}" or "{choices[1]}"; this is {getattr(self, name)!r}')
        if self.save_every and self.checkpoint_dir is None:
            raise ValueError("save_every needs a checkpoint_dir")
        if self.record_every and self.checkpoint_dir is None:
            raise ValueError("record_every needs a checkpoint_dir")
        if self.reference_ema is not None and not 0 <= self.reference_ema <= 1:
            raise ValueError(
                f"reference_ema is the share of the old reference that stays, from 0 to 1; this is {self.reference_ema}"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0 to learn from samples; this is {self.temperature}")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_k, self.top_p)

    @property
    def folder(self) -> Path | None:
        return None if self.checkpoint_dir is None else Path(self.checkpoint_dir)

    def rate(self, iteration: int) -> float:
        """The learning rate of an iteration."""
        warm = min(1.0, (iteration + 1) / self.warmup_iterations) if self.warmup_iterations else 1.0
        return self.learning_rate * warm

    def kl_kwargs(self) -> dict[str, Any]:
        """Arguments that every loss of the policy takes."""
        kwargs: dict[str, Any] = {} if self.temperature == 1.0 else {"temperature": self.temperature}
        if self.reference_model is not None:
            kwargs |= {"reference_model": self.reference_model, "beta": self.beta}
        return kwargs
