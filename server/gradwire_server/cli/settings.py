"""Settings of `gradwire serve`: flags over environment variables over a YAML file over defaults.

The flags are made from the fields of :class:`.ServerConfig`, so that a new setting is one field there.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from gradwire_server.cli.settings_file import SettingsError, SettingsFile
from gradwire_server.config import ServerConfig
from gradwire_server.limits import Limits

PREFIX = "GRADWIRE_"
_REPEATED = {
    "models": "--model", "allow_models": "--allow-model", "losses": "--losses", "limits": "--limit",
    "host_names": "--host-name", "each_engine": "--engine",
}  # fmt: skip


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each setting. Its parameter ``flags`` gets those that were given."""

    def run(**given: Any) -> None:
        flags = {name: given.pop(name) for name in ServerConfig.model_fields}
        command(**given, flags={name: value for name, value in flags.items() if value is not None})

    own = inspect.signature(command, eval_str=True).parameters.values()
    options = [_option(name, field) for name, field in ServerConfig.model_fields.items()]
    wrapper: Any = run
    wrapper.__signature__ = inspect.Signature([*options, *(option for option in own if option.name != "flags")])
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return run


def load(flags: Mapping[str, Any], file: Path | None) -> ServerConfig:
    """The settings from all sources. A limit of one source stands beside the limits of the others.

    Args:
        flags: setting -> value, those that were given.

    Raises:
        SettingsError: a setting that does not exist, or a value that cannot be used.
    """
    flags = dict(flags)
    if "limits" in flags:
        flags["limits"] = dict(map(_limit, flags["limits"]))
    environment = _environment()
    read = SettingsFile(Path(), {}, {}) if file is None else SettingsFile.read(file)
    sources = (read.values, environment, flags)
    merged = {name: value for source in sources for name, value in source.items()}
    limits = [source["limits"] for source in sources if "limits" in source]
    if limits and all(isinstance(part, dict) for part in limits):
        merged["limits"] = {name: value for part in limits for name, value in part.items()}
    try:
        return ServerConfig.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(*(_sentence(fault, flags, environment, read) for fault in error.errors())) from None


def misspelled_variables() -> list[str]:
    """A sentence for each environment variable that is no setting, and almost has the name of one."""
    variables = [_variable((name,)) for name in ServerConfig.model_fields]
    sentences = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name.partition("__")[0] not in variables:
            nearest = difflib.get_close_matches(name, variables, 1, 0.92)
            if nearest:
                sentences.append(f"{name} is no setting and is ignored; did you mean {nearest[0]}?")
    return sentences


class _EnvironmentSettings(ServerConfig, BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True, enable_decoding=False
    )


def _environment() -> dict[str, Any]:
    return EnvSettingsSource(_EnvironmentSettings)()


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind: Any = field.annotation
    if name in _REPEATED:
        kind = list[Path] if name == "losses" else list[str]
    elif kind == ByteSize | None or name in ("engines", "ranks"):
        kind = str
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    words = [_REPEATED[name]] if name in _REPEATED else []
    shown = str(field.default) if isinstance(field.default, str | int | float | Path) and field.default != "" else False
    if isinstance(field.default, bool):
        shown = False
    info = typer.Option(
        *words,
        help=str(field.description).replace("[", "\\["),
        show_default=shown,
        rich_help_panel=str(extra["subject"]),
    )
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[kind | None, info]
    )


def _limit(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise SettingsError(f"--limit {text}: give NAME=VALUE, as --limit max_rows=1000")
    return name.replace("-", "_"), value


def _sentence(fault: ErrorDetails, flags: Mapping[str, Any], environment: Mapping[str, Any], file: SettingsFile) -> str:
    keys = tuple(map(str, fault["loc"]))
    if not keys:
        return _reason(fault)
    if _holds(flags, keys):
        place = _flag(keys)
    elif _holds(environment, keys):
        place = _variable(keys)
    else:
        place = f"{file.place(keys)}: {'.'.join(keys)}"
    if fault["type"] != "extra_forbidden":
        return f"{place}: {_reason(fault)}"
    in_limits = keys[0] == "limits"
    known: Iterable[str] = Limits.model_fields if in_limits else ServerConfig.model_fields
    nearest = difflib.get_close_matches(keys[-1], known, 1, 0.5)
    advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(sorted(known))}"
    return f"{place}: there is no such {'limit' if in_limits else 'setting'}; {advice}"


def _reason(fault: ErrorDetails) -> str:
    if "error" in fault.get("ctx", {}):  # a validator's own words
        return str(fault["ctx"]["error"])
    message = fault["msg"][:1].lower() + fault["msg"][1:]
    return f"{message}, not {fault['input']!r:.100}"


def _holds(source: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    """Whether a source gave this setting, or this key of it."""
    value = source.get(keys[0])
    if keys[0] == "limits" and len(keys) > 1 and isinstance(value, Mapping):
        return keys[1] in value
    return keys[0] in source


def _flag(keys: tuple[str, ...]) -> str:
    flag = _REPEATED.get(keys[0], f"--{keys[0].replace('_', '-')}")
    return f"{flag} {keys[1]}" if keys[0] == "limits" and len(keys) > 1 else flag


def _variable(keys: tuple[str, ...]) -> str:
    words = keys[:2] if keys[0] == "limits" else keys[:1]
    return PREFIX + "__".join(words).upper()
