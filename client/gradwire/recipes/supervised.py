"""The training on rows of a data set: encode a batch, compute a loss, step. All but distillation and RL are this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from gradwire.data import Dataset
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings import RowSettings
from gradwire.recipes.tokens import Tokens
from gradwire.recipes.training import Training, open_training

T = TypeVar("T")
Encode = Callable[[Tokens, Sequence[T]], Awaitable[list[Any]]]
Sample = Callable[[Training, Tokens, Sequence[T], int], Awaitable[list[Any] | None]]
"""Rows that the policy itself writes at a step; None where the given rows are trained on."""


async def train_rows(
    settings: RowSettings,
    load: Callable[..., Dataset[T]],
    encode: Encode[T],
    loss_fn: str,
    kwargs: Mapping[str, Any],
    *,
    head: Any = None,
    num_labels: int = 0,
    sampled: Sample[T] | None = None,
    sampled_share: float = 0.0,
    dry_run: bool = False,
) -> Estimate | None:
    """Train on the rows of a data set, or only estimate it.

    Args:
        load: One of the loaders of :mod:`gradwire.data`.
        encode: Rows of the data set -> rows for the loss.
        loss_fn, kwargs: The loss.
        head, num_labels: Of the run.
        sampled: Rows that replace those of a step, if any.
        sampled_share: Share of the steps that they replace, for the estimate.
    """
    kept, held_out = rows_of(load, settings)
    batches = kept.batches(settings.batch_size, seed=settings.seed, shuffle=not settings.order_by)
    async with open_training(settings, head=head, num_labels=num_labels, dry_run=dry_run) as training:
        tokens = Tokens(training.service, training.model, settings.max_tokens, settings.overlong, settings.on_error)
        evaluated: list[Any] = []

        async def given(batch: Sequence[T], step: int = 0) -> list[Any]:
            return await tokens.fitting(batch, lambda rows: encode(tokens, rows))

        async def drawn(batch: Sequence[T], step: int = 0) -> list[Any]:
            own = await sampled(training, tokens, batch, step) if sampled is not None else None
            return await given(batch) if own is None else own

        def loss(rows: list[Any]) -> Any:
            return training.run.forward_backward(rows, loss_fn, kwargs)

        async def evaluate() -> dict[str, float]:
            evaluated[:] = evaluated or await given(list(held_out))
            if not evaluated:
                return {}
            return dict((await training.run.forward(evaluated, loss_fn, kwargs, outputs=())).metrics)

        if dry_run:

            async def on_given(batch: Sequence[T]) -> Any:
                return loss(await given(batch))

            async def on_sampled(batch: Sequence[T]) -> Any:
                return loss(await drawn(batch, -1))

            kinds = ((sampled_share, on_sampled), (1 - sampled_share, on_given))
            return await training.estimate(batches, *kinds, held_out=len(held_out))
        async for step, parts in training.steps(batches, drawn, evaluate if held_out else None):
            await training.update(step, [loss(rows) for rows in parts])
        tokens.tell_of_skipped()
    return None
