"""Tables of text from a server, for a terminal of any width and for other programs."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradwire.cli.text import plain

UNBOUNDED = 10_000
"""Columns that hold any table."""


def print_listing(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str, right: Collection[str] = ()
) -> None:
    """Print rows below their columns; in a terminal narrower than that, each row in lines of its own.

    Where the output is no terminal, no line is folded.

    Args:
        empty: The line to print if there are no rows.
        right: The columns that are aligned to the right.
    """
    if not rows:
        print(empty)
        return
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in right else "left")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    if not console.is_terminal:
        Console(width=UNBOUNDED).print(table)
    elif fits(table, console.options, console):
        console.print(table)
    else:
        for first, *others in rows:
            named = [f"{column} {plain(cell)}" for column, cell in zip(columns[1:], others) if cell]
            console.print(Text(plain(first), "bold"))
            console.print(Padding(Text(", ".join(named)), (0, 0, 0, 2)))


def fits(table: Table, options: ConsoleOptions, console: Console) -> bool:
    """Return whether a table can be shown without folding a cell."""
    return Measurement.get(console, options.update(max_width=UNBOUNDED), table).maximum <= options.max_width


def minute(at: float) -> str:
    """Format a Unix time as local date, hour and minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
