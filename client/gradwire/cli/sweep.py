"""``gradwire sweep``: many trainings at once on one server, compared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import gradwire
from gradwire.cli.text import plain, warnings_to_stderr


def sweep(
    grid: Annotated[Path | None, typer.Argument(help="A YAML file: recipe, settings and a grid of values.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override; may be repeated.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a file with a comment on every setting.")] = False,
) -> None:
    """Train every combination of a grid on one server, and show which is best; run again, it goes on."""
    from gradwire.recipes import settings_file, sweep
    from gradwire.recipes.settings import SettingsError

    if example:
        print(settings_file.example(sweep.Sweep), end="")
        return
    try:
        if grid is None:
            raise SettingsError("name a file, as grid.yaml; `gradwire sweep --example > grid.yaml` writes one")
        plan, trials = sweep.load(grid, override or ())
        with warnings_to_stderr("gradwire sweep"):
            ranked = asyncio.run(sweep.run(plan, trials))
    except (gradwire.GradwireError, ValueError, OSError, ImportError) as error:
        typer.secho(f"gradwire sweep: {plain(str(error))}", fg="red", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.secho("gradwire sweep: interrupted; the same command goes on from the last checkpoints", err=True)
        raise typer.Exit(130) from None
    metric = plan.by or sweep.default_metric(trials[0].settings)
    shown = Table(*ranked[0].values, "steps", metric, "")
    for row in sweep.rows(trials, metric):
        shown.add_row(*(f"{each:.6g}" if isinstance(each, float) else plain(str(each)) for each in row))
    Console().print(shown)
    print(f"best: {ranked[0].folder}\n{Path(plan.folder) / 'sweep.html'}")
