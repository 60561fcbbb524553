"""``gradwire backup``, ``restore`` and ``repair``: copies of a state folder, and what to do without one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gradwire_server.cli.saying import fail, say
from gradwire_server.journal.backup import Copied
from gradwire_server.journal.backup import backup as copy_folder
from gradwire_server.journal.backup import restore as restore_folder
from gradwire_server.journal.repair import repair as rebuild
from gradwire_server.journal.schema import NewerDatabase
from gradwire_server.journal.state_folder import StateFolderError
from gradwire_server.stores.claim import claim_of
from gradwire_server.stores.store import StoreError

backup_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
restore_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
repair_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

StateDir = Annotated[Path, typer.Option(envvar="GRADWIRE_STATE_DIR", help="State folder of the server.")]
STATE_DIR = Path("gradwire-state")


@backup_app.command()
def backup(
    to: Annotated[Path, typer.Argument(help="Folder to make; on the same file system, files are linked.")],
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Copy the state folder, while its server runs or when it does not; status 1: something in it is damaged."""
    state_dir, to = state_dir.expanduser().resolve(), to.expanduser().resolve()
    with _failures():
        copied = copy_folder(state_dir, to, say)
    say(f"{to} holds {_contents(copied)}")
    if url := claim_of(to).url:
        say(f"the checkpoints stay in {url}: keep what is there for as long as this backup (object versions help)")
    if copied.damaged:
        say(f"{copied.damaged} damaged: it is not restored with them; delete or upload them again, and take another")
        raise typer.Exit(1)


@restore_app.command()
def restore(
    copy: Annotated[Path, typer.Argument(help="Folder made by `gradwire backup`.")],
    state_dir: StateDir = STATE_DIR,
) -> None:
    """Make a state folder from a backup, which stays as it is; every byte is checked first.

    Programs that were at work are told where their runs went back to.
    """
    state_dir, copy = state_dir.expanduser().resolve(), copy.expanduser().resolve()
    with _failures():
        copied = restore_folder(copy, state_dir, say)
    say(f"{state_dir} holds {_contents(copied)}; start a server on it")


def _contents(copied: Copied) -> str:
    return (
        f"{copied.runs} runs, {copied.checkpoints} checkpoints and {copied.operations} operations"
        f" ({copied.size_bytes / (1 << 20):.1f} MiB)"
    )


@repair_app.command()
def repair(
    state_dir: StateDir = STATE_DIR,
    owner: Annotated[str, typer.Option(help="Key that gets the runs whose folders name no owner.")] = "",
    tidy: Annotated[
        bool, typer.Option(help="Delete from the store (--store) what no run or upload refers to.")
    ] = False,
) -> None:
    """Build a missing, damaged or outdated gradwire.db again from the journal and the runs' folders.

    The server must not run. Nothing is deleted without --tidy: a database that is there is kept under another name.
    What is missing, torn or superfluous in the store of the checkpoints is named.
    """
    state_dir = state_dir.expanduser().resolve()
    if not state_dir.is_dir():
        fail(f"there is no folder {state_dir}")
    with _failures():
        runs = rebuild(state_dir, owner, say, tidy=tidy)
    for run in runs:
        reach = f"operation {run.accepted_seq}" if run.complete else f"operation {run.accepted_seq}, as far as is known"
        say(
            f"{run.run_id} of {run.owner or 'anyone'}: {run.checkpoints} checkpoints, up to {reach},"
            f" {run.num_waiting} to be carried out at the next start"
        )
    say(f"{state_dir / 'gradwire.db'} is rebuilt with {len(runs)} runs")


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (StateFolderError, StoreError, NewerDatabase, sqlite3.DatabaseError, OSError) as error:
        fail(str(error))
