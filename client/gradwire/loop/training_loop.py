"""The loop around a training's steps: evaluations, the best checkpoint, checkpoints, logs, resume, the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import NotFoundError, UnsupportedError
from gradwire.futures import Future
from gradwire.loop.best import Best
from gradwire.loop.loggers import CheckpointLogger, MetricLogger, RewindingLogger, StoppingLogger
from gradwire.loop.progress import Progress
from gradwire.results import TrainStepResult
from gradwire.whole_files import read_state, replace_state

AHEAD = 8
"""Results of ``train_step`` that may be outstanding."""
COST_SHARE = 0.1
"""Share of the time that checkpoints may take where no number of steps says when they are due."""
BEST_FILE = "best.json"

Metrics = dict[str, float]
Step = Callable[[int], Awaitable[Metrics | Future[TrainStepResult]]]
"""Takes the step of this number, from 0; returns its metrics, or the future of a ``train_step`` that has them."""
Evaluate = Callable[[], Awaitable[Metrics]]
"""Computes metrics of held-out data; their names begin with ``eval/``."""


class TrainingStopped(Exception):
    """A logger wanted the training to stop. A checkpoint was saved first: run again, the training continues from it."""


@dataclass(frozen=True)
class Plan:
    """When a training evaluates, saves and ends.

    Attributes:
        label: The training's name: in the progress line, and as the note of its checkpoints.
        unit: Checkpoints are called ``UNIT-N`` after N steps.
        first: Number that the logs give the first step.
        eval_every: Steps between evaluations; 0: never.
        eval_first: Evaluate before the first step as well.
        save_every: Steps between checkpoints; 0: never; None: as often as they take a tenth of the time.
        at_end: Evaluate and save after the last step, whatever its number is.
        keep: Newest checkpoints to keep; 0: all. ``best`` is kept besides.
        best_by: Metric of the evaluations by which a checkpoint ``best`` is kept; "": none is.
        patience: Evaluations without a better ``best_by`` after which the training ends; 0: never.
    """

    label: str
    unit: str = "step"
    first: int = 1
    eval_every: int = 0
    eval_first: bool = False
    save_every: int | None = 0
    at_end: bool = True
    keep: int = 0
    best_by: str = ""
    patience: int = 0


class TrainingLoop:
    """Takes the steps of a training and does what is due between them.

    Args:
        run: A ``TrainingClient``.
        plan: When what is due.
        loggers: Take the metrics of each step. One that has ``saved`` hears of checkpoints, and one that has ``forget``
            of steps that a resumed training takes again; one whose ``stop_wanted`` is true ends the training.
        file: Where the position of the newest checkpoint is written, beside it that of the best in ``best.json``; None:
            nowhere, so that the training cannot be resumed.
        own: Returns the training's own state, JSON data that are written with the position.
        shown: Selects the numbers of the progress line from a step's metrics.
        save: Called with ``name`` and ``best`` when a checkpoint is due, and calls :meth:`save`; by default that alone.

    Attributes:
        step: Number of finished steps.
        best: The best evaluation.
        checkpoint: The newest checkpoint, ``"RUN_ID/NAME"``; "" before the first.
        facts: Constants to write into ``file`` besides.
    """

    def __init__(
        self,
        run: Any,
        plan: Plan,
        loggers: Sequence[MetricLogger],
        file: Path | None,
        *,
        own: Callable[[], Mapping[str, Any]] = dict,
        shown: Callable[[Metrics], Mapping[str, float]] = dict,
        save: Callable[[str, bool], Awaitable[Any]] | None = None,
    ) -> None:
        self.run, self.plan, self.loggers, self.file = run, plan, loggers, file
        self.step, self.checkpoint = 0, ""
        self.best = Best(plan.best_by, plan.patience)
        self.facts: Mapping[str, Any] = {}
        self._own, self._shown, self._save = own, shown, save or self.save
        self._saved_at = self._logged_at = time.monotonic()
        self._save_s = 0.0

    async def resume(self, best: bool = False) -> dict[str, Any]:
        """Return to the newest checkpoint, or the best; what the logs have of later steps is removed.

        Returns:
            The training's own state there; {} if there is no checkpoint.
        """
        file = self.file and (self.file.with_name(BEST_FILE) if best else self.file)
        state: dict[str, Any] = read_state(file) if file and file.exists() else {}
        if state:
            self.checkpoint = state["checkpoint"]
            await self.run.load_checkpoint(self.checkpoint)
        self.step, self.best.state = state.get("step", 0), state.get("best", {})
        for each in self.loggers:
            if isinstance(each, RewindingLogger):
                each.forget(self.step + self.plan.first if self.step else 0)
            if state and isinstance(each, CheckpointLogger):
                each.saved(self.step, self.checkpoint)
        return state

    async def train(self, total: int, step: Step, evaluate: Evaluate | None = None, *, show: bool = True) -> None:
        """Take the remaining steps.

        Args:
            total: Number of steps of the whole training; those taken before count.
            show: Show a progress line on stderr.

        Raises:
            TrainingStopped: A logger wanted it.
        """
        plan, waiting = self.plan, deque[Metrics | Future[TrainStepResult]]()
        self._logged_at = time.monotonic()
        with Progress(plan.label, total, show=show) as progress:
            progress.update(self.step)
            if evaluate is not None and plan.eval_first and not self.step:
                self._log(0, await self._evaluated(evaluate))
            while self.step < total and not self.best.out_of_patience:
                waiting.append(await step(self.step))
                self.step += 1
                last = self.step == total
                evaluating = evaluate is not None and self._evaluates(last)
                outstanding = 0
                if isinstance(waiting[-1], Future) and not (evaluating or self._saves(last) or last or self._stops):
                    outstanding = AHEAD
                while len(waiting) > outstanding:
                    number = self.step - len(waiting)
                    result = waiting.popleft()
                    metrics = dict((await result).metrics) if isinstance(result, Future) else result
                    if evaluating and evaluate is not None and not waiting:
                        metrics |= await self._evaluated(evaluate)
                    self._log(number + plan.first, metrics)
                    progress.update(number + 1, self._shown(metrics))
                if waiting:
                    continue
                last = last or self.best.out_of_patience
                stopping = self._stops and not last
                if stopping or self._saves(last):
                    await self._save("", False)
                if stopping:
                    raise TrainingStopped(f"stopped after step {self.step} of {total}")

    def _evaluates(self, last: bool) -> bool:
        every = self.plan.eval_every
        return bool(every) and (self.step % every == 0 or (last and self.plan.at_end))

    def _saves(self, last: bool) -> bool:
        if last and self.plan.at_end:
            return True
        if self.plan.save_every is None:
            return time.monotonic() - self._saved_at >= self._save_s / COST_SHARE
        return bool(self.plan.save_every) and self.step % self.plan.save_every == 0

    @property
    def _stops(self) -> bool:
        return any(isinstance(each, StoppingLogger) and each.stop_wanted for each in self.loggers)

    async def _evaluated(self, evaluate: Evaluate) -> Metrics:
        metrics = dict(await evaluate())
        if self.best.is_better(metrics, self.step):
            await self._save("", True)
        return metrics

    def _log(self, number: int, metrics: Metrics) -> None:
        now = time.monotonic()
        metrics["time/iteration_s"], self._logged_at = now - self._logged_at, now
        for each in self.loggers:
            each.log(number, metrics)

    async def save(self, name: str = "", best: bool = False) -> Any:
        """Save the run on the server, and the position in ``file``, or in ``best.json`` if it is the best.

        Args:
            name: Name of the server's checkpoint; by default ``UNIT-N`` or ``best``.
        """
        started = time.monotonic()
        name = name or ("best" if best else f"{self.plan.unit}-{self.step}")
        note = str(self.best) if best and self.best.state else self.plan.label
        checkpoint = await self.run.save_checkpoint(name=name, note=note, overwrite=True)
        if self.file is not None:
            position = {"run_id": self.run.run_id, "checkpoint": checkpoint.path, "step": self.step}
            state = {**self.facts, **position, "best": self.best.state, **self._own()}
            replace_state(self.file.with_name(BEST_FILE) if best else self.file, state)
        for each in self.loggers:
            if isinstance(each, CheckpointLogger):
                each.saved(self.step, checkpoint.path)
        if not best:
            self.checkpoint = checkpoint.path
            await self._delete_old()
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - started
        return checkpoint

    async def _delete_old(self) -> None:
        if not self.plan.keep:
            return
        prefix = f"{self.plan.unit}-"
        names = [each.name.removeprefix(prefix) for each in await self.run.list_checkpoints()]
        for number in sorted(int(name) for name in names if name.isdecimal())[: -self.plan.keep]:
            with suppress(NotFoundError, UnsupportedError):  # a restored run would load it; deleted after the next save
                await self.run.delete_checkpoint(f"{prefix}{number}")

    def close(self) -> None:
        """Close the loggers."""
        for each in self.loggers:
            each.close()
