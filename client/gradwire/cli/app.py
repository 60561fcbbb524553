"""The command ``gradwire``: its own subcommands and those that other packages add through entry points."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from gradwire import __version__
from gradwire.cli import data, jobs, runs, sessions, trained, uploads
from gradwire.cli.doctor import doctor
from gradwire.cli.import_config import import_config
from gradwire.cli.plugins import Commands
from gradwire.cli.record import record
from gradwire.cli.render import render
from gradwire.cli.status import status
from gradwire.cli.sweep import sweep
from gradwire.cli.top import top
from gradwire.cli.usage import usage

app = typer.Typer(
    cls=Commands,
    help="gradwire: the gradients on the GPU machine, the training loop wherever you are.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gradwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.command()(status)
app.command()(top)
app.command()(usage)
app.add_typer(runs.app, name="runs")
app.add_typer(jobs.app, name="jobs")
app.add_typer(sessions.app, name="sessions")
app.command()(sweep)
app.command("import-config")(import_config)
app.command()(record)
app.command()(render)
app.add_typer(data.app, name="data")
for command in (trained.export, trained.push, trained.chat):
    app.command()(command)
app.add_typer(uploads.app, name="uploads")
app.command()(doctor)


def main() -> None:
    """Run the command; entry point of the console script."""
    logging.getLogger("gradwire").addHandler(logging.NullHandler())  # a command says itself what went wrong
    app(prog_name="gradwire")
