"""The parts around a training loop: service and run, batches in order, loggers, checkpoints, resume, report."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import gradwire
from gradwire import schedules
from gradwire.data import Batches
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.observing import OBSERVER, Observer, TrainingStopped
from gradwire.recipes.report import write_report
from gradwire.recipes.settings import Settings, SettingsError
from gradwire.rl.loggers import JsonlLogger, MetricLogger, MlflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from gradwire.rl.progress import Progress
from gradwire.whole_files import replace_json

T = TypeVar("T")
Metrics = dict[str, float]
DELETE_PATIENCE_S = 5.0
logger = logging.getLogger("gradwire.recipes")


def warn_of_warmup(settings: Settings, total: int) -> None:
    """Log a warning if the training ends before its warmup does."""
    if settings.warmup > total:
        logger.warning(
            "warmup is %d steps and the training has %d: the learning rate ends far below learning_rate = %g; set "
            "warmup to a part of the steps, or to 0",
            settings.warmup, total, settings.learning_rate,
        )  # fmt: skip


class Training:
    """One training in its folder; made by :func:`open_training`.

    Attributes:
        service, run: The connection and the run.
        model: What the server says of the model.
        step: Optimizer steps taken.
    """

    def __init__(
        self, settings: Settings, service: Any, run: Any, model: gradwire.ModelInfo, state: Mapping[str, Any]
    ) -> None:
        self.settings, self.service, self.run, self.model = settings, service, run, model
        self.folder = Path(settings.folder)
        self.step: int = state.get("step", 0)
        self.total = 0
        self._position: Mapping[str, int] | None = state.get("position")
        self._loggers: list[MetricLogger] = [JsonlLogger(self.folder / "metrics.jsonl"), *loggers_of(settings)]
        self.last: Metrics = {}
        self._warned: set[str] = set()

    async def steps(
        self, batches: Batches[T], evaluate: Callable[[], Awaitable[Mapping[str, float]]] | None = None
    ) -> AsyncIterator[tuple[int, list[T]]]:
        """Yield the number and rows of each remaining step; save checkpoints and evaluate when due.

        Args:
            batches: The training rows; their epochs decide how long the training is, unless ``max_steps`` does.
            evaluate: Computes metrics of held-out rows, which are logged under ``eval/``.
        """
        settings = self.settings
        self.total = settings.max_steps or batches.per_epoch * settings.epochs
        warn_of_warmup(settings, self.total)
        observer = OBSERVER.get() or Observer()
        observer.began(self.run.run_id, self.total)
        save_every = settings.save_every or batches.per_epoch
        if self._position is not None:
            batches.position = self._position
        label = type(settings).__name__
        with Progress(label, self.total) as progress:
            progress.update(self.step)
            while self.step < self.total:
                yield self.step, next(batches)
                self.step += 1
                done = self.step == self.total
                if evaluate is not None and settings.eval_every and (done or self.step % settings.eval_every == 0):
                    self._write({f"eval/{name}": value for name, value in (await evaluate()).items()})
                stopping = observer.stop_wanted and not done
                if done or stopping or self.step % save_every == 0:
                    await self._save(batches.position)
                progress.update(self.step, self.last)
                if stopping:
                    raise TrainingStopped(f"stopped after step {self.step} of {self.total}")

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

    async def update(self, step: int, result: Any) -> None:
        """Take the optimizer step after a ``forward_backward``, and log both."""
        stepped = self.run.optim_step(
            self.rate(step),
            optimizer=self.settings.optimizer,
            weight_decay=self.settings.weight_decay,
            decay="matrices",
        )
        loss, taken = await result, await stepped
        self._pass_on(step, loss.warnings)
        self._write(
            {f"train/{name}": value for name, value in loss.metrics.items()}
            | {"train/grad_norm": taken.grad_norm, "train/learning_rate": taken.learning_rate}
            | {"train/tokens": float(loss.num_tokens), "time/engine_s": loss.timings.engine_s},
            step + 1,
        )
        self.last = {"loss": loss.loss}

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
        save_state(self.folder / "state.json", {**state, "position": dict(position)}, self.settings)
        (OBSERVER.get() or Observer()).saved(self.step, checkpoint.path)

    async def estimate(
        self, batches: Batches[T], *losses: tuple[float, Callable[[list[T]], Awaitable[Any]]], held_out: int
    ) -> Estimate:
        """Measure steps of each kind on the first two batches, with a run that is deleted then.

        The time is that of the second: what happens only once is in the first.

        Args:
            losses: How a batch's ``forward_backward`` is submitted, each with the share of the steps that do it so.
            held_out: Rows of an evaluation, whose passes count a third: they go forward only.
        """
        settings, both = self.settings, [next(batches), next(batches)]
        tokens = seconds = 0.0
        for share, loss in losses:
            if not share:
                continue
            for batch in both:
                began = time.monotonic()
                result = await loss(batch)
                await self.run.optim_step(settings.learning_rate, optimizer=settings.optimizer)
                measured = time.monotonic() - began
                tokens += share * (await result).num_tokens / len(both)
            seconds += share * measured
        steps = settings.max_steps or batches.per_epoch * settings.epochs
        evaluations = -(-steps // settings.eval_every) if settings.eval_every else 0
        seconds *= steps + evaluations * held_out / len(both[-1]) / 3
        trained = (await self.run.info()).num_trainable_parameters
        return Estimate.of(settings, batches.num_rows, round(tokens * steps), steps, self.model, trained, seconds)

    def close(self) -> None:
        """Close the loggers and write ``report.html``."""
        for logger in self._loggers:
            logger.close()
        write_report(self.folder, type(self.settings).__name__, asdict(self.settings))


@asynccontextmanager
async def open_training(settings: Settings, *, head: Any = None, dry_run: bool = False) -> AsyncIterator[Training]:
    """Open a training: connect, and create its run or continue from the state in its folder.

    Raises:
        SettingsError: The folder belongs to a training with other settings.
    """
    folder = Path(settings.folder)
    state = {} if dry_run else open_folder(folder / "state.json", settings)
    async with open_service(settings) as (service, model):
        if state:
            run = service.get_training_client(state["run_id"])
            await run.load_checkpoint(state["checkpoint"])
            JsonlLogger(folder / "metrics.jsonl").forget(state["step"] + 1)
            print(f"{folder}: going on at step {state['step']}", flush=True)
            (OBSERVER.get() or Observer()).saved(state["step"], state["checkpoint"])
        else:
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            run = await service.create_run(
                model.name, lora=settings.lora_rank or None, head=head, seed=settings.seed, name=folder.name
            )
        training = Training(settings, service, run, model, state)
        try:
            yield training
        finally:
            if training.step:
                await asyncio.to_thread(training.close)
            if dry_run or not (folder / "state.json").exists():  # nothing refers to the run
                with suppress(gradwire.GradwireError, TimeoutError):
                    await asyncio.wait_for(service.delete_run(run.run_id), DELETE_PATIENCE_S)


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator[tuple[Any, gradwire.ModelInfo]]:
    """Connect to the server that the settings name, or start one with its state in the training's folder."""
    own = {} if settings.address else {"models": [settings.model], "state_dir": Path(settings.folder) / "server"}
    async with gradwire.connect(settings.address or None, **own) as service:  # type: ignore[arg-type]
        models = await service.list_models()
        model = next((each for each in models if each.name == settings.model), models[0] if own else None)
        if model is None:
            names = ", ".join(each.name for each in models)
            raise SettingsError(f"the server at {settings.address} has no model {settings.model!r}; it has {names}")
        yield service, model


