"""Settings read from YAML and from the command line, and written as an example."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from gradwire.recipes.settings import SettingsError, value_of

S = TypeVar("S", bound="Checked")
ELSEWHERE = {
    "lr": "learning_rate", "base_model": "model", "model_name_or_path": "model", "output_dir": "folder",
    "dataset": "data", "datasets": "data", "num_train_epochs": "epochs", "num_epochs": "epochs",
    "per_device_train_batch_size": "batch_size", "micro_batch_size": "batch_size", "max_seq_length": "max_tokens",
    "gradient_accumulation_steps": "accumulation", "sequence_len": "max_tokens", "cutoff_len": "max_tokens",
    "max_length": "max_tokens", "lora_r": "lora_rank", "r": "lora_rank", "target_modules": "lora_targets",
    "lora_target": "lora_targets", "lora_target_modules": "lora_targets", "warmup_steps": "warmup",
    "warmup_ratio": "warmup", "lr_scheduler": "schedule", "lr_scheduler_type": "schedule", "optim": "optimizer",
    "betas": "optimizer_args", "adam_beta1": "optimizer_args", "adam_beta2": "optimizer_args",
    "adam_epsilon": "optimizer_args", "momentum": "optimizer_args", "eval_steps": "eval_every", "logging": "loggers",
    "save_steps": "save_every", "save_total_limit": "keep", "val_set_size": "held_out", "val_size": "held_out",
    "report_to": "loggers", "early_stopping_patience": "patience", "packing": "batch_tokens",
    "sample_packing": "batch_tokens", "num_generations": "group_size", "max_completion_length": "answer_tokens",
    "max_new_tokens": "answer_tokens", "reward_funcs": "reward", "resume_from_checkpoint": "init_from",
    "metric_for_best_model": "best_by", "max_samples": "limit", "beta": "loss",
}  # fmt: skip
"""Other trainers' words -> ours."""


class Checked(Protocol):
    """A dataclass of settings."""

    def check(self) -> None: ...


def load(kind: type[S], path: Path | str | None, overrides: Sequence[str] = ()) -> S:
    """Load settings from a YAML file.

    Args:
        kind: The settings of a recipe.
        path: The file; settings that it leaves out have their defaults. None: the overrides are all that is set.
        overrides: ``"name=value"`` or ``"section.name=value"``, which override the file.

    Raises:
        SettingsError: The file or an override has a mistake; names the line.
    """
    return built(kind, *(_overridden({}, {}, overrides) if path is None else read_yaml(path, overrides)))


def read_yaml(
    path: Path | str, overrides: Sequence[str] = (), *, example: str = "gradwire train --example NAME"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a mapping from a YAML file, overridden as :func:`load` says.

    Args:
        path, overrides: As for :func:`load`.
        example: The command that writes such a file; empty if there is none.

    Returns:
        Name -> value, and name -> where it is written, for errors.

    Raises:
        SettingsError: The file or an override has a mistake; names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise SettingsError(f"there is no file {path}" + (f"; `{example} > {path}` writes one" if example else ""))
    if path.suffix in (".jsonl", ".csv", ".parquet", ".txt", ".md"):
        raise SettingsError(f"{path} holds data; name a YAML file of settings, in which `data: {path}` names it")
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise SettingsError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        written = f"; see `{example}`" if example else ""
        raise SettingsError(f"{path}: settings are a mapping such as `model: NAME`{written}")
    places: dict[str, str] = {}
    for key, _ in root.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        if key.value in places:
            raise SettingsError(f"{place}: {key.value} is set a second time")
        places[key.value] = place
    return _overridden(values, places, overrides)


def _overridden(
    values: dict[str, Any], places: dict[str, str], overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    for override in overrides:
        set_by(values, override)
        places[override.partition("=")[0].partition(".")[0]] = f"--set {override}"
    return values, places


def set_by(values: dict[str, Any], override: str) -> None:
    """Set a value as ``"name=value"`` or ``"section.name=value"`` says.

    Raises:
        SettingsError: It says nothing that can be set.
    """
    dotted, equals, value = override.partition("=")
    *sections, name = dotted.strip().split(".")
    if not equals or not name or not all(sections):
        raise SettingsError(f"--set {override}: write NAME=VALUE, as learning_rate=1e-3 or loss.beta=0.1")
    section = values
    for each in sections:
        if section.get(each) is None:
            section[each] = {}
        section = section[each]
        if not isinstance(section, dict):
            raise SettingsError(f"--set {override}: {each} is a single value and has no {name}")
    try:
        section[name] = yaml.safe_load(value)
    except yaml.YAMLError:  # [::1]:50051, *.jsonl
        section[name] = value


def built(kind: type[S], content: Mapping[str, Any], places: Mapping[str, str] = types.MappingProxyType({})) -> S:
    """Build settings from values by name, those that are left out with their defaults.

    Args:
        kind: A dataclass with a method ``check``.
        places: Name -> where its value is written, for errors.

    Raises:
        SettingsError: A name is unknown, or a value does not fit.
    """
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in content.items():
        place = places.get(str(name), "")
        if name not in hints:
            near = (
                [ELSEWHERE[name]] if ELSEWHERE.get(name) in hints else difflib.get_close_matches(str(name), hints, n=1)
            )
            more = (
                f"; it takes {', '.join(hints)}" if len(hints) < 20 else "; `gradwire train --example RECIPE` shows all"
            )
            meant = f"; did you mean {near[0]}?" if near else more
            if "dora" in str(name).lower():
                meant = ": DoRA's magnitudes are not exact with grouped and paged runs; rslora is there"
            raise SettingsError(f"{place}: there is no setting {name!r}{meant}".removeprefix(": "))
        values[name] = value_of(hints[name], value, f"{place}: {name}".removeprefix(": "))
    settings = kind(**values)
    try:
        settings.check()
    except SettingsError as error:
        where = places.get(str(error).partition(" ")[0], "")
        raise SettingsError(f"{where}: {error}" if where else str(error)) from None
    return settings


def example(kind: type[Any]) -> str:
    """Write the defaults as YAML, with a comment on each setting."""
    return "\n".join(_lines(kind)) + "\n"


def _lines(kind: type[Any]) -> Iterator[str]:
    yield f"# {(kind.__doc__ or '').splitlines()[0]}"
    for field in dataclasses.fields(kind):
        value = getattr(kind(), field.name)
        shown = yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]
        yield f"{field.name}: {shown}  # {field.metadata.get('help', '')}"
