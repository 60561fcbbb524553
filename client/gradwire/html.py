"""Small HTML tables for showing results in notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

LEFT = 'style="text-align:left"'


def table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str = "", notes: Iterable[str] = ()
) -> str:
    """Build a table of cells.

    Args:
        caption: Text above it.
        notes: Lines below it.
    """
    head = "".join(f"<th {LEFT}>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td {LEFT}>{cell(each)}</td>' for each in row)}</tr>" for row in rows)
    above = f"<caption {LEFT}>{html.escape(caption)}</caption>" if caption else ""
    below = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def cell(value: Any) -> str:
    """Format a value: six digits for a float, empty for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return html.escape(f"{value:.6g}" if isinstance(value, float) else str(value))
