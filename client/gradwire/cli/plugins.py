"""Commands of the entry-point group ``gradwire.commands``, imported only when they run.

An entry point ``NAME = "module:object [extra]"`` becomes ``gradwire NAME``, and ``GROUP.NAME`` becomes ``gradwire GROUP
NAME``. The object is a ``typer.Typer``, or a function that takes the list of arguments. The extra is the one of
gradwire that the command needs.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

GROUP = "gradwire.commands"
HELP = {
    "serve": "Hold models and serve training runs.",
    "engine": "Lend an engine of this machine to a server.",
    "fleet": "Start engines for a server on the machines of a Ray cluster.",
    "evaluate": "Grade the answers of a model and of its checkpoints.",
    "estimate": "Compute what a training takes in memory.",
    "keys": "Create, list and revoke the API keys of a server.",
    "backup": "Copy a state folder, also of a running server.",
    "restore": "Make a state folder from a backup.",
    "repair": "Build a state folder's database again from its files.",
    "console": "See and steer a server's trainings in a browser.",
    "feedback": "Serve people's scores and train on them.",
    "router": "Train a policy that routes requests.",
    "train": "Train by a recipe from a configuration file.",
    "verify": "Compute a recorded run again, and compare.",
    "trajectories": "Look at recorded trajectories.",
    "trajectories.view": "Show the trajectories of a file.",
}


class Commands(TyperGroup):
    """A group of commands to which installed packages add theirs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for entry_point in sorted(importlib.metadata.entry_points(group=GROUP)):
            group, _, name = entry_point.name.partition(".")
            command = _Deferred(entry_point, name or group)
            if not name:
                self.commands.setdefault(group, command)
                continue
            parent = self.commands.setdefault(group, TyperGroup(name=group, help=HELP.get(group), no_args_is_help=True))
            if isinstance(parent, TyperGroup):
                parent.commands.setdefault(name, command)


class _Deferred(TyperCommand):
    """A command whose module is imported when it is parsed or completed, not when it is listed."""

    def __init__(self, entry_point: importlib.metadata.EntryPoint, name: str) -> None:
        package = entry_point.dist.name if entry_point.dist else entry_point.module
        super().__init__(name, help=HELP.get(entry_point.name, f"A command of {package}."))
        self._entry_point = entry_point

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = self._load(completing=bool(extra.get("resilient_parsing")))
        make = super().make_context if command is None else command.make_context
        return make(info_name, args, parent, **extra)

    def _load(self, *, completing: bool) -> Any:
        """Import the command. Without its packages, None while a shell completes it, else the end in one sentence."""
        try:
            command = self._entry_point.load()
        except ImportError as missing:
            if completing:
                return None
            typer.secho(f"gradwire: {self._how_to_get_it(missing)}", fg="red", err=True)
            raise typer.Exit(2) from None
        return typer.main.get_command(command) if isinstance(command, typer.Typer) else _Function(self.name, command)

    def _how_to_get_it(self, missing: ImportError) -> str:
        command = f"gradwire {self._entry_point.name.replace('.', ' ')}"
        need = f"`{command}` needs {missing.name}, which is not installed"
        extras = ",".join(self._entry_point.extras)
        return f"{need}: pip install 'gradwire[{extras}]'" if extras else f"{need} ({missing})"


class _Function(TyperCommand):
    """A command that parses its own arguments."""

    def __init__(self, name: str | None, function: Callable[[Sequence[str]], None]) -> None:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        super().__init__(name, context_settings=settings, add_help_option=False)
        self._function = function

    def invoke(self, ctx: Any) -> None:
        self._function(ctx.args)
