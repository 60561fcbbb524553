"""The table of a `list` command: what the server says as text, in lines that other programs can read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.cli.text import plain


def print_listing(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str, right: str = "") -> None:
    """Print rows below their columns; where the output is no terminal, no line is folded.

    Args:
        empty: What to print if there are no rows.
        right: The column that is aligned to the right.
    """
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column == right else "left")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    if table.row_count:
        Console(soft_wrap=not Console().is_terminal).print(table)
    else:
        print(empty)


def minute(at: float) -> str:
    """Format a Unix time as local date, hour and minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
