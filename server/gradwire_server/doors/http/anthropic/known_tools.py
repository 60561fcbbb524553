"""Tools whose form Anthropic's models know and the client runs: as functions, for models that do not know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_PLACE: dict[str, Any] = {
    "path": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
}
_PLACE |= {"file_text": _TEXT, "view_range": {"type": "array", "items": _NUMBER}}


def _of_commands(*commands: str, **more: Any) -> dict[str, Any]:
    properties = {"command": {"type": "string", "enum": list(commands)}, **_PLACE, **more}
    return {"type": "object", "properties": properties, "required": ["command"]}


_EDITS = ("view", "create", "str_replace", "insert")
_BASH = {"command": _TEXT, "restart": {"type": "boolean"}}
KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bash": ("Run a command in a shell that stays open.", {"type": "object", "properties": _BASH}),
    "text_editor": ("Read and edit files.", _of_commands(*_EDITS)),
    "memory": (
        "Read and edit files that are kept.",
        _of_commands(*_EDITS, "delete", "rename", old_path=_TEXT, new_path=_TEXT),
    ),
}
"""Beginning of a type -> a description and the schema of its input (Anthropic's API reference)."""


def known_tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tool of a known type as a function; None for another."""
    kind, _, _date = str(tool.get("type")).rpartition("_")
    if kind not in KNOWN or not isinstance(tool.get("name"), str):
        return None
    description, parameters = KNOWN[kind]
    return {"name": tool["name"], "description": description, "parameters": parameters}
