"""Many trainings at once on one server: a grid of settings, compared by a metric, with successive halving."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradwire
from gradwire.html import table
from gradwire.loop.best import sign_of
from gradwire.loop.loggers import read_jsonl
from gradwire.loop.training_loop import TrainingStopped
from gradwire.recipes import command
from gradwire.recipes.folder import STATE
from gradwire.recipes.launch import Launch, Observer
from gradwire.recipes.report import page_of, plot_several
from gradwire.recipes.settings import RowSettings, Settings, SettingsError, setting
from gradwire.recipes.settings_file import built, read_yaml, set_by
from gradwire.whole_files import read_state

MOST_TRIALS = 256
LONGEST_TAG = 100
SMOOTHED = 10
"""Newest values of a training's own metric that are averaged; one of an evaluation is taken alone."""


@dataclass
class Sweep:
    """Many trainings, each with other settings."""

    recipe: str = setting("sft", "what to train, as for gradwire train")
    folder: str = setting("runs/sweep", "a folder for each training, table and curves; a rerun continues there")
    settings: dict[str, Any] = setting({}, "settings that all trainings share; `config: FILE` takes those of a file")
    config: str = setting("", "a configuration of the recipe, in place of settings or beneath them")
    grid: dict[str, Any] = setting({}, "setting -> list of its values; every combination is a training")
    by: str = setting("", "metric to compare by; empty: eval/loss, or eval/success on rewards; without them train's")
    parallel: int = setting(8, "trainings at once")
    halving: int = setting(0, "2 or more: only the best 1/halving of each round goes on; 0: all are trained to the end")
    rounds: int = setting(3, "rounds of halving, the last one included")

    def check(self) -> None:
        """Check that the values fit together.

        Raises:
            SettingsError: They do not.
        """
        for name in ("parallel", "rounds"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.halving < 0 or self.halving == 1:
            raise SettingsError(f"halving is {self.halving}; it must be 0, or 2 or more")
        for name, values in self.grid.items():
            if not isinstance(values, list) or not values or name in ("folder", "address"):
                raise SettingsError(f"grid has {name}: {values!r}; it maps settings of a training to lists of values")
        if not self.grid:
            raise SettingsError("grid is empty; it maps settings to lists, as learning_rate: [1e-4, 3e-4]")
        count = math.prod(map(len, self.grid.values()))
        if count > MOST_TRIALS:
            raise SettingsError(f"grid has {count} combinations; {MOST_TRIALS} at most")


@dataclass
class Trial:
    """One training of a sweep.

    Attributes:
        name: Its values, as ``learning_rate=0.001,lora_rank=8``, and its folder's name.
        values: Setting -> value, of the grid.
        settings: Its settings.
        error: Why it ended; "" if it did not fail.
        dropped: Step at which it was stopped as one of the worse; 0 if it was not.
        value: The metric after its last step; NaN if there is none.
    """

    name: str
    values: Mapping[str, Any]
    settings: Settings
    error: str = ""
    dropped: int = 0
    value: float = field(default=math.nan)

    @property
    def folder(self) -> Path:
        return Path(self.settings.folder)

    @property
    def step(self) -> int:
        """Steps taken by its newest checkpoint."""
        state = self.folder / STATE
        found = read_state(state) if state.exists() else {}
        return int(found.get("step", 0))

    def curve(self, metric: str, until: int | None = None) -> list[tuple[int, float]]:
        """The metric over the steps, or up to one."""
        file = self.folder / "metrics.jsonl"
        lines = read_jsonl(file) if file.exists() else []
        found = [(line["iteration"], float(line[metric])) for line in lines if line.get(metric) is not None]
        return [(step, value) for step, value in found if until is None or step <= until]

    def measured(self, metric: str, until: int | None = None) -> float:
        """The metric after a step; NaN if there is none."""
        values = [value for _, value in self.curve(metric, until)]
        kept = values[-1:] if metric.startswith("eval/") else values[-SMOOTHED:]
        return sum(kept) / len(kept) if kept else math.nan


class _Until(Observer):
    """Stops a training after so many steps; learns how many it has."""

    def __init__(self, steps: int | None) -> None:
        self._steps, self.total = steps, 0

    def began(self, run_id: str, total: int) -> None:
        self.total = total

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.stop_wanted = self._steps is not None and iteration >= self._steps


def load(path: Path | str, overrides: Sequence[str] = ()) -> tuple[Sweep, list[Trial]]:
    """Read a sweep from a YAML file, and check the settings of each of its trainings.

    Raises:
        SettingsError: The file or a training's settings have a mistake.
    """
    sweep = built(Sweep, *read_yaml(path, overrides, example="gradwire sweep --example"))
    shared = read_yaml(sweep.config)[0] | sweep.settings if sweep.config else sweep.settings
    try:
        trials = [
            _trial(sweep, shared, dict(zip(sweep.grid, each))) for each in itertools.product(*sweep.grid.values())
        ]
        _check_rounds(sweep, trials[0].settings)
        return sweep, trials
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _trial(sweep: Sweep, shared: Mapping[str, Any], values: Mapping[str, Any]) -> Trial:
    of_trial: dict[str, Any] = json.loads(json.dumps(shared))
    for name, value in values.items():
        set_by(of_trial, f"{name}={json.dumps(value)}")
    name = re.sub(r"[^\w.,=+-]+", "_", ",".join(f"{key}={value}" for key, value in values.items()))[:120]
    of_trial["folder"] = str(Path(sweep.folder) / name)
    tags = {"sweep": Path(sweep.folder).name} | {key: str(value)[:LONGEST_TAG] for key, value in values.items()}
    of_trial["tags"] = tags | (of_trial.get("tags") or {})
    settings = command.settings_of(sweep.recipe, of_trial)
    return Trial(name, values, settings)


async def run(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Carry out a sweep, and write its table and curves; return its trainings, the best first.

    Raises:
        SettingsError: Every training failed, or none has the metric that they are compared by.
    """
    if len({trial.name for trial in trials}) < len(trials):
        raise SettingsError("two trainings of the grid have the same values")
    metric, left = sweep.by or default_metric(trials[0].settings), list(trials)
    async with _shared(sweep, [trial.settings for trial in trials]) as launch:
        total = 0
        for number in range(sweep.rounds if sweep.halving else 1):
            until = _end_of_round(sweep, number, total, trials[0].settings) if sweep.halving else None
            total = max(total, *await _round(left, until, sweep.parallel, launch))
            left = [trial for trial in left if not trial.error]
            for trial in left:
                trial.value = trial.measured(metric, until)
            if left and all(math.isnan(trial.value) for trial in left):
                raise SettingsError(f"by is {metric!r}, which no training has; {_known(left[0])}")
            _write(sweep, trials, metric)
            if until is None or until >= total:
                break
            ranked = _ranked(left, metric)
            kept = max(1, math.ceil(len(ranked) / sweep.halving))
            for trial in ranked[kept:]:
                trial.dropped = until
            left = ranked[:kept]
    if not left:
        raise SettingsError(f"every training failed; the first, {trials[0].name}: {trials[0].error}")
    _write(sweep, trials, metric)
    return [*_ranked(left, metric), *(trial for trial in trials if trial not in left)]


def default_metric(settings: Settings) -> str:
    """The metric that a sweep compares unless told otherwise."""
    on_rows = isinstance(settings, RowSettings)
    if settings.eval_every and (settings.held_out or settings.validation):
        return "eval/loss" if on_rows else "eval/success"
    return "train/loss" if on_rows else "rewards/reward"


def _known(trial: Trial) -> str:
    file = trial.folder / "metrics.jsonl"
    names = sorted({name for line in (read_jsonl(file) if file.exists() else []) for name in line})
    return f"there are {', '.join(name for name in names if '/' in name)}"


def _ranked(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """The best first, those without a value last."""
    return sorted(trials, key=lambda each: (math.isnan(each.value), -sign_of(metric) * each.value))


def _end_of_round(sweep: Sweep, number: int, total: int, settings: Settings) -> int | None:
    """The step after which a round ends, one with an evaluation if there are any; None: the end of the training."""
    if number == sweep.rounds - 1:
        return None
    total = total or settings.max_steps
    if not total:
        raise SettingsError("halving needs max_steps, of which each round is a part")
    step = max(1, total // int(sweep.halving ** (sweep.rounds - 1 - number)))
    every = settings.eval_every if settings.held_out or settings.validation else 0
    return min(total, -(-step // every) * every) if every else step


def _check_rounds(sweep: Sweep, settings: Settings) -> None:
    """Check that each round of halving is longer than the one before it.

    Raises:
        SettingsError: One is not, as evaluations are too rare.
    """
    ends = [_end_of_round(sweep, number, 0, settings) for number in range(sweep.rounds - 1)] if sweep.halving else []
    steps = [*(each for each in ends if each is not None), settings.max_steps]
    if any(end <= before for before, end in itertools.pairwise(steps)):
        shown = ", ".join(map(str, steps))
        raise SettingsError(
            f"halving has {sweep.rounds} rounds, which would end after steps {shown}: each must be longer than the one"
            " before it; make eval_every or rounds smaller, or max_steps larger"
        )


async def _round(trials: Sequence[Trial], until: int | None, parallel: int, launch: Launch) -> list[int]:
    """Train each up to a step; return how many steps each has."""
    places = asyncio.Semaphore(parallel)

    async def one(trial: Trial) -> int:
        async with places:
            return await _train(trial, until, launch)

    return await asyncio.gather(*map(one, trials))


async def _train(trial: Trial, until: int | None, launch: Launch) -> int:
    if until is not None and trial.step >= until:
        return trial.settings.max_steps
    settings = trial.settings
    observer = _Until(until)
    if until is not None and not isinstance(settings, RowSettings):  # those on rewards take more iterations later
        settings = type(settings)(**vars(settings) | {"max_steps": min(until, settings.max_steps or until)})
    try:
        recipe = next(name for name, kind in command.RECIPES.items() if kind == type(trial.settings).__name__)
        await command.train(recipe, settings, replace(launch, observer=observer))
    except TrainingStopped:
        pass
    except (gradwire.GradwireError, ValueError, OSError, ImportError) as error:  # costs only this training
        trial.error = str(error) or type(error).__name__
    return trial.settings.max_steps or observer.total


@asynccontextmanager
async def _shared(sweep: Sweep, settings: Sequence[Settings]) -> AsyncIterator[Launch]:
    """One connection for all, and one server if they would each start their own."""
    state = _server_folder(sweep)
    address = settings[0].address
    own = {} if address else {"models": list(dict.fromkeys(each.model for each in settings)), "state_dir": state}
    async with gradwire.connect(address or None, **own) as service:  # type: ignore[arg-type]
        yield Launch(service=service, server=None if address else state)


def _server_folder(sweep: Sweep) -> Path:
    """Make the sweep's folder, and return where a server of its own has its state."""
    folder = Path(sweep.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "server"


def rows(trials: Sequence[Trial], metric: str) -> list[tuple[Any, ...]]:
    """The table: the values of each training, its steps, the metric, and what became of it; the best first."""
    ranked = [*_ranked([each for each in trials if not each.dropped and not each.error], metric)]
    ranked += sorted((each for each in trials if each.dropped), key=lambda each: -each.dropped)
    ranked += [each for each in trials if each.error]
    return [
        (
            *each.values.values(),
            each.step,
            each.value,
            each.error or (f"dropped at {each.dropped}" if each.dropped else ""),
        )
        for each in ranked
    ]


def _write(sweep: Sweep, trials: Sequence[Trial], metric: str) -> None:
    """Write ``sweep.json`` and ``sweep.html``."""
    folder = Path(sweep.folder)
    results = [
        {"name": each.name, "values": dict(each.values), "steps": each.step, "error": each.error,
         "value": None if math.isnan(each.value) else each.value, "dropped": each.dropped,
         "folder": each.settings.folder}
        for each in trials
    ]  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps({"by": metric, "trials": results}, indent=1), encoding="utf-8")
    headings = (*trials[0].values, "steps", metric, "")
    body = f"<h1>Sweep of {sweep.recipe}</h1>" + table(headings, rows(trials, metric))
    for name in dict.fromkeys((metric, "train/loss", "eval/loss", "rewards/reward")):
        body += plot_several(name, {each.name: each.curve(name) for each in trials if each.curve(name)})
    (folder / "sweep.html").write_text(page_of(f"Sweep of {sweep.recipe}", body), encoding="utf-8")
