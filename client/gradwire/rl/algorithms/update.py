"""The optimizer steps of one iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradwire.errors import GradwireError
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.batching import derive_seed
from gradwire.rl.metrics import Mean, Metric, Sum, merged, of_loss
from gradwire.rl.rows import TrainingBatch


async def update(
    run: Any,
    batch: TrainingBatch,
    config: AlgorithmConfig,
    iteration: int,
    stepped: Callable[[], None],
    num_minibatches: int,
) -> tuple[dict[str, Metric], list[str]]:
    """Train on a batch: submit all passes at once, then await their results.

    Args:
        run: A ``TrainingClient``.
        stepped: Called for each optimizer step that is submitted.
        num_minibatches: Optimizer steps per pass.

    Returns:
        The losses' and steps' metrics, merged, and the losses' warnings. Metrics that the batch overrides or declares
        meaningless are left out.

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
            steps.append(run.optim_step(rate, **config.optimizer_kwargs(rate)))
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
    left_out = {*batch.meaningless, *batch.metrics}
    metrics = merged(
        {
            name: of_loss(name, value, loss.num_loss_tokens)
            for name, value in sorted(loss.metrics.items())
            if name not in left_out
        }
        for loss in losses
    )
    return {
        **metrics,
        "grad_norm": Mean.of([step.grad_norm for step in taken]),
        "learning_rate": Mean(rate, 1),
        "skipped_steps": Sum(sum(step.skipped for step in taken)),
        "tokens": Sum(sum(loss.num_loss_tokens for loss in losses)),
    }, [warning for loss in losses for warning in loss.warnings]
