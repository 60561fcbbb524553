"""Code of one's own that settings name: rewards and environments."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import shlex
import sys
import traceback
import types
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from gradwire.data import Prompt
from gradwire.errors import GradwireError
from gradwire.recipes.folder import trained
from gradwire.recipes.settings import SettingsError
from gradwire.rl import last_number, math_answer, multiple_choice
from gradwire.rl.datasets import final_answer
from gradwire.rl.environments import AgentEnvironment, Environment, GroupBuilder
from gradwire.rl.rewards import OverlongPenalty, RewardModel, Scorer, WeightedReward, environment_reward
from gradwire.rl.rewards.computer import as_scorer, close_scorer
from gradwire.rl.rewards.graders import Grader, Sample, SampleError
from gradwire.rl.types import Action, Message, StepData, Task, Trajectory
from gradwire.sessions import SessionLimits

REWARDS: Mapping[str, Callable[[], Any]] = {
    "last_number": last_number, "math_answer": math_answer, "multiple_choice": multiple_choice,
    "environment": environment_reward,
}  # fmt: skip
"""Name -> makes the reward. ``environment`` takes what the environment itself gave."""
ENVIRONMENTS = "gradwire.environments"
"""The group of entry points in which packages offer environments."""
AGENT = "agent"
"""The environment of a program that calls the model by itself."""


def check_reward(reward: str | Mapping[str, float]) -> None:
    """Check the names and weights of the setting ``reward``, without loading anything.

    Raises:
        SettingsError: One is unknown, or a weight is no number.
    """
    if not reward:
        raise SettingsError("reward is empty")
    for name, weight in reward.items() if isinstance(reward, Mapping) else ((reward, 1.0),):
        if name not in REWARDS and ":" not in name and not is_trained(name):
            raise SettingsError(
                f"reward has {name!r}; it must be one of {', '.join(REWARDS)}, FILE.py:FUNCTION, the folder of a "
                "training by reward, or a mapping of these to weights"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise SettingsError(f"reward has the weight {weight!r} for {name}; it must be a number")


def is_trained(name: str) -> bool:
    """Whether a reward's name is that of a training: ``FOLDER``, ``FOLDER@CHECKPOINT`` or ``RUN_ID/NAME``."""
    return name not in REWARDS and ":" not in name and (name.startswith("run-") or Path(name.split("@")[0]).is_dir())


def trained_rewards(reward: str | Mapping[str, float]) -> list[str]:
    """Return those names of the setting ``reward`` that are trainings."""
    return [name for name in ([reward] if isinstance(reward, str) else reward) if is_trained(name)]


@asynccontextmanager
async def reward_models(
    service: Any, reward: str | Mapping[str, float], missing_eos_penalty: float = 0.0
) -> AsyncIterator[dict[str, Scorer]]:
    """Load the reward models that the setting ``reward`` names: copies of their runs, deleted at the end.

    Args:
        missing_eos_penalty: Taken off the score of an answer that was cut: a model of whole answers cannot judge it.
    """
    runs = {name: await service.fork_run(trained(name).checkpoint) for name in trained_rewards(reward)}
    try:
        for name, run in runs.items():
            if (head := (await run.info()).head) != "reward":
                raise SettingsError(f"reward has {name}, whose run has {head or 'no'} head: name a training by reward")
        models = {name: RewardModel(run) for name, run in runs.items()}
        yield {name: OverlongPenalty(each, penalty=missing_eos_penalty) for name, each in models.items()}
    finally:
        for run in runs.values():
            with suppress(GradwireError):
                await service.delete_run(run.run_id)


def reward_of(reward: str | Mapping[str, float], models: Mapping[str, Scorer] = types.MappingProxyType({})) -> Scorer:
    """Make the reward that the setting ``reward`` describes. Functions of one's own run in the sandbox.

    Args:
        models: The rewards that are trainings, from :func:`reward_models`.

    Raises:
        SettingsError: Its code cannot be loaded, or is no reward.
    """
    names = list(reward) if isinstance(reward, Mapping) else [reward]
    functions = dict(models)
    for name in names:
        if name not in models:
            functions[name] = REWARDS[name]() if name in REWARDS else loaded(name, "reward")
    if isinstance(reward, str):
        return _scorer(functions[reward])
    shown = {name.rpartition(":")[2] if _single(name, names) else name: each for name, each in functions.items()}
    return WeightedReward({name: _scorer(each) for name, each in shown.items()}, dict(zip(shown, reward.values())))


def task_of(row: Prompt, reward: str | Mapping[str, float]) -> Task:
    """Return the problem of a row, for a reward that compares with its answer: of a worked solution, with the last.

    Its ``task_id`` is the row's, if there is such a column.
    """
    answer = row.answer
    if isinstance(answer, str) or (answer is not None and reward in REWARDS):
        answer = final_answer(str(answer))
    return Task(cast("tuple[Message, ...]", row.prompt), answer, str(row.columns.get("task_id", "")), row.columns)


def _scorer(reward: Any) -> Scorer:
    try:
        return as_scorer(reward)
    except TypeError as error:  # parameters that no reward function may take
        raise SettingsError(f"reward: {error}") from None


