"""Settings as YAML: errors name the line; written files have a comment on every setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.extras import require

yaml: Any = require("yaml", "router", "gradwire.router.settings_file")
pydantic: Any = require("pydantic", "router", "gradwire.router.settings_file")

from gradwire.router.settings import RouterSettings, Section  # noqa: E402

Place = tuple[str | int, ...]

HEADER = """\
# A policy that routes requests to collaboration modes, trained by PPO on synthetic rollouts. Everything is off.
# To train: rllm.enabled and trainer.enabled. To keep the result: experiment.enabled.
"""


class SettingsError(ValueError):
    """Invalid settings; the message names the file, the line and the rule."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, which also reads ``1e-3`` as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_settings(path: Path | str, overrides: Sequence[str] = ()) -> RouterSettings:
    """Load the settings of a file.

    Args:
        path: A YAML file; omitted settings have their defaults.
        overrides: Settings such as ``"trainer.learning_rate=1e-3"``, which override the file.

    Raises:
        FileNotFoundError: There is no such file.
        SettingsError: The file has a mistake; names its line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no settings file {path}; `gradwire router config > {path}` writes one")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None
    return parse_settings(text, overrides, str(path))


def parse_settings(text: str, overrides: Sequence[str] = (), name: str = "settings") -> RouterSettings:
    """Parse settings from a text like :func:`load_settings`; ``name`` is the file's name in messages."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        lines = {} if root is None else dict(_lines(root, (), name))
        sections = yaml.load(text, Loader=_Loader) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise SettingsError(f"{name}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{name}: not valid YAML: {error}") from None
    if not isinstance(sections, dict):
        raise SettingsError(
            f"{name}, line 1: settings must be a mapping with sections such as `rllm:`, got {type(sections).__name__}"
        )
    set_here = [_override(sections, override) for override in overrides]
    try:
        return RouterSettings.model_validate(sections)
    except pydantic.ValidationError as error:
        said = [_message(each, lines, set_here, name) for each in error.errors()]
        raise SettingsError("\n".join(said)) from None


def _lines(node: Any, place: Place, name: str) -> Iterator[tuple[Place, int]]:
    """Find the line of every setting, from 1."""
    yield place, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise SettingsError(f"{name}, line {line}: {key.value!r} is also on line {seen[key.value]}; keep one")
            seen[key.value] = line
            yield from _lines(value, (*place, key.value), name)
            yield (*place, key.value), line
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*place, index), name)


def _override(values: dict[str, Any], override: str) -> Place:
    """Set ``a.b=value`` in the settings; return its place."""
    dotted, equals, value = override.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        raise SettingsError(f"--set {override}: write SECTION.NAME=VALUE, as trainer.learning_rate=1e-3")
    section: Any = values
    for name in names[:-1]:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise SettingsError(f"--set {override}: {name} is a single value and has no {names[-1]}")
    try:
        section[names[-1]] = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError:
        section[names[-1]] = value
    return tuple(names)


def _message(error: Mapping[str, Any], lines: Mapping[Place, int], set_here: Sequence[Place], name: str) -> str:
    place: Place = tuple(error["loc"])
    dotted = ".".join(map(str, place))
    if place in set_here:
        where = f"--set {dotted}"
    else:
        known = place
        while known and known not in lines:
            known = known[:-1]
        where = f"{name}, line {lines[known]}" if known else name
        where += f": {dotted}" if dotted else ""
    if error["type"] == "extra_forbidden":
        section = _section(place[:-1])
        names = (
            f"; {'.'.join(map(str, place[:-1])) or 'a file'} takes {', '.join(section.model_fields)}" if section else ""
        )
        return f"{where}: there is no such setting{names}"
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "model_type":
        said = "this is a section, with settings of its own"
    shown = "" if error["type"] == "value_error" else f", not {error['input']!r}"
    return f"{where}: {said[0].lower() + said[1:] if said else said}{shown}"


def _section(place: Place) -> type[Section] | None:
    kind: Any = RouterSettings
    for name in place:
        field = kind.model_fields.get(name)
        kind = field.annotation if field is not None else None
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            return None
    found: type[Section] = kind
    return found


def render(settings: RouterSettings | None = None) -> str:
    """Render settings as YAML with a comment on each; by default the defaults, all off."""
    return HEADER + "".join(_render(settings or RouterSettings(), 0))


def _render(section: Section, depth: int) -> Iterator[str]:
    margin = "  " * depth
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            doc = (type(value).__doc__ or "").splitlines()[0].rstrip(".")
            yield f"{'' if depth else chr(10)}{margin}{name}:  # {doc}\n"
            yield from _render(value, depth + 1)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            yield f"{margin}{name}: {text}{f'  # {field.description}' if field.description else ''}\n"
