"""The optimizer steps of one iteration."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.sources import Part
from gradwire.rl.batching import derive_seed
from gradwire.rl.metrics import Mean, Metric, Sum, merged, of_loss
from gradwire.rl.rows import TrainingBatch


class Update:
    """The updates of an iteration: one batch, or several that arrive one after the other.

    Args:
        run: A ``TrainingClient``.
        config: Passes, minibatches, accumulation and the optimizer's settings.
        iteration: Its number.
        version: Number of optimizer steps that the run has taken.

    Attributes:
        iteration, version: See above; the run counts the steps, and none that it skipped.
        accumulated: Minibatches since the last optimizer step.
        parts: The parts that the iteration has trained on so far.
    """

    def __init__(self, run: Any, config: AlgorithmConfig, iteration: int, version: int) -> None:
        self._run, self._config, self.iteration, self.version = run, config, iteration, version
        self._rate = config.rate(iteration)
        self.accumulated = 0
        self.parts: list[Part] = []

    async def train(self, batch: TrainingBatch, num_minibatches: int) -> tuple[dict[str, Metric], list[str]]:
        """Train on a batch: submit all passes at once, then await their results.

        Returns:
            The losses' and steps' metrics, merged, and the losses' warnings. Metrics that the batch overrides or
            declares meaningless are left out.

        Raises:
            GradwireError: The first failure, after all results have arrived.
            CancelledError: The waiting was cancelled. It goes on until the results arrive, so that the batch is
                trained on.
        """
        results, steps = [], []
        seed, parts = self._config.seed, min(num_minibatches, batch.num_rows)
        for epoch in range(self._config.ppo_epochs):
            rng = np.random.default_rng(derive_seed(seed, "minibatches", self.iteration, epoch))
            order = rng.permutation(batch.num_rows) if num_minibatches > 1 else np.arange(batch.num_rows)
            for part in np.array_split(order, parts):
                results.append(self._run.forward_backward(batch.take(part), batch.loss_fn, batch.loss_kwargs))
                self.accumulated += 1
                if self.accumulated == self._config.gradient_accumulation_steps:
                    steps.append(self._step())
        try:
            losses = await _awaited(results)
        finally:
            taken = await self._of_steps(steps)
        left_out = {*batch.meaningless, *batch.metrics}
        metrics = merged(
            {
                name: of_loss(name, value, loss.num_loss_tokens)
                for name, value in sorted(loss.metrics.items())
                if name not in left_out
            }
            for loss in losses
        )
        tokens = Sum(sum(loss.num_loss_tokens for loss in losses))
        return {**metrics, **taken, "learning_rate": Mean(self._rate, 1), "tokens": tokens}, [
            warning for loss in losses for warning in loss.warnings
        ]

    async def finish(self) -> dict[str, Metric]:
        """Take the step of the minibatches that are left, if there are any; return its metrics."""
        return await self._of_steps([self._step()]) if self.accumulated else {}

    def _step(self) -> Any:
        self.accumulated = 0
        return self._run.optim_step(self._rate, **self._config.optimizer_kwargs(self._rate))

    async def _of_steps(self, steps: list[Any]) -> dict[str, Metric]:
        taken = await _awaited(steps)
        self.version = taken[-1].step if taken else self.version
        return {
            "grad_norm": Mean.of([step.grad_norm for step in taken]),
            "skipped_steps": Sum(sum(step.skipped for step in taken)),
        }


async def _awaited(futures: list[Any]) -> list[Any]:
    """Await all of them, then raise the first failure, or the cancellation, which does not stop the operations."""
    waiting, cancelled = [asyncio.ensure_future(future) for future in futures], None
    try:
        await asyncio.gather(*map(asyncio.shield, waiting), return_exceptions=True)
    except asyncio.CancelledError as error:
        cancelled = error
        await asyncio.gather(*waiting, return_exceptions=True)
    results = [future.result() for future in waiting]
    if cancelled is not None:
        raise cancelled
    return results
