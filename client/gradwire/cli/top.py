"""``gradwire top``: show what a server is doing until Ctrl-C."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gradwire import errors, sync
from gradwire.cli.service import Access, connected, with_access
from gradwire.cli.status_view import Interval, Snapshot, draw, look
from gradwire.cli.text import plain


@with_access
def top(
    access: Access,
    interval: Interval = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end, as without a terminal.")] = False,
) -> None:
    """Show what a server and your runs are doing, until you press Ctrl-C."""
    console = Console()
    with connected(access) as service:
        before = look(service)
        if once or not console.is_terminal:
            time.sleep(interval)
            console.print(draw(look(service), before))
        else:
            _watch(console, service, before, interval)


def _watch(console: Console, service: sync.ServiceClient, before: Snapshot, interval: float) -> None:
    def picture(now: Snapshot) -> RenderableType:
        return draw(now, before, most=max(console.height - 14, 3))

    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            live.update(picture(before), refresh=True)
            while True:
                time.sleep(interval)
                try:
                    now = look(service)
                except (errors.ConnectionLostError, errors.ServerError) as error:  # the server may be restarting
                    live.update(Text(f"{plain(str(error))}; trying again", "red"), refresh=True)
                    continue
                live.update(picture(now), refresh=True)
                before = now
        except KeyboardInterrupt:
            return
