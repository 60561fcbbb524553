"""``gradwire repair``: rebuild the database of a state folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from gradwire_server.journal.repair import repair as rebuild
from gradwire_server.journal.state_folder import StateFolderError

console = Console(stderr=True, soft_wrap=True)

StateDir = Annotated[Path, typer.Option(help="State folder of the server.")]
STATE_DIR = Path("gradwire-state")


def repair(
    state_dir: StateDir = STATE_DIR,
    owner: Annotated[str, typer.Option(help="Key that gets the runs whose folders name no owner.")] = "",
) -> None:
    """Build a missing, damaged or outdated gradwire.db again from the journal and the runs' folders.

    The server must not run. Nothing is deleted: a database that is there is kept under another name.
    """
    state_dir = state_dir.expanduser().resolve()
    if not state_dir.is_dir():
        _fail(f"there is no folder {state_dir}")
    try:
        runs = rebuild(state_dir, owner, _say)
    except (StateFolderError, OSError) as error:
        _fail(str(error))
    for run in runs:
        reach = f"operation {run.accepted_seq}" if run.complete else f"operation {run.accepted_seq}, as far as is known"
        _say(
            f"{run.run_id} of {run.owner or 'anyone'}: {run.checkpoints} checkpoints, up to {reach},"
            f" {run.num_waiting} to be carried out at the next start"
        )
    _say(f"{state_dir / 'gradwire.db'} is rebuilt with {len(runs)} runs")


def _say(sentence: str) -> None:
    console.print(f"gradwire: {sentence}", markup=False, highlight=False)


def _fail(sentence: str) -> NoReturn:
    console.print(f"gradwire: {sentence}", style="red", markup=False, highlight=False)
    raise typer.Exit(1)
