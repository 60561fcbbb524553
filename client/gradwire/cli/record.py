"""``gradwire record``: write the record of a run to a file that others can verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.service import Access, connected, with_access
from gradwire.cli.text import size


@with_access
def record(
    access: Access,
    run_id: Annotated[str, typer.Argument(help="Id of a run of your key, as `gradwire runs list` shows it.")],
    out: Annotated[Path, typer.Argument(help="The tar file to write.", dir_okay=False)],
    sign: Annotated[bool, typer.Option("--sign", help="Let the server sign it with its key.")] = False,
) -> None:
    """Write what a run was computed from and what it gave; `gradwire verify` computes it again.

    A run that was created with keep_journal=True is recorded from its beginning, others from an early checkpoint.
    """
    with connected(access) as service:
        service.get_training_client(run_id).download_record(out, sign=sign)
    print(f"{out} holds the record of {run_id} ({size(out.stat().st_size)}); check it with: gradwire verify {out}")
