"""``gradwire verify``: execute the record of a run once more, and say whether it gives the same."""

from __future__ import annotations

import asyncio
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gradwire_server.cli.preflight import model_fault
from gradwire_server.cli.saying import fail, say
from gradwire_server.config import EngineSettings, parse_model
from gradwire_server.engine_client.client import EngineDied
from gradwire_server.engine_client.process import EngineProcess
from gradwire_server.errors import ServiceError
from gradwire_server.journal.provable import BadRecord, Record, read_record
from gradwire_server.journal.state_folder import RUNS
from gradwire_server.observability import logs
from gradwire_server.scheduling.replay import OtherBase, Verdict, execute_again

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DIFFERS = 1
"""Exit code where the run gives something else."""
STOP_S = 5.0


@app.command()
def verify(
    record: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File made by `gradwire record`.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER or FOLDER of the base model, if its name alone does not find it; repeat."),
    ] = None,
    losses: Annotated[
        list[Path] | None, typer.Option(exists=True, help="A Python file that registers losses; repeat for more.")
    ] = None,
    device: Annotated[str, typer.Option(help="As for `gradwire serve`; the record's when absent.")] = "",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; the record's when absent.")] = None,
    signed_by: Annotated[str, typer.Option(help="Fingerprint of the key that must have signed the record.")] = "",
) -> None:
    """Execute the record of a run again, and compare every result with the recorded one.

    Exit code 0 if they are equal, 1 at the first operation that differs, 2 if the record is damaged or the base model
    is another.
    """
    logs.configure("warning", "text", "front")
    with tempfile.TemporaryDirectory(prefix="gradwire-verify-") as folder:
        try:
            _unpack(record, Path(folder, "record"))
            own_record = read_record(Path(folder, "record"))
            _say_what_it_is(own_record, signed_by)
            settings = _settings(own_record, Path(folder, "state"), model or [], losses or [], device, threads)
            verdict = asyncio.run(_verify(own_record, settings))
        except BadRecord as error:
            fail(f"{record} cannot be verified: {error}")
        except OtherBase as error:
            fail(f"{error}; name the folder of the right one: --model {own_record.config.base_model}=FOLDER")
        except (ServiceError, EngineDied, OSError, ValueError) as error:
            fail(str(error))
    if verdict.difference:
        say(verdict.difference, "red")
        raise typer.Exit(DIFFERS)
    print(f"{_equal(verdict)}: {_of(verdict, own_record)}")


def _unpack(tar: Path, folder: Path) -> None:
    """Unpack the files of a record, which is no larger than they are.

    Links, devices, holes and names that lead out of the folder are refused.
    """
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise BadRecord(f"{member.name} is not a plain file")
                archive.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise BadRecord(f"it is not a whole tar file: {error}") from error


def _say_what_it_is(record: Record, signed_by: str) -> None:
    if signed_by and record.signed_by != signed_by:
        raise BadRecord(f"it is signed by {record.signed_by or 'nobody'}, not by {signed_by}")
    where = f" after the checkpoint at operation {record.after_seq}" if record.after_seq else ""
    say(
        f"run {record.run_id} on {record.config.base_model}, operations {record.after_seq + 1} to {record.up_to_seq}"
        f"{where}, {f'signed by {record.signed_by}' if record.signed_by else 'not signed'}"
    )
    for change in record.changes:
        say(f"while it was computed, {change}")


def _settings(
    record: Record, state_dir: Path, models: list[str], losses: list[Path], device: str, threads: int | None
) -> EngineSettings:
    """The settings of an engine that computes as the run was computed, as far as this machine can."""
    shutil.copytree(record.folder / RUNS, state_dir / RUNS) if (record.folder / RUNS).exists() else state_dir.mkdir()
    named = dict(parse_model(text) for text in models)
    if len(named) == 1:
        named = {record.config.base_model: next(iter(named.values()))}
    path = named.get(record.config.base_model, record.config.base_model)
    if fault := model_fault(path):
        raise ValueError(f"{path}: {fault}; name the base model's folder: --model {record.config.base_model}=FOLDER")
    facts = record.facts
    return EngineSettings.model_validate(
        {
            "models": {record.config.base_model: record.config.base_model} | named,
            "state_dir": state_dir,
            "losses": tuple(losses),
            "device": device or ("cpu" if facts.get("device") == "cpu" else ""),
            "dtype": facts.get("dtype"),
            "quantize": facts.get("quantize"),
            "threads": threads or (int(facts["threads"]) if facts.get("threads", "").isdigit() else None),
            "group_runs": "off",
        }
    )


async def _verify(record: Record, settings: EngineSettings) -> Verdict:
    engine = EngineProcess.here(settings)
    try:
        await engine.start()
        return await execute_again(record, engine, settings.state_dir / RUNS, lambda fact: say(f"here, {fact}"))
    finally:
        await engine.stop(STOP_S)


def _equal(verdict: Verdict) -> str:
    if verdict.inexact_after is None:
        return "equal, bit for bit"
    return f"equal up to operation {verdict.inexact_after} bit for bit, and up to rounding after it"


def _of(verdict: Verdict, record: Record) -> str:
    tensors = f", and the tensors of {', '.join(verdict.checkpoints)}" if verdict.checkpoints else ""
    return f"the results of {verdict.compared} operations of {record.run_id}{tensors}"
