"""Reports of a training to the server: metrics, checkpoints, the end; in order, and together what comes together."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any

from gradwire import JobCheckpoint, JobEnd, JobEvent, Jobs
from gradwire.recipes.launch import Observer

TOGETHER_S = 0.5
"""Seconds between two reports, so that fast steps share one; the first step is reported at once."""
MAX_EVENTS, MAX_CHARS = 200, 1000


class JobReporter(Observer):
    """Collects what a recipe tells, and sends it in the background.

    Args:
        first: Number that the recipe gives its first step.
    """

    def __init__(self, jobs: Jobs, job_id: str, attempt: int, first: int) -> None:
        self._jobs, self._job_id, self._attempt, self._first = jobs, job_id, attempt, first
        self._metrics: dict[int, dict[str, float]] = {}  # of steps to send, and of the newest, which may get more
        self._times: dict[int, float] = {}
        self._waiting: set[int] = set()
        self._newest: dict[str, float] = {}
        self._checkpoints: list[JobCheckpoint] = []
        self._said: list[JobEvent] = []
        self._run_id, self._total = "", 0
        self._resolved: Mapping[str, Any] | None = None
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()

    def began(self, run_id: str, total: int) -> None:
        self._run_id, self._total = run_id, total
        self._changed.set()

    def resolved(self, settings: Mapping[str, Any]) -> None:
        """Tell the settings as the recipe uses them."""
        self._resolved = settings

    def say(self, warning: str) -> None:
        """Tell what the training warns of."""
        self._said.append(JobEvent(0, time.time(), "warn", warning[:MAX_CHARS], "message", 0, {}))
        self._changed.set()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        step = iteration + 1 - self._first
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._metrics.setdefault(step, {}).update(finite)
        self._waiting.add(step)
        self._times.setdefault(step, time.time())
        self._newest |= finite
        self._changed.set()

    def saved(self, iteration: int, path: str) -> None:
        if iteration:  # what a training on rewards begins with is no result
            self._checkpoints.append(JobCheckpoint(iteration, path, time.time(), dict(self._newest)))
            self._changed.set()

    async def send_on(self) -> None:
        """Send what is told, without end."""
        while True:
            await self._changed.wait()
            await self.send()
            await asyncio.sleep(TOGETHER_S)

    async def send(self, end: JobEnd | None = None) -> None:
        """Send what was told and is not sent, and the end if there is one.

        Raises:
            StaleEpochError: The job is no longer this worker's.
        """
        async with self._sending:
            while True:
                self._changed.clear()
                steps, checkpoints = sorted(self._waiting)[:MAX_EVENTS], list(self._checkpoints)
                last = len(steps) == len(self._waiting)
                events, said = [self._event(step) for step in steps], list(self._said[:MAX_EVENTS])
                await self._jobs.report(
                    self._job_id, self._attempt, [*said, *events], checkpoints, run_id=self._run_id,
                    total_steps=self._total, resolved=self._resolved, end=end if last else None,
                )  # fmt: skip
                del self._checkpoints[: len(checkpoints)], self._said[: len(said)]
                for event in events:
                    if self._metrics[event.step] == event.data:  # nothing was added meanwhile
                        self._waiting.discard(event.step)
                for step in sorted(self._metrics)[:-1]:
                    if step not in self._waiting:
                        del self._metrics[step], self._times[step]
                if last:
                    return

    def _event(self, step: int) -> JobEvent:
        metrics = dict(self._metrics[step])
        return JobEvent(0, self._times[step], "info", _sentence(step, self._total, metrics), "metrics", step, metrics)


def _sentence(step: int, total: int, metrics: Mapping[str, float]) -> str:
    shown = {"train/loss": "training loss", "eval/loss": "validation loss", "rewards/reward": "mean reward"}
    figures = [f"{label}={metrics[name]:.4f}" for name, label in shown.items() if name in metrics]
    return ", ".join([f"Step {step}/{total}", *figures])
