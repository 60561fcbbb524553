"""``gradwire keys``: API keys and the secrets of signatures in a state folder; a running server applies changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradwire_server.access.key_file import KeyFile, Quota, Role
from gradwire_server.access.signing import rotate
from gradwire_server.cli.saying import console, fail

app = typer.Typer(help="API keys of a server.", no_args_is_help=True, add_completion=False)

StateDir = Annotated[Path, typer.Option(envvar="GRADWIRE_STATE_DIR", help="Of the server whose keys they are.")]
STATE_DIR = Path("gradwire-state")
PREFIX, TINKER_PREFIX = "gw_", "tml-"


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is; runs belong to this name.")],
    state_dir: StateDir = STATE_DIR,
    admin: Annotated[bool, typer.Option("--admin", help="Reads and writes every run.")] = False,
    engine: Annotated[bool, typer.Option("--engine", help="For `gradwire engine` on another machine only.")] = False,
    viewer: Annotated[bool, typer.Option("--viewer", help="Reads every run and changes nothing.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Revoke the key that the name has.")] = False,
    tinker: Annotated[bool, typer.Option("--tinker", help="In the form that the tinker SDK accepts: tml-…")] = False,
    runs: Annotated[int | None, typer.Option(help="Quota: runs it may keep.")] = None,
    upload_bytes: Annotated[int | None, typer.Option(help="Quota: bytes of its uploads.")] = None,
    queued_operations: Annotated[int | None, typer.Option(help="Quota: operations without a result.")] = None,
    queued_bytes: Annotated[int | None, typer.Option(help="Quota: bytes of their payloads.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Quota: tokens submitted or to be sampled.")] = None,
    memory_percent: Annotated[int | None, typer.Option(help="Quota: part of the engine's memory for its runs.")] = None,
    file_bytes: Annotated[int | None, typer.Option(help="Quota: bytes of its files.")] = None,
    running_jobs: Annotated[int | None, typer.Option(help="Quota: jobs that run at a time; others wait.")] = None,
) -> None:
    """Create a key and print it: it cannot be shown again."""
    role: Role = "admin" if admin else "engine" if engine else "viewer" if viewer else "user"
    with _failures():
        if admin + engine + viewer > 1:
            raise ValueError("a key is an administrator's, an engine's or a viewer's: give one of the three options")
        quota = Quota(
            runs=runs, upload_bytes=upload_bytes, queued_operations=queued_operations,
            queued_bytes=queued_bytes, tokens_per_minute=tokens_per_minute, memory_percent=memory_percent,
            file_bytes=file_bytes, running_jobs=running_jobs,
        )  # fmt: skip
        prefix = TINKER_PREFIX if tinker else PREFIX
        secret = KeyFile(state_dir.expanduser()).create(name, role, quota, replace=replace, prefix=prefix)
    console.print(f"key of {name} ({role}); it is not shown again:", markup=False)
    print(secret)


@app.command("list")
def list_keys(state_dir: StateDir = STATE_DIR) -> None:
    """List the keys, each by its first characters."""
    table = Table()
    for column in ("name", "role", "key", "made", "state", "quota"):
        table.add_column(column)
    with _failures():
        keys = KeyFile(state_dir.expanduser()).read()
    if not keys:
        print(f"no keys in {state_dir}")
        return
    for key in keys:
        quota = ", ".join(f"{name}={value}" for name, value in key.quota.given.items())
        table.add_row(
            key.name, key.role, key.prefix + "…", time.strftime("%Y-%m-%d", time.gmtime(key.created_at)),
            "live" if key.revoked_at is None else "revoked", quota,
        )  # fmt: skip
    Console().print(table)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Whose key.")],
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Revoke a key, also on a running server. Its runs stay, for the next key of that name."""
    with _failures():
        KeyFile(state_dir.expanduser()).revoke(name)
    console.print(f"the key of {name} is revoked", markup=False)


@app.command("rotate-signing")
def rotate_signing(state_dir: StateDir = STATE_DIR) -> None:
    """Make the secrets of signed URLs and records anew, also of a running server: for one that somebody has seen."""
    with _failures():
        folder = state_dir.expanduser()
        if not folder.is_dir():
            raise ValueError(f"there is no state folder {folder}")
        rotate(folder)
    console.print("URLs that were signed before are refused; records are signed with another key", markup=False)


@contextmanager
def _failures() -> Iterator[None]:
    """End the command in one sentence and status 2 where it fails."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))
