"""Run one job: its recipe in its folder, from where the last worker of it was.

The process that started this one holds the other end of stdin: when it dies, stdin ends, and so does this process at
once. SIGTERM asks for a checkpoint and then the end. Both leave the job to the next worker, as a kill does.
"""

from __future__ import annotations

import asyncio
import csv
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gradwire
from gradwire import JobCheckpoint, JobEnd, JobEvent, Jobs, errors
from gradwire.data import DataError
from gradwire.loop.training_loop import TrainingStopped
from gradwire.recipes import command
from gradwire.recipes.launch import Launch, Observer
from gradwire.recipes.rows import ColumnsError
from gradwire.recipes.settings import SettingsError
from gradwire.whole_files import read_state

log = logging.getLogger("gradwire.jobs")


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


CLOCK = re.compile("time|second")
"""Names of metrics that depend on the clock, which stay out."""
COLUMNS = {
    "train_loss": "train/loss", "train_accuracy": "train/token_accuracy", "valid_loss": "eval/loss",
    "valid_mean_token_accuracy": "eval/token_accuracy",
}  # fmt: skip
"""OpenAI's columns, which come first -> our metrics; ours follow under their own names."""


def write_results(events: Sequence[JobEvent], path: Path) -> Path:
    """Write the metrics of a job's events as CSV."""
    steps = sorted((event for event in events if event.type == "metrics"), key=lambda event: event.step)
    ours = sorted({name for event in steps for name in event.data if not CLOCK.search(name)})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *COLUMNS, *ours])
        for event in steps:
            values = [event.data.get(name, "") for name in (*COLUMNS.values(), *ours)]
            writer.writerow([event.step, *values])
    return path


LOST = 75
"""Exit code of a worker that lost the server; the next one goes on."""
STOP_S = 10.0
"""Seconds after SIGTERM in which a step ends and a checkpoint is saved, before the training is interrupted."""
AT_FAULT = (SettingsError, gradwire.InvalidRequestError, gradwire.OperationError, ValueError, OSError, ImportError)
"""Errors that are told as a sentence; a traceback of any other is in the log as well."""


@dataclass(frozen=True)
class Task:
    """The server's instructions to its worker.

    Attributes:
        address: Where the server is.
        key: Secret with the rights of the job's owner.
        job_id, attempt: The job to run, and the number of its attempt.
        folder: The job's folder, in which the last worker left off.
    """

    address: str
    key: str
    job_id: str
    attempt: int
    folder: str


