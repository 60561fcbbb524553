"""The parts around a training loop: batches in order, loggers, evaluations, checkpoints, resume, report."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import gradwire
from gradwire import schedules
from gradwire.data import Batches, DataError
from gradwire.recipes.best import Best
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.folder import STATE, open_folder, save_state
from gradwire.recipes.observing import OBSERVER, Observer, TrainingStopped
from gradwire.recipes.report import used_by, write_report
from gradwire.recipes.runs import new_run, open_service
from gradwire.recipes.settings import RowSettings, Settings
from gradwire.rl.loggers import JsonlLogger, MetricLogger, MlflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from gradwire.rl.progress import Progress

T = TypeVar("T")
Metrics = dict[str, float]
Rows = list[Any]
DELETE_PATIENCE_S = 5.0
logger = logging.getLogger("gradwire.recipes")


def warn_of_warmup(settings: Settings, total: int) -> None:
    """Log a warning if the training ends before its warmup does."""
    if settings.warmup > total:
        logger.warning(
            "warmup is %d steps and the training has %d: the learning rate ends below its peak; set warmup to a part "
            "of the steps, or to 0",
            settings.warmup, total,
        )  # fmt: skip


class Training:
    """One training in its folder; made by :func:`open_training`.

    Attributes:
        service, run: The connection and the run.
        model: What the server says of the model.
        step: Optimizer steps taken.
    """

    def __init__(
        self,
        settings: RowSettings,
        service: Any,
        run: Any,
        model: gradwire.ModelInfo,
        state: Mapping[str, Any],
        head: Any,
    ) -> None:
        self.settings, self.service, self.run, self.model, self._head = settings, service, run, model, head
        self.folder = Path(settings.folder)
        self.step: int = state.get("step", 0)
        self.total = 0
        self._position: Mapping[str, int] | None = state.get("position")
        self._best = Best(settings.best_by, settings.patience, state.get("best", {}))
        self._loggers: list[MetricLogger] = [JsonlLogger(self.folder / "metrics.jsonl"), *loggers_of(settings)]
        self.last: Metrics = {}
        self._warned: set[str] = set()

    async def steps(
        self,
        batches: Batches[T],
        encode: Callable[[list[T], int], Awaitable[Rows]],
        evaluate: Callable[[], Awaitable[Mapping[str, float]]] | None = None,
    ) -> AsyncIterator[tuple[int, list[Rows]]]:
        """Yield the number and the encoded batches of each remaining step; save checkpoints and evaluate when due.

        Args:
            batches: The training rows; their epochs decide how long the training is, unless ``max_steps`` does.
            encode: Rows of a batch and the step -> rows for the server; none if all of them were skipped.
            evaluate: Computes metrics of held-out rows, which are logged under ``eval/``.
        """
        settings = self.settings
        self.total = total_steps(settings, batches)
        warn_of_warmup(settings, self.total)
        observer = OBSERVER.get() or Observer()
        observer.began(self.run.run_id, self.total)
        save_every = settings.save_every or -(-batches.per_epoch // settings.accumulation)
        if self._position is not None:
            batches.position = self._position
        with Progress(type(settings).__name__, self.total) as progress:
            progress.update(self.step)
            if evaluate is not None and settings.eval_first and self._position is None:
                await self._evaluate(evaluate)
            while self.step < self.total and not self._best.out_of_patience:
                parts = [await self._next(batches, encode) for _ in range(settings.accumulation)]
                yield self.step, parts
                self.step += 1
                done = self.step == self.total
                if evaluate is not None and settings.eval_every and (done or self.step % settings.eval_every == 0):
                    await self._evaluate(evaluate)
                    done = done or self._best.out_of_patience
                stopping = observer.stop_wanted and not done
                if done or stopping or self.step % save_every == 0:
                    await self._save(batches.position)
                progress.update(self.step, self.last)
                if stopping:
                    raise TrainingStopped(f"stopped after step {self.step} of {self.total}")
        if self._best.out_of_patience:
            print(f"{self.folder}: stopped at step {self.step}: {self._best}", flush=True)

    async def _next(self, batches: Batches[T], encode: Callable[[list[T], int], Awaitable[Rows]]) -> Rows:
        """Encode the next batch of which any row is left."""
        for _ in range(batches.per_epoch):
            if rows := await encode(await asyncio.to_thread(next, batches), self.step):  # it may read a file
                return rows
        raise DataError(str(self.settings.data), "no row could be used: all were skipped")

    async def _evaluate(self, evaluate: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        metrics = await evaluate()
        self._write({f"eval/{name}": value for name, value in metrics.items()})
        if self._best.is_better(metrics, self.step):
            checkpoint = await self.run.save_checkpoint("best", note=str(self._best), overwrite=True)
            (OBSERVER.get() or Observer()).saved(self.step, checkpoint.path)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        settings = self.settings
        if settings.schedule == "constant":
            return schedules.constant(step, peak=settings.learning_rate, warmup=settings.warmup)
        if settings.schedule == "wsd":
            decay = max(1, self.total // 10)
            return schedules.wsd(
                step, peak=settings.learning_rate, total=self.total, decay=decay, warmup=settings.warmup
            )
        schedule = schedules.linear if settings.schedule == "linear" else schedules.cosine
        return schedule(step, peak=settings.learning_rate, total=self.total, warmup=settings.warmup)

    async def update(self, step: int, results: Sequence[Any]) -> None:
        """Take the optimizer step after its ``forward_backward`` calls, and log them."""
        stepped = self._optim_step(self.rate(step))
        losses = [await result for result in results]
        taken = await stepped
        for loss in losses:
            self._pass_on(step, loss.warnings)
        tokens = [float(loss.num_tokens) for loss in losses]
        self._write(
            {f"train/{name}": _mean([loss.metrics[name] for loss in losses], tokens) for name in losses[0].metrics}
            | {"train/grad_norm": taken.grad_norm, "train/learning_rate": taken.learning_rate}
            | {"train/tokens": sum(tokens), "time/engine_s": sum(loss.timings.engine_s for loss in losses)},
            step + 1,
        )
        self.last = {"loss": losses[-1].loss}

    def _optim_step(self, rate: float) -> Any:
        settings = self.settings
        more = dict(settings.optimizer_args)
        if settings.head_learning_rate and self._head and settings.learning_rate:
            more["head_learning_rate"] = rate * settings.head_learning_rate / settings.learning_rate
        return self.run.optim_step(
            rate, optimizer=settings.optimizer, weight_decay=settings.weight_decay, decay="matrices",
            max_grad_norm=settings.max_grad_norm, **more,
        )  # fmt: skip

    def _pass_on(self, step: int, warnings: Sequence[str]) -> None:
        """Log the server's warnings, each kind once: those that differ in their numbers are one kind."""
        for warning in warnings:
            kind = re.sub(r"\d+", "", warning)
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning("step %d: %s", step + 1, warning)

    def _write(self, metrics: Metrics, step: int | None = None) -> None:
        for logger in self._loggers:
            logger.log(self.step if step is None else step, metrics)

    async def _save(self, position: Mapping[str, int]) -> None:
        checkpoint = await self.run.save_checkpoint(f"step-{self.step}", overwrite=True)
        state = {"run_id": self.run.run_id, "checkpoint": checkpoint.path, "step": self.step}
        save_state(self.folder / STATE, {**state, "position": dict(position), "best": self._best.state}, self.settings)
        (OBSERVER.get() or Observer()).saved(self.step, checkpoint.path)
        if self.settings.keep:
            await self._delete_old()

    async def _delete_old(self) -> None:
        names = [each.path.partition("/")[2] for each in await self.run.list_checkpoints()]
        steps = sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))
        for step in steps[: -self.settings.keep]:
            await self.run.delete_checkpoint(f"step-{step}")

    async def estimate(
        self, batches: Batches[T], *kinds: tuple[float, Callable[[list[T]], Awaitable[Any]]], held_out: int
    ) -> Estimate:
        """Measure steps of each kind on the first two batches, with a run that is deleted then.

        The time is that of the second: what happens only once is in the first.

        Args:
            kinds: How a batch's ``forward_backward`` is submitted, each with the share of the steps that do it so.
            held_out: Rows of an evaluation, whose passes count a third: they go forward only.
        """
        settings, both = self.settings, [next(batches), next(batches)]
        tokens = seconds = 0.0
        for share, loss in kinds:
            if not share:
                continue
            for batch in both:
                began = time.monotonic()
                result = await loss(batch)
                await self.run.optim_step(settings.learning_rate, optimizer=settings.optimizer)
                measured = time.monotonic() - began
                tokens += share * (await result).num_tokens / len(both)
            seconds += share * measured
        steps = total_steps(settings, batches)
        evaluations = -(-steps // settings.eval_every) if settings.eval_every else 0
        seconds *= steps * settings.accumulation + evaluations * held_out / len(both[-1]) / 3
        tokens *= steps * settings.accumulation
        trained = (await self.run.info()).num_trainable_parameters
        return Estimate.of(settings.optimizer, batches.num_rows, round(tokens), steps, self.model, trained, seconds)

    def close(self, used: str = "") -> None:
        """Close the loggers and write ``report.html``, with what the training used."""
        for logger in self._loggers:
            logger.close()
        write_report(self.folder, type(self.settings).__name__, asdict(self.settings), used)


def total_steps(settings: RowSettings, batches: Batches[Any]) -> int:
    """Number of steps of the whole training."""
    return settings.max_steps or -(-batches.per_epoch * settings.epochs // settings.accumulation)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return sum(value * weight for value, weight in zip(values, weights)) / (sum(weights) or 1.0)


@asynccontextmanager
async def open_training(
    settings: RowSettings, *, head: Any = None, num_labels: int = 0, dry_run: bool = False
) -> AsyncIterator[Training]:
    """Open a training: connect, and create its run or continue from the state in its folder.

    Raises:
        SettingsError: The folder belongs to a training with other settings.
    """
    folder = Path(settings.folder)
    state = {} if dry_run else open_folder(folder / STATE, settings)
    async with open_service(settings) as (service, model):
        if state:
            run = service.get_training_client(state["run_id"])
            await run.load_checkpoint(state["checkpoint"])
            JsonlLogger(folder / "metrics.jsonl").forget(state["step"] + 1)
            print(f"{folder}: going on at step {state['step']}", flush=True)
            (OBSERVER.get() or Observer()).saved(state["step"], state["checkpoint"])
        else:
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            run = await new_run(settings, service, model, head, num_labels=num_labels)
        training, used = Training(settings, service, run, model, state, head), ""
        try:
            yield training
            if training.step and not dry_run:
                used = await used_by(service, run)
                print(f"used: {used}", flush=True)
        finally:
            if training.step:
                await asyncio.to_thread(training.close, used)
            if dry_run or not (folder / STATE).exists():  # nothing refers to the run
                with suppress(gradwire.GradwireError, TimeoutError):
                    await asyncio.wait_for(service.delete_run(run.run_id), DELETE_PATIENCE_S)


def loggers_of(settings: Settings) -> list[MetricLogger]:
    """Open the loggers that the settings name, and the observer if there is one."""
    name = Path(settings.folder).name
    wandb = {"project": "gradwire", "name": name, "dir": settings.folder, "config": asdict(settings)} | settings.wandb
    made: dict[str, Callable[[], MetricLogger]] = {
        "tensorboard": lambda: TensorBoardLogger(Path(settings.folder) / "tensorboard"),
        "wandb": lambda: WandbLogger(**wandb),
        "trackio": lambda: TrackioLogger(project="gradwire", name=name, config=asdict(settings)),
        "mlflow": lambda: MlflowLogger(run_name=name),
    }
    observer = OBSERVER.get()
    return [*(made[each]() for each in settings.loggers), *([observer] if observer else [])]
