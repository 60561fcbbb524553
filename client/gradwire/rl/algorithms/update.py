"""The optimizer steps of one iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradwire.errors import GradwireError
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.batching import derive_seed
from gradwire.rl.rows import TrainingBatch


async def update(
    run: Any,
    batch: TrainingBatch,
    config: AlgorithmConfig,
    iteration: int,
    stepped: Callable[[], None],
    num_minibatches: int,
) -> tuple[dict[str, float], list[str]]:
    """Train on a batch: submit all passes at once, then await their results.

    Args:
        run: A ``TrainingClient``.
        stepped: Called for each optimizer step that is submitted.
        num_minibatches: Optimizer steps per pass.

    Returns:
        Means of the losses' and steps' metrics, and the losses' warnings. Metrics that the batch overrides
        or declares meaningless are left out.

    Raises:
        GradwireError: The first failure, after all results have arrived.
    """
    results, steps = [], []
    rate = config.rate(iteration)
    parts_left = config.ppo_epochs * min(num_minibatches, batch.num_rows)
    for epoch in range(config.ppo_epochs):
        rng = np.random.default_rng(derive_seed(config.seed, "minibatches", iteration, epoch))
        order = rng.permutation(batch.num_rows) if num_minibatches > 1 else np.arange(batch.num_rows)
        for part in np.array_split(order, min(num_minibatches, batch.num_rows)):
            results.append(run.forward_backward(batch.take(part), batch.loss_fn, batch.loss_kwargs))
            parts_left -= 1
            if parts_left and len(results) % config.gradient_accumulation_steps:
                continue
            steps.append(
                run.optim_step(
                    rate,
                    max_grad_norm=config.max_grad_norm,
                    weight_decay=config.weight_decay,
                    on_nonfinite="skip",
                )
            )
            stepped()
    losses, taken, failure = [], [], None
    for result in results:
        try:
            losses.append(await result)
        except GradwireError as error:
            failure = failure or error
    for step in steps:
        try:
            taken.append(await step)
        except GradwireError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    names = {name for loss in losses for name in loss.metrics} - set(batch.meaningless) - set(batch.metrics)
    metrics = {name: mean([loss.metrics[name] for loss in losses if name in loss.metrics]) for name in sorted(names)}
    metrics |= {
        "grad_norm": mean([step.grad_norm for step in taken]),
        "learning_rate": rate,
        "skipped_steps": float(sum(step.skipped for step in taken)),
        "tokens": float(sum(loss.num_loss_tokens for loss in losses)),
    }
    return metrics, [warning for loss in losses for warning in loss.warnings]


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0 for no values."""
    return float(np.mean(values)) if values else 0.0
