"""The server's own commands, for ``python -m gradwire_server.cli``; ``gradwire`` has them through entry points."""

from __future__ import annotations

import typer

from gradwire_server.cli import engine, keys, serve, state, verify

app = typer.Typer(
    help="The server's commands of gradwire.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys.app, name="keys")
app.command(cls=serve.Serve)(serve.serve)
app.command()(engine.engine)
app.command()(state.backup)
app.command()(state.restore)
app.command()(state.repair)
app.command()(verify.verify)


def main() -> None:
    """Run the command."""
    app()
