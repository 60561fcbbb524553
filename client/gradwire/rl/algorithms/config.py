"""Settings of the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradwire import schedules
from gradwire.rl.generation import SamplingParams


@dataclass(frozen=True)
class AlgorithmConfig:
    """Settings of every algorithm.

    Recommended where episodes take unequally long, or the sampler has an engine of its own: ``partial_tokens=512`` and
    ``train(mode="async", max_staleness=2)``, or 1 where samples cost more than time. Otherwise the defaults.

    Attributes:
        batch_size: Tasks per iteration.
        group_size: Trajectories per task.
        ppo_epochs: Passes over the trajectories of an iteration.
        num_minibatches: Minibatches per pass, one optimizer step each; groups stay whole.
        gradient_accumulation_steps: Minibatches per optimizer step; they may come from several passes, and
            the last step of an iteration takes the rest.
        learning_rate: Learning rate of the optimizer; None: a policy's, by the rule of docs/lora.md.
        warmup_iterations: Iterations over which the learning rate rises to its value.
        schedule: Iteration -> learning rate, in place of the warmup; None: it stays at its value.
        optimizer: As for ``optim_step``.
        optimizer_args: Further arguments of ``optim_step``; ``head_learning_rate`` rises and falls with the other.
        max_grad_norm: Gradient clipping norm.
        weight_decay: Weight decay of the optimizer.
        loss_kwargs: Arguments of the loss; they override those that the algorithm sets.
        reference_model: Reference of the KL: ``"base"``, ``"ema"``, a checkpoint, a model; None: no KL.
        beta: Weight of the KL.
        reference_ema: Decay of the reference ``"ema"``, which follows the policy each iteration; None: it is not
            updated.
        max_tokens, temperature, top_k, top_p: Sampling parameters. The loss scores at the same temperature.
        partial_tokens: Maximum number of tokens of a response that are generated with the same weights: a longer one
            goes on with newer weights, if there are any by then (partial rollouts). None: a response is of one policy,
            and an optimizer step of a run that samples for itself waits for it.
        num_parallel: Episodes in progress at once.
        max_steps_per_rollout: Truncate an episode after this many steps.
        rollout_timeout_s: Time limit per episode.
        context_tokens: Maximum prompt length.
        on_stale: Treatment of groups that an earlier policy wrote. ``correct``: weight each token by the truncated
            ratio of its probability under the policy before the update to that under the policy that wrote it
            (``sampler_correction`` of the loss). With ``train(mode="async")`` the training waits for a slow group
            before it becomes older than allowed. ``drop``: ratios are relative to the policy that wrote a token, and
            the training goes on without waiting; a group that has become too old is dropped, and its task is lost.
        dynamic_sampling: Drop groups whose rewards are all equal and sample other tasks in their place
            (Yu et al. 2025, DAPO).
        max_resampling: Maximum rounds of resampling per iteration; then the iteration goes on with fewer groups.
        on_failure: ``stop``: an iteration in which every episode or every reward failed ends the training, with the
            first failure and its location. ``warn``: it is skipped with a warning.
        max_staleness: Iterations by which rollouts may lag behind the trained policy. 0: rollouts and training
            alternate. 1: the next rollouts are collected while this iteration trains.
        replay_fraction: Groups from the replay buffer, as a share of ``batch_size``; needs a loss that supports it.
        seed: Seed of tasks, environments and sampling.
        eval_every: Iterations between evaluations; 0: never.
        eval_temperature: Sampling temperature of evaluations; 0 is greedy.
        eval_trajectories: Trajectories per evaluation task.
        success_threshold: Minimum score of a success.
        checkpoint_dir: Folder of the state, recorded trajectories and the log, ``metrics.jsonl``; None: only the log is
            written, to ``runs/RUN_ID``, and ``resume`` is not possible.
        save_every: Iterations between checkpoints; 0: never.
        record_every: Iterations between recordings of trajectories; 0: never.
    """

    batch_size: int = 16
    group_size: int = 8
    ppo_epochs: int = 1
    num_minibatches: int = 1
    gradient_accumulation_steps: int = 1
    learning_rate: float | None = None
    warmup_iterations: int = 0
    schedule: Callable[[int], float] | None = None
    optimizer: str = "adamw"
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
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
    partial_tokens: int | None = None
    num_parallel: int = 256
    max_steps_per_rollout: int = 16
    rollout_timeout_s: float | None = None
    context_tokens: int | None = None
    max_staleness: int = 0
    on_stale: Literal["correct", "drop"] = "correct"
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
            if (value := getattr(self, name)) is not None and value < 1:  # the algorithm chooses where it is None
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in (
            "max_staleness",
            "eval_every",
            "save_every",
            "record_every",
            "warmup_iterations",
            "replay_fraction",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, choices in (("on_stale", ("drop", "correct")), ("on_failure", ("stop", "warn"))):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} must be "{choices[0]}" or "{choices[1]}", got {getattr(self, name)!r}')
        if self.partial_tokens is not None and self.partial_tokens < 1:
            raise ValueError(f"partial_tokens must be at least 1, got {self.partial_tokens}")
        if self.save_every and self.checkpoint_dir is None:
            raise ValueError("save_every needs a checkpoint_dir")
        if self.record_every and self.checkpoint_dir is None:
            raise ValueError("record_every needs a checkpoint_dir")
        if self.reference_ema is not None and not 0 <= self.reference_ema <= 1:
            raise ValueError(
                f"reference_ema is the share of the old reference that is kept, from 0 to 1; got {self.reference_ema}"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0 to learn from samples, got {self.temperature}")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_k, self.top_p)

    @property
    def folder(self) -> Path | None:
        return None if self.checkpoint_dir is None else Path(self.checkpoint_dir)

    def rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration."""
        if self.schedule is not None:
            return self.schedule(iteration)
        assert self.learning_rate is not None  # the algorithm chose it before its first iteration
        return schedules.constant(iteration, peak=self.learning_rate, warmup=max(self.warmup_iterations - 1, 0))

    def optimizer_kwargs(self, rate: float) -> dict[str, Any]:
        """Return the arguments of ``optim_step`` besides the learning rate."""
        more = {"max_grad_norm": self.max_grad_norm, "weight_decay": self.weight_decay, **self.optimizer_args}
        if "head_learning_rate" in more:
            more["head_learning_rate"] *= rate / (self.learning_rate or rate)
        return {"optimizer": self.optimizer, "on_nonfinite": "skip", **more}

    def kl_kwargs(self) -> dict[str, Any]:
        """Return the KL arguments of every policy loss."""
        kwargs: dict[str, Any] = {} if self.temperature == 1.0 else {"temperature": self.temperature}
        if self.reference_model is not None:
            kwargs |= {"reference_model": self.reference_model, "beta": self.beta}
        return kwargs