def open_folder(file: Path, settings: Settings) -> dict[str, Any]:
    """Make a training's folder, and read its state; {} if there is none.

    Raises:
        SettingsError: The folder cannot be written to, or belongs to a training with other settings.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
        if not file.exists():
            return {}
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the folder {file.parent} cannot be used: {error.strerror}") from None
    except ValueError:
        raise SettingsError(f"{file} is not the state of a training: remove the folder, or give another") from None
    now = _identity(settings)
    changed = [name for name in now if state["settings"].get(name) != now[name]]
    if changed:
        raise SettingsError(
            f"{file.parent} holds a training with other settings ({', '.join(changed)}): "
            "give another folder, or remove it"
        )
    return state


def _identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that a resumed training may not change."""
    free = ("address", "eval_every", "save_every", "loggers", "folder")
    return {"recipe": type(settings).__name__} | {
        name: value for name, value in asdict(settings).items() if name not in free
    }


def loggers_of(settings: Settings) -> list[MetricLogger]:
    name = Path(settings.folder).name
    made: dict[str, Callable[[], MetricLogger]] = {
        "tensorboard": lambda: TensorBoardLogger(Path(settings.folder) / "tensorboard"),
        "wandb": lambda: WandbLogger(project="gradwire", name=name, config=asdict(settings)),
        "trackio": lambda: TrackioLogger(project="gradwire", name=name, config=asdict(settings)),
        "mlflow": lambda: MlflowLogger(run_name=name),
    }
    observer = OBSERVER.get()
    return [*(made[each]() for each in settings.loggers), *([observer] if observer else [])]


def save_state(file: Path, content: Mapping[str, Any], settings: Settings) -> None:
    """Write a training's state with its settings, so that a crash leaves the old state or the new one."""
    replace_json(file, {**content, "settings": _identity(settings)})
