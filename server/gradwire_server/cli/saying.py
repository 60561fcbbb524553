"""Messages of the server's commands to people, on standard error."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

MISTAKE, NOT_NOW = 2, 75
"""Exit statuses: settings or a state folder have to be changed; what is at fault may pass by itself."""

console = Console(stderr=True, soft_wrap=True)


def say(sentence: str, style: str = "") -> None:
    """Print a sentence as the command's."""
    console.print(f"gradwire: {sentence}", style=style, markup=False, highlight=False)


def fail(*sentences: str, status: int = MISTAKE) -> NoReturn:
    """Print sentences on what is wrong, and end the command with a status."""
    for sentence in sentences:
        say(sentence, "red")
    raise typer.Exit(status)
