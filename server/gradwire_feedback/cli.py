"""`gradwire feedback serve` and `gradwire feedback keys`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradwire_feedback.database.connection import Database, UnusableDatabaseError
from gradwire_feedback.settings import Settings
from gradwire_feedback.store import keys as store
from gradwire_feedback.store.problems import ProblemError

app = typer.Typer(help="People's scores in, better policies out.", no_args_is_help=True, add_completion=False)
keys_app = typer.Typer(help="API keys of a feedback service.", no_args_is_help=True, add_completion=False)
app.add_typer(keys_app, name="keys")
console = Console(stderr=True, soft_wrap=True)

DATABASE = "sqlite:///feedback.db"
DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database", envvar="GRADWIRE_FEEDBACK_DATABASE", help="sqlite:///FILE or postgresql://USER@HOST/DATABASE."
    ),
]


@app.command()
def serve(
    base_model: Annotated[
        str, typer.Option(help="What training starts from: a Hugging Face name, a folder, or NAME=FOLDER.")
    ],
    address: Annotated[str, typer.Option(help="HOST:PORT; port 0 picks a free one.")] = "127.0.0.1:8000",
    database: DatabaseUrl = DATABASE,
    models_dir: Annotated[Path, typer.Option(help="Where trained versions are written.")] = Path("models"),
    service: Annotated[
        str,
        typer.Option(
            help="Address of a gradwire server; starts an embedded one if absent. GRADWIRE_API_KEY is its key."
        ),
    ] = "",
    service_ca_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the authority that signed the gradwire server's certificate.")
    ] = None,
    raters_per_item: Annotated[
        int, typer.Option(min=1, max=20, help="Raters who see each generated answer on the rating page.")
    ] = 1,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            help="A further name by which a service on loopback is asked, as behind a proxy; may be repeated."
        ),
    ] = None,
    server_arg: Annotated[
        list[str] | None, typer.Option(help="A further argument of the embedded `gradwire serve`; may be repeated.")
    ] = None,
) -> None:
    """Serve the API and the pages."""
    host, port = _host_and_port(address)
    folder = models_dir.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    name, _, path = base_model.partition("=")
    settings = Settings(
        host=host, port=port, database_url=database, models_dir=folder, base_model=name,
        embedded_model=f"{name}={Path(path or name).resolve()}" if Path(path or name).is_dir() else base_model,
        service=service or None, service_ca_cert=service_ca_cert, raters_per_item=raters_per_item,
        host_names=tuple(host_name or ()), server_args=tuple(server_arg or ()),
    )  # fmt: skip
    with _opened(database) as tables:
        with tables.read() as session:
            keyed = store.keys_required(session)
        if not settings.loopback and not keyed:
            _fail(
                f"{host} is reachable from other machines, but there is no key: create one with `gradwire feedback "
                "keys "
                "create NAME --role train`, or listen on 127.0.0.1"
            )
        raise typer.Exit(_run(settings, tables))


def _run(settings: Settings, tables: Database) -> int:
    os.environ.setdefault("NICEGUI_STORAGE_PATH", str(settings.models_dir / ".pages"))  # read at the import
    from gradwire import GradwireError

    from gradwire_feedback.running import serve_until_stopped

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        clean = asyncio.run(serve_until_stopped(settings, tables))
    except (GradwireError, OSError) as error:
        _fail(str(error))
    except UnusableDatabaseError as error:
        _fail(f"--database: {error}")
    if not clean:
        console.print("gradwire: stopped during a job, which continues at the next start", markup=False)
        os._exit(0)  # a thread still waits for the training server; do not wait for it
    return 0


def _host_and_port(address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65_535:
        _fail(f"--address {address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


@contextmanager
def _opened(url: str) -> Iterator[Database]:
    try:
        tables = Database(url)
        tables.upgrade()
    except UnusableDatabaseError as error:
        _fail(f"--database: {error}")
    try:
        yield tables
    except ProblemError as error:
        _fail(str(error))
    finally:
        tables.close()


@keys_app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the key's owner.")],
    role: Annotated[str, typer.Option(help="rate: score and ask. read: see results. train: everything.")],
    database: DatabaseUrl = DATABASE,
    replace: Annotated[bool, typer.Option("--replace", help="Revoke the name's existing key.")] = False,
) -> None:
    """Create a key and print it; it cannot be shown again."""
    with _opened(database) as tables, tables.write() as session:
        secret = store.create_key(session, name, role, replace=replace)
    console.print(f"key of {name} ({role}); it is not shown again:", markup=False)
    print(secret)


@keys_app.command("list")
def list_keys(database: DatabaseUrl = DATABASE) -> None:
    """List the keys by their first characters."""
    table = Table()
    for column in ("name", "role", "key", "made", "state"):
        table.add_column(column)
    with _opened(database) as tables, tables.read() as session:
        for key in store.list_keys(session):
            state = "live" if key.revoked_at is None else "revoked"
            table.add_row(key.name, key.role, key.prefix + "…", f"{key.created_at:%Y-%m-%d}", state)
    Console().print(table)


@keys_app.command()
def revoke(name: Annotated[str, typer.Argument(help="Whose key.")], database: DatabaseUrl = DATABASE) -> None:
    """Revoke a key, effective at once on a running service."""
    with _opened(database) as tables, tables.write() as session:
        store.revoke_key(session, name)
    console.print(f"the key of {name} is revoked", markup=False)


def _fail(message: str) -> None:
    console.print(f"gradwire: {message}", style="red", markup=False)
    raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """`gradwire feedback …`."""
    app(arguments, prog_name="gradwire feedback")


if __name__ == "__main__":
    main()
