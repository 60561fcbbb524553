"""The command ``gradwire``: its own subcommands and those that other packages add through entry points."""

from __future__ import annotations

import importlib.metadata

try:
    import typer

    from gradwire_server.cli import keys as keys_cli
    from gradwire_server.cli import status as status_cli
    from gradwire_server.cli.serve import serve
except ImportError as missing:
    raise SystemExit(
        f"gradwire: the server is not installed ({missing.name} is missing): pip install 'gradwire[server]'"
    ) from None

app = typer.Typer(
    help="gradwire: the gradients on this machine, the training loop wherever you are.", no_args_is_help=True
)
app.add_typer(keys_cli.app, name="keys")
app.command()(serve)
app.command()(status_cli.status)
app.command()(status_cli.top)


def _add_command(group: str, name: str, entry_point: importlib.metadata.EntryPoint) -> None:
    """Add the command ``gradwire GROUP NAME …``, which passes its arguments to a function of another package.

    The function is imported only when the command runs. Without a name, the command is ``gradwire GROUP …``, and the
    function parses its own subcommands.
    """
    commands = app
    if name:
        commands = typer.Typer()
        app.add_typer(commands, name=group)

        @commands.callback()
        def _commands() -> None: ...

    @commands.command(
        name or group,
        help=f"See {entry_point.value.partition(':')[0]}.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def _run(context: typer.Context) -> None:
        entry_point.load()(context.args)


for _entry_point in importlib.metadata.entry_points(group="gradwire.commands"):
    _group, _, _name = _entry_point.name.partition(".")
    _add_command(_group, _name, _entry_point)


def main() -> None:
    """Run the command; entry point of the console script."""
    app()
