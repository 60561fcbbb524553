"""Settings from a YAML file, with the line of each for messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class SettingsError(Exception):
    """Settings that cannot be used: a sentence for each fault.

    Attributes:
        may_pass: Whether what they name is only missing or taken now, as a folder that is not mounted yet.
    """

    def __init__(self, *sentences: str, may_pass: bool = False) -> None:
        super().__init__("\n".join(sentences))
        self.sentences, self.may_pass = sentences, may_pass


@dataclass(frozen=True)
class SettingsFile:
    """A file's settings.

    Attributes:
        values: setting -> value, as YAML reads it.
        lines: path of keys -> line, for settings and the keys inside them.
    """

    path: Path
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    @classmethod
    def read(cls, path: Path) -> SettingsFile:
        """Read a file of settings.

        Raises:
            SettingsError: the file cannot be read, is no YAML, is no mapping, or has a key twice.
        """
        try:
            text = path.expanduser().read_text(encoding="utf-8")
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            values = yaml.safe_load(text)
        except OSError as error:
            raise SettingsError(f"{path}: the file of settings cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{path}: the file of settings is no UTF-8 text") from None
        except yaml.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise SettingsError(f"{path}{line}: this is no YAML: {error.problem}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: as of the date 2026-99-99
            raise SettingsError(f"{path}: this is no YAML: {' '.join(str(error).split())}") from None
        if root is None:
            return cls(path, {}, {})
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError(f"{path}, line {root.start_mark.line + 1}: a file of settings has lines NAME: VALUE")
        lines: dict[tuple[str, ...], int] = {}
        _add_lines(path, root, (), lines)
        return cls(path, {str(key): value for key, value in values.items()}, lines)

    def place(self, keys: tuple[str, ...]) -> str:
        """Where a setting is, as the beginning of a sentence."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}, line {self.lines[keys]}" if keys else str(self.path)


def _add_lines(path: Path, node: Any, above: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    for key, value in node.value:
        keys, line = (*above, str(key.value)), key.start_mark.line + 1
        if keys in lines:
            raise SettingsError(f"{path}, line {line}: {'.'.join(keys)} is already on line {lines[keys]}")
        lines[keys] = line
        if isinstance(value, yaml.MappingNode) and not above:  # settings have keys inside them, and those have none
            _add_lines(path, value, keys, lines)
