"""Specifications of jobs: recipe, settings and files, and their checks."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller, Keys
from gradwire_server.access.model_names import ModelNames
from gradwire_server.config import ServerConfig
from gradwire_server.core.jobs import grading
from gradwire_server.core.jobs.files import Files
from gradwire_server.errors import ServiceError, check_length, invalid, limit_exceeded

RECIPES = (
    "sft", "dpo", "kto", "orpo", "simpo", "reward", "process_reward", "ppo", "grpo", "rloo", "gigpo", "distill",
)  # fmt: skip
SCRIPT = "script"
FILE_SETTINGS = ("data", "validation", "script")
"""Settings that name files of the owner's."""
OWN_SETTINGS = ("address", "folder")
"""Settings that are the server's to choose."""
CODE_SETTINGS = ("reward", "environment", "command")
"""Settings that may name code: as FILE.py:NAME or MODULE:NAME, or a program."""
PROGRAMS = {"environment": "agent", "command": ""}
"""Settings that start programs -> the value that does; any does if it is empty."""
WANDB = "wandb"
WANDB_SETTINGS = ("project", "name", "entity", "tags")
MAX_METADATA_CHARS = 512


class JobSpecs:
    """The checks of what jobs are asked to do."""

    def __init__(self, config: ServerConfig, keys: Keys, files: Files, models: ModelNames) -> None:
        self._config, self._keys, self._files, self._models = config, keys, files, models

    def content(self, caller: Caller, spec: jobs.JobSpec) -> bytes:
        """Serialize a job's specification with files by their digests: the same file may have been uploaded again.

        Raises:
            ServiceError: INVALID_ARGUMENT, LIMIT_EXCEEDED.
        """
        check_length(spec.settings, "max_kwargs_chars", self._config.limits.max_kwargs_chars, "settings")
        settings = settings_of(spec)
        for name in FILE_SETTINGS:
            with contextlib.suppress(ServiceError):  # of a file that is not there any more
                settings |= {name: self._files.get(caller, str(settings.get(name))).digest.hex()}
        told = jobs.JobSpec()
        told.CopyFrom(spec)
        told.settings = json.dumps(settings)
        return told.SerializeToString(deterministic=True)

    def check(self, caller: Caller, spec: jobs.JobSpec) -> None:
        """Check a job's recipe, settings and files.

        Raises:
            ServiceError: INVALID_ARGUMENT, UNKNOWN_FILE, UNKNOWN_MODEL, LIMIT_EXCEEDED; PERMISSION_DENIED for a script.
        """
        limits = self._config.limits
        if spec.recipe == SCRIPT:
            if not self._config.job_scripts:
                raise _denied("scripts are off on this server: --job-scripts lets administrators run them")
            if caller.role != "admin" and self._keys.required:
                raise _denied("only administrators may run scripts as jobs")
        elif spec.recipe not in RECIPES:
            raise invalid(f"recipe is {spec.recipe[:50]!r}; it must be one of {', '.join(RECIPES)}", "recipe")
        check_length(spec.name, "max_name_chars", limits.max_name_chars, "name")
        for field, text in (("settings", spec.settings), ("note", spec.note)):
            check_length(text, "max_kwargs_chars", limits.max_kwargs_chars, field)
        if len(spec.metadata) > limits.max_tags:
            raise limit_exceeded(f"{len(spec.metadata)} metadata", "max_tags", limits.max_tags, "metadata")
        for text in (text for pair in spec.metadata.items() for text in pair):
            if len(text) > MAX_METADATA_CHARS:
                raise invalid(
                    f"metadata has a text of {len(text)} characters; {MAX_METADATA_CHARS} at most", "metadata"
                )
        settings = settings_of(spec)
        for name in OWN_SETTINGS:
            if settings.get(name):
                raise invalid(f"{name} is the server's to choose: leave it out", name)
        _check_loggers(settings)
        if settings.get("init_from") and not str(settings["init_from"]).startswith("run-"):
            raise invalid("init_from is no checkpoint RUN_ID/NAME, and folders are the server's", "init_from")
        for name in CODE_SETTINGS if spec.recipe != SCRIPT else ():
            given = settings.get(name) or ""
            if name in PROGRAMS and given and PROGRAMS[name] in ("", given):
                raise invalid(
                    f"{name} starts a program on the server's machine for each episode, with the network and all files "
                    "that the server reads, which jobs do not: run `gradwire train` against this server, or, as an "
                    "administrator, send the training as a --script",
                    name,
                )
            if any(":" in str(each) for each in (given if isinstance(given, dict) else [given])):
                raise invalid(
                    f"{name} names code of its own, which jobs do not run: name what the server has, describe the "
                    "reward in `grading`, or send the training as a --script",
                    name,
                )
        rewards = settings.get("reward") or ""
        for each in map(str, rewards if isinstance(rewards, dict) else [rewards]):
            if each and not each.isidentifier() and not each.startswith("run-"):
                raise invalid(f"reward has {each[:50]!r}: name a reward, or a reward model RUN_ID/NAME", "reward")
        if spec.recipe != SCRIPT:
            if not isinstance(settings.get("model"), str):
                raise invalid("model is missing: name a model of this server", "model")
            self._models.find(settings["model"], "model")
        if not isinstance(settings.get(SCRIPT if spec.recipe == SCRIPT else "data"), str):
            raise invalid("data is missing: upload a file and name its id", "data")
        for name in FILE_SETTINGS:
            if settings.get(name):
                self._files.get(caller, str(settings[name]), name)

    async def check_settings(self, caller: Caller, spec: jobs.JobSpec) -> None:
        """Check that a job's recipe takes its settings.

        Raises:
            ServiceError: INVALID_ARGUMENT.
        """
        if spec.recipe != SCRIPT:
            await grading.check_settings(caller.name, spec.recipe, settings_of(spec), "settings")


def _check_loggers(settings: dict[str, Any]) -> None:
    """Check where else a job's metrics go: to Weights & Biases, or nowhere."""
    if settings.get("loggers") not in (None, [], [WANDB]):
        raise invalid("loggers of a job may be [wandb]; its metrics are among its events as well", "loggers")
    given = settings.get(WANDB) or {}
    if not isinstance(given, dict) or any(name not in WANDB_SETTINGS for name in given):
        raise invalid(f"wandb of a job is a mapping with {', '.join(WANDB_SETTINGS)}", "loggers")
    if settings.get("loggers") and not _has_wandb():
        raise ServiceError(
            pb.ERROR_CODE_UNSUPPORTED,
            "Weights & Biases is not installed on this server: `pip install 'gradwire[wandb]'`, and start it again",
            field="loggers",
        )


@functools.cache
def _has_wandb() -> bool:
    return importlib.util.find_spec(WANDB) is not None


def settings_of(spec: jobs.JobSpec) -> dict[str, Any]:
    """The settings of a job.

    Raises:
        ServiceError: INVALID_ARGUMENT if they are no JSON object.
    """
    try:
        settings = json.loads(spec.settings or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"settings are not JSON: {error}", "settings") from None
    if not isinstance(settings, dict):
        raise invalid("settings are a JSON object", "settings")
    return settings


def files_of(spec: jobs.JobSpec) -> list[str]:
    """Ids of the files that a job names."""
    settings = settings_of(spec)
    return [str(settings[name]) for name in FILE_SETTINGS if settings.get(name)]


def _denied(message: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message, field="recipe")
