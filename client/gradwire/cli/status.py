"""``gradwire status``: show once what a server is doing."""

from __future__ import annotations

import time

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from gradwire.cli.service import Access, connected, with_access
from gradwire.cli.status_view import Interval, draw, look
from gradwire.cli.text import plain

PIPE_WIDTH = 200
"""Columns of the output where there is no terminal, so that a script finds names and ids in one piece."""


@with_access
def status(
    access: Access,
    interval: Interval = 1.0,
) -> None:
    """Show what a server holds, what your runs are doing, and its limits."""
    with connected(access) as service:
        before, now = None, look(service)
        if now.working:
            time.sleep(interval)
            before, now = now, look(service)
    terminal = Console().is_terminal
    out = Console(soft_wrap=not terminal, width=None if terminal else PIPE_WIDTH)
    out.print(draw(now, before))
    out.print("limits:")
    limits = [Text(plain(f"{name}={value}")) for name, value in sorted(now.info.limits.items())]
    out.print(Columns(limits, column_first=True, padding=(0, 2)))