@dataclass(frozen=True)
class AnsweredRow(Sample):
    """An answer with its row, for graders and for rewards.

    Attributes:
        row: The problem.
        token_ids: ``[tokens]``, the answer.
        stop_reason: Why it ended: ``"eos"``, ``"stop"`` or ``"length"``.
    """

    row: Prompt
    token_ids: Any
    stop_reason: str


class RewardGrader(Grader):
    """A reward of trainings as a grader of :class:`AnsweredRow`.

    Args:
        reward: Its name, as the setting ``reward`` has it.

    Raises:
        SettingsError: There is none.
    """

    def __init__(self, reward: str) -> None:
        check_reward(reward)
        self._reward, self.name, self._scorer = reward, reward.rpartition(":")[2], reward_of(reward)

    async def grade(self, sample: Sample) -> float:
        assert isinstance(sample, AnsweredRow)
        ids = np.asarray(sample.token_ids, np.int64)
        step = StepData(0, "", "", ids[:0], Action(sample.text), ids, np.zeros(len(ids), np.float32),
                        stop_reason=sample.stop_reason)  # fmt: skip
        (result,) = await self._scorer.evaluate([Trajectory(task_of(sample.row, self._reward), steps=[step])])
        if result.error:
            raise SampleError("other_error", result.error)
        return result.score

    def close(self) -> None:
        close_scorer(self._scorer)


def _single(name: str, names: list[str]) -> bool:
    """Whether the part of a name behind the colon tells it from the others."""
    return sum(each.rpartition(":")[2] == name.rpartition(":")[2] for each in names) == 1


def agent_of(command: str | list[Any], arguments: Mapping[str, Any], reward: Scorer | None) -> AgentEnvironment:
    """Make the environment of a program that calls the model by itself.

    Args:
        command: The program and its arguments, as a shell would read them or as a list.
        arguments: Further options of :class:`~gradwire.rl.AgentEnvironment`; ``limits`` as a mapping.
        reward: Scores each episode in its folder.

    Raises:
        SettingsError: An option is unknown or of another kind.
    """
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    try:
        options: Any = dict(arguments) | {"command": words}
        if reward is not None:
            options["reward"] = reward
        if "limits" in options:
            options["limits"] = SessionLimits(**options["limits"])
        return AgentEnvironment(**options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"environment_args of the agent: {error}") from error


def environment_of(reference: str, arguments: Mapping[str, Any]) -> Environment | GroupBuilder | None:
    """Make the environment that the setting ``environment`` names; None if it is empty.

    Args:
        reference: ``FILE.py:NAME`` or ``MODULE:NAME`` of a class or function that makes one, or an entry point of the
            group ``gradwire.environments``.
        arguments: Its keyword arguments.

    Raises:
        SettingsError: There is none, or it cannot be made.
    """
    if not reference:
        return None
    if ":" in reference:
        make = loaded(reference, "environment")
    else:
        offered = {each.name: each for each in importlib.metadata.entry_points(group=ENVIRONMENTS)}
        if reference not in offered:
            known = f"there are {', '.join(sorted(offered))}, or" if offered else "no package offers any:"
            raise SettingsError(f"environment: there is no entry point {reference!r}; {known} write FILE.py:NAME")
        make = offered[reference].load()
    try:
        made = make if isinstance(make, Environment | GroupBuilder) and not arguments else make(**arguments)
    except Exception as error:  # its own code may raise anything
        raise SettingsError(f"environment: {reference} with {dict(arguments)}: {_told(error)}") from error
    if not isinstance(made, Environment | GroupBuilder):
        raise SettingsError(
            f"environment: {reference} makes {type(made).__name__}; it must be a BaseEnvironment or a GroupBuilder of "
            "gradwire.rl"
        )
    return made


def loaded(reference: str, setting: str) -> Any:
    """Load ``FILE.py:NAME`` or ``MODULE:NAME``.

    Raises:
        SettingsError: There is no such file, module or name, or it fails when it is imported.
    """
    place, _, name = reference.rpartition(":")
    try:
        module = _from_file(Path(place), setting) if place.endswith(".py") else importlib.import_module(place)
    except SettingsError:
        raise
    except ModuleNotFoundError as error:
        raise SettingsError(f"{setting}: there is no module {error.name!r}, which {reference} needs") from error
    except Exception as error:  # the user's own code may raise anything
        raise SettingsError(f"{setting}: {place} cannot be imported: {_told(error)}") from error
    if not hasattr(module, name):
        has = ", ".join(each for each, value in vars(module).items() if callable(value) and each[0] != "_")
        raise SettingsError(f"{setting}: {place} has no {name!r}; it has {has or 'no functions'}")
    return getattr(module, name)


def _from_file(file: Path, setting: str) -> types.ModuleType:
    """Import a file as Python does a script: what lies beside it can be imported as well, also in the sandbox."""
    file = file.expanduser().resolve()
    if not file.is_file():
        raise SettingsError(f"{setting}: there is no file {file}")
    name = file.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", "") != str(file):  # another has the name
        name = f"{name}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(error: Exception) -> str:
    """An error and the last line that raised it."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<frozen")]
    if isinstance(error, SyntaxError):
        frames = []  # its own text has the line
    return f"{type(error).__name__}: {error}" + (
        f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    )
