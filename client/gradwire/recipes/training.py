"""A training in its folder: its server, its run, its loggers, what an earlier call left, and the report at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradwire
from gradwire.loop.loggers import MetricLogger, MlflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from gradwire.recipes.folder import STATE, open_folder
from gradwire.recipes.launch import Launch, Observer
from gradwire.recipes.rates import learning_rate
from gradwire.recipes.report import LOG, used_by, write_report
from gradwire.recipes.runs import new_run, open_service
from gradwire.recipes.settings import Settings

DELETE_PATIENCE_S = 5.0
logger = logging.getLogger("gradwire.recipes")


@dataclass(frozen=True)
class Training:
    """One training; made by :func:`open_training`.

    Attributes:
        service, run: The connection and the run.
        model: The server's facts of the model.
        loggers: The loggers that the settings name, and the observer if there is one.
        state: The state that an earlier call in the folder wrote with its newest checkpoint; {} if none did.
        peak: The learning rate at its peak.
        launch: How the recipe is run.
    """

    settings: Settings
    service: Any
    run: Any
    model: gradwire.ModelInfo
    loggers: list[MetricLogger]
    state: Mapping[str, Any]
    peak: float
    launch: Launch

    @property
    def folder(self) -> Path:
        return Path(self.settings.folder)

    def begin(self, total: int) -> None:
        """Tell the observer the number of steps; log a warning if the training ends before its warmup does."""
        if self.launch.observer:
            self.launch.observer.began(self.run.run_id, total)
        if self.settings.warmup > total:
            logger.warning(
                "warmup is %g steps and the training has %d: the learning rate ends below its peak; set warmup to a "
                "part of the steps, or to 0",
                self.settings.warmup, total,
            )  # fmt: skip


@asynccontextmanager
async def open_training(
    settings: Settings, *, head: Any = None, num_labels: int = 0, kind: str = "", launch: Launch
) -> AsyncIterator[Training]:
    """Open a training: connect, and create its run or find that of the state in its folder.

    At the end the report is written. A run to which no state refers is deleted.

    Raises:
        SettingsError: The folder belongs to a training with other settings.
    """
    dry_run, observer = launch.dry_run, launch.observer
    with TemporaryDirectory() if dry_run else nullcontext(settings.folder) as place:  # a dry run leaves nothing
        settings = replace(settings, folder=place)
        folder, used = Path(settings.folder), ""
        state = {} if dry_run else open_folder(folder / STATE, settings)
        async with open_service(settings, launch) as (service, model):
            if state:
                run = service.get_training_client(state["run_id"])
                print(f"{folder}: going on at step {state['step']}", flush=True)
            else:
                run = await new_run(settings, service, model, head, kind=kind, num_labels=num_labels)
            peak = learning_rate(settings, model.hidden_size, adapter=(await run.info()).lora is not None)
            loggers = [] if dry_run else loggers_of(settings, observer)
            training = Training(settings, service, run, model, loggers, state, peak, launch)
            try:
                yield training
                if not dry_run:
                    used = await used_by(service, run)
                    print(f"used: {used}", flush=True)
            finally:
                if (folder / LOG).exists() and not dry_run:
                    await asyncio.to_thread(write_report, folder, type(settings).__name__, asdict(settings), used)
                if dry_run or not (folder / STATE).exists():  # nothing refers to the run
                    with suppress(gradwire.GradwireError, TimeoutError):
                        await asyncio.wait_for(service.delete_run(run.run_id), DELETE_PATIENCE_S)


def loggers_of(settings: Settings, observer: Observer | None) -> list[MetricLogger]:
    """Open the loggers that the settings name, and the observer if there is one."""
    name = Path(settings.folder).name
    wandb = {"project": "gradwire", "name": name, "dir": settings.folder, "config": asdict(settings)} | settings.wandb
    made: dict[str, Callable[[], MetricLogger]] = {
        "tensorboard": lambda: TensorBoardLogger(Path(settings.folder) / "tensorboard"),
        "wandb": lambda: WandbLogger(**wandb),
        "trackio": lambda: TrackioLogger(project="gradwire", name=name, config=asdict(settings)),
        "mlflow": lambda: MlflowLogger(run_name=name),
    }
    return [*(made[each]() for each in settings.loggers), *([observer] if observer else [])]
