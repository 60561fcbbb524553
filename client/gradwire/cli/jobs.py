"""``gradwire jobs``: trainings that the server runs by itself."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from gradwire import Job, sync
from gradwire.cli.listing import minute, print_listing
from gradwire.cli.service import Access, connected, with_access
from gradwire.cli.text import plain
from gradwire.jobs import POLL_S, SERVERS_OWN

app = typer.Typer(help="Train by a recipe on the server's own box, also while you are away.", no_args_is_help=True)

PATIENCE_S = 600.0
"""How long a command that follows a job waits for a server that went away: a restart does not end it."""

JobId = Annotated[str, typer.Argument(help="Id of the job, as `gradwire jobs list` shows it.")]


@app.command()
@with_access
def submit(
    access: Access,
    config: Annotated[Path | None, typer.Argument(help="YAML file, as for `gradwire train`.")] = None,
    recipe: Annotated[str, typer.Option(help="The recipe; by default the one that the file's name begins with.")] = "",
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a setting; may be repeated.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="A Python file in place of a recipe; for administrators.", dir_okay=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Label of the job.")] = "",
) -> None:
    """Queue a training and print its id. Files that the settings name are uploaded."""
    chosen, settings = _settings(config, recipe, override or [], script)
    with connected(access) as service:
        print(service.jobs.submit(chosen, settings, name=name).job_id)


@app.command("list")
@with_access
def list_jobs(access: Access) -> None:
    """List the jobs of your key, the newest first."""
    with connected(access) as service:
        jobs = service.jobs.list()
    columns = ("job", "name", "recipe", "model", "state", "step", "created", "owner")
    rows = [
        (job.job_id, job.name, job.recipe, str(job.settings.get("model", "")), job.state, _steps(job),
         minute(job.created_at), job.owner)
        for job in jobs
    ]  # fmt: skip
    print_listing(columns, rows, empty=f"no jobs on {access.address}", right=["step"])


@app.command()
@with_access
def show(access: Access, job_id: JobId) -> None:
    """Show a job with its events and checkpoints."""
    with connected(access) as service:
        job, events = service.jobs.get(job_id), service.jobs.events(job_id)
    lines = [f"{job.job_id}  {job.recipe}  {job.state}  step {_steps(job)}"]
    lines += [f"error: {job.error}"] if job.error else []
    lines += [f"{minute(event.created_at)}  {event.level:5}  {event.message}" for event in events]
    lines += [f"checkpoint {each.path} after step {each.step}" for each in job.checkpoints]
    lines += [f"results: {file}" for file in job.result_files]
    for line in lines:
        print(plain(line))


@app.command()
@with_access
def logs(
    access: Access,
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print the events of a job, then what its workers have printed."""
    with connected(access, PATIENCE_S if follow else 0.0) as service:
        _print_events(service, job_id, follow)
        for line in service.jobs.log(job_id).splitlines():
            print(plain(line))


@app.command()
@with_access
def cancel(access: Access, job_id: JobId) -> None:
    """End a job; its run and its checkpoints stay."""
    with connected(access) as service:
        print(f"{job_id} is {service.jobs.cancel(job_id).state}")


@app.command()
@with_access
def pause(access: Access, job_id: JobId) -> None:
    """Stop a job until `gradwire jobs resume`."""
    with connected(access) as service:
        print(f"{job_id} is {service.jobs.pause(job_id).state}")


@app.command()
@with_access
def resume(access: Access, job_id: JobId) -> None:
    """Let a paused job go on where it was."""
    with connected(access) as service:
        print(f"{job_id} is {service.jobs.resume(job_id).state}")


@app.command()
@with_access
def wait(access: Access, job_id: JobId) -> None:
    """Wait until a job has ended; the exit status is 1 if it did not succeed."""
    with connected(access, PATIENCE_S) as service:
        job = service.jobs.wait(job_id)
    print(plain(f"{job_id} has {job.state}" if job.state != "cancelled" else f"{job_id} was cancelled"))
    if job.state != "succeeded":
        if job.error:
            Console(stderr=True, soft_wrap=True).print(Text(plain(job.error), "red"))
        raise typer.Exit(1)


@app.command()
@with_access
def delete(access: Access, job_id: JobId) -> None:
    """Delete a job that has ended, with its events and its log; its run stays."""
    with connected(access) as service:
        service.jobs.delete(job_id)
        print(f"deleted {job_id}")


def _settings(config: Path | None, recipe: str, override: list[str], script: Path | None) -> tuple[str, dict[str, Any]]:
    from gradwire.recipes.command import RECIPES, settings_kind
    from gradwire.recipes.settings import SettingsError
    from gradwire.recipes.settings_file import load

    if (config is None) == (script is None):
        raise _wrong("name a configuration, as `gradwire jobs submit sft.yaml`, or a --script")
    if script is not None:
        return "script", {"script": str(script)}
    assert config is not None
    if not config.is_file():
        raise _wrong(f"there is no file {config}")
    chosen = recipe or next((name for name in RECIPES if config.stem.lower().startswith(name)), "")
    if recipe and recipe not in RECIPES:
        raise _wrong(f"there is no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    if not chosen:
        raise _wrong(f"say which recipe {config} is for: --recipe {'|'.join(RECIPES)}")
    try:
        settings = load(settings_kind(chosen), config, override)
    except SettingsError as error:
        raise _wrong(str(error)) from None
    return chosen, {name: value for name, value in dataclasses.asdict(settings).items() if name not in SERVERS_OWN}


def _wrong(message: str) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(Text(f"gradwire jobs: {plain(message)}", "red"))
    return typer.Exit(2)


def _print_events(service: sync.ServiceClient, job_id: str, follow: bool) -> None:
    number = 0
    while True:
        ended = service.jobs.get(job_id).has_ended
        for event in service.jobs.events(job_id, number):
            number = event.number
            print(plain(f"{minute(event.created_at)}  {event.level:5}  {event.message}"), flush=True)
        if ended or not follow:
            return
        time.sleep(POLL_S)


def _steps(job: Job) -> str:
    return f"{job.step}/{job.total_steps}" if job.total_steps else "-"
