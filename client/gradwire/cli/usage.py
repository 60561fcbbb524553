"""``gradwire usage``: what keys, runs, models and sessions have used, and what that costs."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated

import typer

from gradwire.cli.listing import print_listing
from gradwire.cli.service import Access, connected, with_access
from gradwire.cli.text import money, precise
from gradwire.descriptions import Usage

DAY_S = 86_400


class By(StrEnum):
    """The columns by which usage can be grouped."""

    hour = "hour"
    day = "day"
    owner = "owner"
    run = "run"
    model = "model"
    session = "session"


@with_access
def usage(
    access: Access,
    by: Annotated[list[By] | None, typer.Option(help="What to divide it by; the run if absent.")] = None,
    days: Annotated[int, typer.Option(help="Of the last days, today's included.", min=1, max=400)] = 30,
) -> None:
    """Show tokens, seconds of the engines and their price: your key's, or with an administrator's key all keys'."""
    today = time.time() // DAY_S * DAY_S
    by = list(dict.fromkeys(by or [By.run]))
    with connected(access) as service:
        entries, info = service.usage([each.value for each in by], today - (days - 1) * DAY_S), service.server_info()
    names = ("training tokens", "prompt tokens", "sampled tokens", "checkpoints", "engine time")
    counts = [
        (each.training_tokens, each.prompt_tokens, each.sampled_tokens, each.checkpoints, each.engine_s)
        for each in entries
    ]
    rows = [_named(each, by) for each in entries]
    if len(entries) > 1:
        counts.append(tuple(map(sum, zip(*counts, strict=True))))  # type: ignore[arg-type]  # five sums
        rows.append(("all", *("" for _ in rows[0][1:])))
    cost = ("cost",) if info.price_per_hour else ()
    lines = [
        (*row, *(f"{number:,}" for number in numbers), precise(engine_s))
        + ((money(info.cost(engine_s)),) if cost else ())
        for row, (*numbers, engine_s) in zip(rows, counts, strict=True)
    ]
    titles = [title for each in by for title in (("run", "name") if each == "run" else (each,))]
    empty = f"nothing was used on {access.address} in {days} days"
    print_listing((*titles, *names, *cost), lines, empty=empty, right=[*names, *cost])


def _named(entry: Usage, by: list[By]) -> tuple[str, ...]:
    """The text columns that name an entry: one for each grouping, two for a run (its id and label)."""
    columns: dict[By, tuple[str, ...]] = {
        By.hour: (time.strftime("%Y-%m-%d %H:00 UTC", time.gmtime(entry.start)),),
        By.day: (time.strftime("%Y-%m-%d", time.gmtime(entry.start)),),
        By.owner: (entry.owner,),
        By.run: (entry.run_id or "none", entry.label),
        By.model: (entry.base_model,),
        By.session: (entry.session_id or "none",),
    }
    return tuple(text for each in by for text in columns[each])
