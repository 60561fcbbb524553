"""``gradwire runs``: list, fork, move and delete the runs of a server, and let parked ones go on."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gradwire.cli.listing import minute, print_listing
from gradwire.cli.service import Access, connected, with_access

app = typer.Typer(help="List, fork, move and delete the runs of a server.", no_args_is_help=True)


@app.command("list")
@with_access
def list_runs(access: Access) -> None:
    """List the runs that your key may read, the newest first."""
    with connected(access) as service:
        runs = service.list_runs()
    columns = ("run", "name", "model", "step", "created", "owner", "checkpoint")
    rows = [
        (run.run_id, run.name, run.base_model, str(run.step), minute(run.created_at), run.owner, run.latest_checkpoint)
        for run in sorted(runs, key=lambda run: -run.created_at)
    ]
    print_listing(columns, rows, empty=f"no runs on {access.address}", right=["step"])


@app.command()
@with_access
def fork(
    access: Access,
    checkpoint: Annotated[str, typer.Argument(help="RUN_ID/NAME, as `gradwire runs list` shows it.")],
    name: Annotated[str, typer.Option(help="Label of the new run.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the new run's random generators.")] = 0,
    head: Annotated[
        Literal["value", "reward", "none"] | None,
        typer.Option(help="A fresh head, or none; the checkpoint's if absent."),
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="Also copy the optimizer's moments and the step count.")
    ] = False,
) -> None:
    """Create a run from a checkpoint and print its id."""
    with connected(access) as service:
        run = service.fork_run(
            checkpoint, head="" if head == "none" else head, seed=seed, name=name, with_optimizer=with_optimizer
        )
        print(run.run_id)


@app.command()
@with_access
def delete(
    access: Access,
    run_ids: Annotated[list[str], typer.Argument(help="Ids of the runs.", metavar="RUN_ID...")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs with their checkpoints."""
    if not yes:
        typer.confirm(f"Delete {', '.join(run_ids)} with all checkpoints?", abort=True, err=True)
    with connected(access) as service:
        for run_id in run_ids:
            service.delete_run(run_id)
            print(f"deleted {run_id}")


@app.command()
@with_access
def accept(
    access: Access,
    run_id: Annotated[str, typer.Argument(help="Id of a parked run, as `gradwire status` shows it.")],
) -> None:
    """Let a run go on that is parked because what it is computed with has changed."""
    with connected(access) as service:
        service.get_training_client(run_id).accept_changes()
        print(f"{run_id} goes on with what has changed")


@app.command()
@with_access
def move(
    access: Access,
    run_ids: Annotated[list[str] | None, typer.Argument(help="Ids of the runs.", metavar="[RUN_ID...]")] = None,
    to: Annotated[int | None, typer.Option(help="Number of the engine; the one that suits best if absent.")] = None,
    drain: Annotated[
        int | None, typer.Option(help="Instead, move all runs of this engine to others, and give it no more.")
    ] = None,
    undo_drain: Annotated[int | None, typer.Option(help="Instead, let this engine take runs again.")] = None,
) -> None:
    """Move runs from one engine of a server to another, for an admin's key; `gradwire status` shows the engines."""
    if [bool(run_ids), drain is not None, undo_drain is not None].count(True) != 1:
        raise typer.BadParameter("give ids of runs, or --drain ENGINE, or --undo-drain ENGINE")
    with connected(access) as service:
        for run_id in run_ids or ():
            print(f"{run_id} is on engine {service.move_run(run_id, to)}")
        if drain is not None:
            print(f"engine {drain} drains: {service.drain_engine(drain)} runs moved")
        if undo_drain is not None:
            service.drain_engine(undo_drain, undo=True)
            print(f"engine {undo_drain} takes runs again")