def main() -> None:
    """Run the job that the first line of stdin names; end with 0 once its end is reported."""
    task = Task(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    lock = os.open(Path(task.folder) / "worker.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the worker before this one may still be ending
    try:
        raise SystemExit(asyncio.run(_run(task)))
    except errors.RETRYABLE as error:
        log.warning("the server is away: %s", error)
        raise SystemExit(LOST) from None


class _Files:
    """The files of a job in its folder.

    Args:
        folder: The job's folder.
    """

    def __init__(self, service: gradwire.ServiceClient, folder: Path) -> None:
        self._service, self._folder = service, folder / "files"
        self._names: dict[str, str] = {}

    async def fetch(self, file_id: str) -> Path:
        """Download a file, unless an earlier worker has and it is as it was."""
        await asyncio.to_thread(self._folder.mkdir, exist_ok=True)
        described = await self._service.files.get(file_id)
        target = self._folder / f"{file_id}{Path(described.filename).suffix}"
        self._names[str(target)] = described.filename
        if await asyncio.to_thread(_sha256, target) != described.sha256:
            partial = await self._service.files.download(file_id, self._folder / f"{file_id}.part")
            if await asyncio.to_thread(_sha256, partial) != described.sha256:
                raise ValueError(f"{described.filename} ({file_id}) was damaged on its way to the job")
            partial.rename(target)
        return target

    def named(self, text: str) -> str:
        """A text in which the files have the names that their owner gave them."""
        for path, name in self._names.items():
            text = text.replace(path, name)
        return text


class _Warnings(logging.Handler):
    """Tells the job's owner what the SDK and the recipes warn of."""

    def __init__(self, reporter: JobReporter, files: _Files) -> None:
        super().__init__(logging.WARNING)
        self._reporter, self._files = reporter, files
        self._loop = asyncio.get_running_loop()
        self.addFilter(lambda record: record.name != log.name)

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._reporter.say, self._files.named(record.getMessage()))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(LOST)


async def _run(task: Task) -> int:
    async with gradwire.connect(task.address, api_key=task.key) as service:
        job = await service.jobs.get(task.job_id)
        first = 0 if job.recipe != "script" and command.is_on_rewards(job.recipe) else 1
        reporter = JobReporter(service.jobs, task.job_id, task.attempt, first)
        files = _Files(service, Path(task.folder))
        logging.getLogger("gradwire").addHandler(_Warnings(reporter, files))
        working = asyncio.create_task(_work(task, job, service, reporter, files))
        sending = asyncio.create_task(reporter.send_on())
        _on_stop(lambda: _stop(reporter, working))
        try:
            await asyncio.wait([working, sending], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():  # the job is no longer this worker's, or the server is away
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                await sending
            end = JobEnd("succeeded", tuple(await working))
        except (TrainingStopped, asyncio.CancelledError):
            with suppress(gradwire.StaleEpochError):  # paused or cancelled: what was saved is told by the next worker
                await reporter.send()
            return LOST
        except errors.RETRYABLE:
            raise
        except (gradwire.StaleEpochError, gradwire.AccessError) as error:
            log.warning("the job is no longer this worker's: %s", error)
            return LOST
        except Exception as error:  # told to the job's owner, who has to do something about it
            log.error("the job failed: %s", error, exc_info=not isinstance(error, AT_FAULT))
            end = _failed(error, files)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await reporter.send(end)
    return 0


async def _work(
    task: Task, job: gradwire.Job, service: gradwire.ServiceClient, reporter: JobReporter, files: _Files
) -> list[str]:
    """Run the recipe; return the ids of the result files."""
    folder = Path(task.folder)
    values = dict(job.settings)
    for name in ("data", "validation", "script"):
        if values.get(name):
            values[name] = str(await files.fetch(str(values[name])))
    os.environ["GRADWIRE_API_KEY"] = task.key  # of the recipe's own connection
    if job.recipe == "script":
        os.environ["GRADWIRE_ADDRESS"] = task.address
        await asyncio.to_thread(_run_script, Path(values["script"]), folder, job.settings)
        return []
    if values.get("loggers"):  # the next worker goes on with the same run of Weights & Biases
        values["wandb"] = {**values.get("wandb", {}), "id": task.job_id, "resume": "allow"}
    settings = command.settings_of(job.recipe, values | {"address": task.address, "folder": str(folder)})
    resolved = {name: value for name, value in asdict(settings).items() if name not in ("address", "folder")}
    reporter.resolved(resolved | {name: job.settings[name] for name in ("data", "validation") if name in job.settings})
    if task.attempt > 1:
        await _delete_orphans(service, folder)
        _tell_again(folder, reporter)
    await command.train(job.recipe, settings, Launch(observer=reporter))
    if task.attempt > 1:  # a killed worker's run may have been made only after this one's
        await _delete_orphans(service, folder)
    await reporter.send()
    events = await service.jobs.events(task.job_id)
    file = await asyncio.to_thread(write_results, events, folder / "results.csv")
    key = f"{task.job_id}/{await asyncio.to_thread(_sha256, file)}"
    uploaded = await service.files.upload(file, "fine-tune-results", idempotency_key=key)
    return [uploaded.file_id]


def _sha256(file: Path) -> str:
    """SHA-256 of a file in hex; "" if there is none."""
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


async def _delete_orphans(service: gradwire.ServiceClient, folder: Path) -> None:
    """Delete runs of earlier workers that were killed before they wrote down which run is theirs."""
    file = folder / "state.json"
    known = read_state(file)["run_id"] if file.exists() else ""
    for run in await service.list_runs():
        if run.name == folder.name and run.run_id != known:
            await service.delete_run(run.run_id)


def _tell_again(folder: Path, reporter: JobReporter) -> None:
    """Tell the metrics that the last worker wrote down and may not have reported."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            metrics = json.loads(line)
        except ValueError:  # cut off by a kill
            return
        step = metrics.pop("iteration")
        metrics.pop("time", None)
        reporter.log(step, {name: value for name, value in metrics.items() if isinstance(value, int | float)})


def _run_script(script: Path, folder: Path, settings: Any) -> None:
    os.chdir(folder)
    sys.argv = [str(script), *map(str, settings.get("arguments", ()))]
    runpy.run_path(str(script), run_name="__main__")


def _on_stop(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)


def _stop(reporter: JobReporter, working: asyncio.Task[list[str]]) -> None:
    reporter.stop_wanted = True
    asyncio.get_running_loop().call_later(STOP_S, working.cancel)


def _failed(error: Exception, files: _Files) -> JobEnd:
    """Describe an error to the job's owner."""
    if isinstance(error, DataError | ColumnsError):
        message = files.named(error.where if isinstance(error, DataError) else str(error))
        return JobEnd("failed", error=message, error_code="invalid_training_file", param="training_file")
    message = files.named(str(error) or type(error).__name__)
    if isinstance(error, SettingsError):
        return JobEnd("failed", error=message, error_code="invalid_settings")
    param = error.field if isinstance(error, gradwire.GradwireError) else ""
    return JobEnd("failed", error=message[:1000], error_code="training_failed", param=param)
