"""The training on rows of a data set: encode a batch, compute a loss, step. All but distillation and RL are this."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from gradwire.data import Batches, DataError, Dataset
from gradwire.loop.loggers import JsonlLogger
from gradwire.loop.training_loop import Metrics, Plan, TrainingLoop
from gradwire.loop.warnings import WarnOnce
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.folder import STATE, facts_of
from gradwire.recipes.launch import Launch
from gradwire.recipes.rates import scheduled
from gradwire.recipes.report import LOG
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings import RowSettings
from gradwire.recipes.tokens import RowEncoder
from gradwire.recipes.training import Training, open_training

T = TypeVar("T")
MEASURED = 256
"""Rows whose tokens are counted at once."""
Encode = Callable[[RowEncoder, Sequence[T]], Awaitable[list[Any]]]
Sample = Callable[[Training, RowEncoder, Sequence[T], int], Awaitable[list[Any] | None]]
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
    launch: Launch,
) -> Estimate | None:
    """Train on the rows of a data set, or only estimate it.

    Args:
        load: One of the loaders of :mod:`gradwire.data`.
        encode: Rows of the data set -> rows for the loss.
        loss_fn, kwargs: The loss.
        head, num_labels: Settings of the run.
        sampled: Rows that replace those of a step, if any.
        sampled_share: Share of the steps that they replace, for the estimate.
    """
    kept, held_out = rows_of(load, settings)
    async with open_training(settings, head=head, num_labels=num_labels, launch=launch) as training:
        tokens = RowEncoder(training.service, training.model, settings.max_tokens, settings.overlong, settings.on_error)
        evaluated: list[Any] = []

        async def given(batch: Sequence[T], step: int = 0) -> list[Any]:
            return await tokens.fitting(batch, lambda rows: encode(tokens, rows))

        size, lengths = settings.batch_size, None
        if settings.batch_tokens:
            size, lengths = settings.batch_tokens, await _lengths(kept, given)
        batches = kept.batches(size, seed=settings.seed, shuffle=not settings.order_by, lengths=lengths)

        async def drawn(batch: Sequence[T], step: int = 0) -> list[Any]:
            own = await sampled(training, tokens, batch, step) if sampled is not None else None
            return await given(batch) if own is None else own

        def loss(rows: list[Any], *, more: bool = False) -> Any:
            return training.run.forward_backward(rows, loss_fn, kwargs, accumulate=more)

        async def evaluate() -> Metrics:
            evaluated[:] = evaluated or await given(list(held_out))
            if not evaluated:
                return {}
            result = await training.run.forward(evaluated, loss_fn, kwargs, outputs=())
            return {f"eval/{name}": value for name, value in result.metrics.items()}

        if launch.dry_run:

            async def on_given(batch: Sequence[T]) -> Any:
                return loss(await given(batch))

            async def on_sampled(batch: Sequence[T]) -> Any:
                return loss(await drawn(batch, -1))

            kinds = ((sampled_share, on_sampled), (1 - sampled_share, on_given))
            return await estimate(training, settings, batches, *kinds, held_out=len(held_out))
        await _Steps(training, settings, batches, drawn, loss, head).take(evaluate if held_out else None)
        tokens.tell_of_rows()
    return None


async def _lengths(rows: Sequence[T], encode: Callable[[Sequence[T]], Awaitable[list[Any]]]) -> list[int]:
    """Tokens of each row; of one that is skipped none, so that any batch may have it."""
    lengths: list[int] = []
    for start in range(0, len(rows), MEASURED):
        part = rows[start : start + MEASURED]
        encoded = [[each] for each in await encode(part)]
        if len(encoded) != len(part):  # some are skipped, or texts of several rows
            encoded = [await encode([row]) for row in part]
        lengths += [sum(_tokens(row) for row in each) for each in encoded]
    return lengths


def _tokens(row: Mapping[str, Any]) -> int:
    return sum(len(value) for name, value in row.items() if name.endswith("input_ids"))


def _has_learned_token(row: Mapping[str, Any]) -> bool:
    """Whether the loss counts any token of an encoded row; one without masks is scored as a whole."""
    masks = [row[name] for name in ("loss_mask", "chosen_loss_mask", "rejected_loss_mask") if name in row]
    masks += [np.asarray(row["token_labels"]) >= 0] if "token_labels" in row else []
    return (not masks or any(map(np.any, masks))) and bool(np.any(row.get("weights", 1)))


class _Steps(Generic[T]):
    """The optimizer steps of a training on rows.

    Args:
        encode: Rows of a batch and the step -> rows for the server; none if all of them were skipped.
        loss: Submits the ``forward_backward`` of such rows; ``more`` rows of the step may follow.
    """

    def __init__(
        self,
        training: Training,
        settings: RowSettings,
        batches: Batches[T],
        encode: Callable[[list[T], int], Awaitable[list[Any]]],
        loss: Callable[..., Any],
        head: Any,
    ) -> None:
        self._training, self._settings, self._batches = training, settings, batches
        self._encode, self._loss, self._head = encode, loss, head
        self._total = _steps(settings, batches)
        self._peak = training.peak
        self._warn_once = WarnOnce("gradwire.recipes")

    async def take(self, evaluate: Callable[[], Awaitable[Metrics]] | None) -> None:
        """Take the steps that an earlier call has not taken."""
        training, settings, batches = self._training, self._settings, self._batches
        plan = Plan(
            type(settings).__name__, eval_every=settings.eval_every, eval_first=settings.eval_first,
            save_every=settings.save_every or batches.count(1, settings.accumulation), keep=settings.keep,
            best_by=settings.best_by, patience=settings.patience,
        )  # fmt: skip
        loop = TrainingLoop(
            training.run, plan, [JsonlLogger(training.folder / LOG), *training.loggers], training.folder / STATE,
            own=lambda: {"position": dict(batches.position)}, shown=lambda metrics: {"loss": metrics["train/loss"]},
        )  # fmt: skip
        loop.facts = facts_of(settings, training.launch)
        try:
            if state := await loop.resume():
                batches.position = state["position"]
            training.begin(self._total)
            await loop.train(self._total, self._step, evaluate)
            if loop.best.out_of_patience:
                print(f"{training.folder}: stopped at step {loop.step}: {loop.best}", flush=True)
        finally:
            loop.close()

    async def _step(self, step: int) -> Metrics:
        results: list[Any] = []
        ready: list[Any] = []
        async for rows in self._batches_of(step):
            if ready:
                results.append(self._loss(ready, more=True))
            ready = rows
        results.append(self._loss(ready))
        stepped = self._optim_step(scheduled(self._settings, step, peak=self._peak, total=self._total))
        *losses, taken = await in_order(*results, stepped)
        for warning in [each for loss in losses for each in loss.warnings]:
            kind = re.sub(r"\d+", "", warning)  # those that differ in their numbers are one kind
            self._warn_once(kind, "step %d: %s", step + 1, warning)
        whole = losses[-1]
        return {
            **{f"train/{name}": value for name, value in whole.metrics.items()},
            "train/grad_norm": taken.grad_norm,
            "train/learning_rate": taken.learning_rate,
            "train/tokens": whole.num_tokens,
            "train/computed_tokens": whole.num_computed_tokens,
            "time/engine_s": sum(loss.timings.engine_s for loss in losses),
        }

    async def _batches_of(self, step: int) -> AsyncIterator[list[Any]]:
        """Encode the batches of a step: those of which any row is left and any token is learned.

        A step ends with the epoch, so that a training whose epochs are raised takes the steps of one that had them.
        """
        reason, found, taken = "no row could be used: all were skipped", False, 0
        for _ in range(self._batches.per_epoch + self._settings.accumulation):
            batch = await asyncio.to_thread(next, self._batches)  # it may read a file
            taken += 1
            rows = await self._encode(batch, step)
            if any(map(_has_learned_token, rows)):
                found = True
                yield rows
            elif rows:
                reason = "nothing of it is trained on: masks, weights of 0 or max_tokens leave no token of any row"
            if taken == self._settings.accumulation or self._batches.ends_epoch:
                if found:
                    return
                taken = 0
        raise DataError(str(self._settings.data), reason)

    def _optim_step(self, rate: float) -> Any:
        settings = self._settings
        more = dict(settings.optimizer_args)
        if settings.head_learning_rate and self._head:
            more["head_learning_rate"] = rate * settings.head_learning_rate / self._peak
        return self._training.run.optim_step(
            rate, optimizer=settings.optimizer, weight_decay=settings.weight_decay, decay="matrices",
            max_grad_norm=settings.max_grad_norm, **more,
        )  # fmt: skip


async def in_order(*results: Awaitable[Any]) -> list[Any]:
    """Await operations; of several that fail the first is raised, which is the cause of the others."""
    done = await asyncio.gather(*results, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return done


async def estimate(
    training: Training,
    settings: RowSettings,
    batches: Batches[T],
    *kinds: tuple[float, Callable[[list[T]], Awaitable[Any]]],
    held_out: int,
) -> Estimate:
    """Measure steps of each kind on the first two batches, with a run that is deleted then.

    The time is that of the second: what happens only once is in the first.

    Args:
        kinds: How a batch's ``forward_backward`` is submitted, each with the share of the steps that do it so.
        held_out: Rows of an evaluation, whose passes count a third: they go forward only.
    """
    both = [next(batches), next(batches)]
    tokens = seconds = 0.0
    for share, loss in kinds:
        if not share:
            continue
        for batch in both:
            began = time.monotonic()
            result = await loss(batch)
            whole, _ = await in_order(result, training.run.optim_step(training.peak, optimizer=settings.optimizer))
            measured = time.monotonic() - began
            tokens += share * whole.num_computed_tokens / len(both)
        seconds += share * measured
    steps = _steps(settings, batches)
    count = round(steps * batches.per_epoch / batches.count(1, settings.accumulation))
    evaluations = -(-steps // settings.eval_every) if settings.eval_every else 0
    seconds *= count + evaluations * held_out / len(both[-1]) / 3
    tokens *= count
    trained = (await training.run.info()).num_trainable_parameters
    return Estimate.of(settings.optimizer, batches.num_rows, round(tokens), steps, training.model, trained, seconds)


def _steps(settings: RowSettings, batches: Batches[Any]) -> int:
    """Number of optimizer steps of the whole training."""
    return settings.max_steps or batches.count(settings.epochs, settings.accumulation)
