"""The frame of every page: finds its workspace, follows changes, and carries out a button's action."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote

import gradwire
from fastapi.responses import RedirectResponse
from gradwire.cli.text import money
from gradwire.recipes.settings import SettingsError
from gradwire_shell.components import Lines, button, empty, error, named, plain, sdk_line, skeleton, state, title
from gradwire_shell.frame import behind_proxy, frame
from nicegui import app, ui
from nicegui.element import Element

from gradwire_console.workspace import Workspace, Workspaces

SECTIONS = (
    ("Runs", "/"),
    ("Compare", "/compare"),
    ("Timeline", "/timeline"),
    ("Server", "/server"),
    ("Jobs", "/jobs"),
    ("Sessions", "/sessions"),
    ("Uploads", "/uploads"),
    ("Playground", "/playground"),
    ("Ratings", "/ratings"),
    ("Audit", "/audit"),
)
RUN_VIEWS = (("Curves", ""), ("Checkpoints", "/checkpoints"), ("Batches", "/batches"), ("Rollouts", "/rollouts"),
             ("Journal", "/journal"))  # fmt: skip
CONTROLS = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"))
TURNING = CONTROLS | {"R", "AL", "AN"}
"""Kinds of characters that change the direction of text, as Unicode calls them."""
REFRESH_S = 0.4
FAILURES = (gradwire.GradwireError, SettingsError, ValueError, OSError, ImportError)


async def opened(
    workspaces: Workspaces, path: str, section: str, content: Callable[[Workspace], Awaitable[None]]
) -> RedirectResponse | None:
    """Show a page to a browser that has given a key; else redirect it to the form that asks for one.

    If the server is away, the page says so and looks again.

    Args:
        path: The page, to which the form comes back.
        section: The entry of the menu that it belongs to.
        content: Shows the page's own content, of the browser's workspace.
    """
    try:
        workspace = await workspaces.of(str(app.storage.browser["id"]))
    except gradwire.GradwireError as failure:
        with frame("console", SECTIONS, ""):
            title("The server is away")
            error(f"{failure}. This page looks again by itself.")
        ui.timer(3.0, ui.navigate.reload, once=True)
        return None
    if workspace is None:
        return RedirectResponse(behind_proxy(f"/login?next={quote(path, safe='')}"))
    await workspace.listed()
    with suppress(gradwire.GradwireError):  # which the frame shows
        await workspace.jobs()  # their names are those of their runs
    with _framed(workspaces, workspace, section):
        await content(workspace)
    return None


async def opened_run(
    workspaces: Workspaces, run_id: str, end: str, content: Callable[[Workspace], Awaitable[None]]
) -> RedirectResponse | None:
    """Show a page of a run, or say that there is no such run; ``end`` is the end of its path, with the query."""

    async def show(workspace: Workspace) -> None:
        if run_id not in workspace.runs:
            title("There is no such run")
            empty("It was deleted, or this key may not read it.", "await service.list_runs()")
        else:
            await content(workspace)

    return await opened(workspaces, f"/run/{run_id}{end}", "/", show)


@contextmanager
def _framed(workspaces: Workspaces, workspace: Workspace, here: str) -> Iterator[None]:
    """The frame of a page, with the state of the connection."""

    def leave() -> None:
        workspaces.sign_out(str(app.storage.browser["id"]))
        ui.navigate.to("/login")

    shown: list[str | None] = [None]

    def follow() -> None:
        workspace.looked_at = time.monotonic()
        age = ago(workspace.away_since)
        stale.show([f"The server is away: what is shown here is {age} old."] if workspace.away else [])
        if workspace.away != shown[0]:
            shown[0] = workspace.away
            place.clear()
            with place:
                if workspace.away:
                    state("away", workspace.away)
                else:
                    state("connected", f"{workspaces.server.address}, followed by one stream")
                who = f" · {workspace.key_name}, {workspace.role}" if workspace.key_name else ""
                plain(f" {workspaces.server.address}{who}" + (" · read-only" if workspaces.read_only else ""))

    with frame("console", SECTIONS, here, sign_out=leave if workspaces.asks else None) as place:
        stale = Lines(classes="gw-note")
        yield
        follow()
        ui.timer(REFRESH_S, follow)


def on_change(workspace: Workspace, show: Callable[[], object | Awaitable[object]]) -> None:
    """Call a function when the workspace has changed, and while a pace still has to fall."""
    seen = [workspace.revision, time.monotonic()]

    async def look() -> None:
        now = time.monotonic()
        if workspace.revision != seen[0] or now - seen[1] > 2.0:
            seen[:] = [workspace.revision, now]
            done = show()
            if isinstance(done, Awaitable):
                await done

    ui.timer(REFRESH_S, look)


def later(show: Callable[[], Awaitable[None]]) -> None:
    """Show what must be fetched first: a skeleton until then, and the reason where it fails."""
    with ui.element("div").classes("gw-stack") as place:
        skeleton("3rem")
        skeleton()

    async def fill() -> None:
        place.clear()
        with place:
            try:
                await show()
            except FAILURES as failure:
                place.clear()
                error(str(failure))

    ui.timer(0.01, fill, once=True)


def run_head(workspace: Workspace, run_id: str, view: str) -> None:
    """The head of a page about one run: its name, and links to its views."""
    live = workspace.runs[run_id]
    with ui.element("div").classes("gw-head"):
        title(live.name)
        run_views(run_id, view)


def run_views(run_id: str, view: str) -> None:
    """Links to the views of a run.

    Args:
        view: The end of the path of the one that is shown.
    """
    with ui.element("nav").classes("gw-tabs").props('aria-label="Views of the run"'):
        for name, end in RUN_VIEWS:
            link = ui.link(name, f"/run/{run_id}{end}")
            if end == view:
                link.props("aria-current=page")


@contextmanager
def told(failed: Element) -> Iterator[None]:
    """Show in a place why the server did not answer, and leave out the rest of the block."""
    failed.clear()
    try:
        yield
    except gradwire.GradwireError as failure:
        with failed:
            error(str(failure))


async def act(workspaces: Workspaces, work: Callable[[], Awaitable[object]], done: str) -> bool:
    """Carry out what a button asks for, and say how it went. Everything that changes something goes through here."""
    if workspaces.read_only:  # a viewer's key is refused by the server itself
        ui.notify("This console is read-only: it was started with --read-only.", type="warning")
        return False
    try:
        await work()
    except FAILURES as failure:
        ui.notify(str(failure), type="negative", multi_line=True, timeout=10_000)
        return False
    if done:
        ui.notify(done, type="positive")
    return True


def ask(
    heading: str,
    sentence: str,
    code: str,
    confirm: str,
    do: Callable[[], Awaitable[object]],
    typed: str = "",
    body: Callable[[], object] | None = None,
) -> None:
    """Open a dialog that explains an action, shows the code that does the same, and carries it out.

    Args:
        typed: Text to be typed before it can be carried out; "" for none.
        body: Shows what is to be chosen.
    """
    page = ui.context.client.content  # what holds the button may be drawn anew meanwhile
    with page:
        dialog = named(ui.dialog(), heading)
    dialog.on("hide", dialog.delete)
    with dialog, ui.card().classes("gw-panel").style("width: 34rem; max-width: 92vw"):
        title(heading, 2)
        ui.label(sentence)
        sdk_line(code)
        if body is not None:
            body()
        field = ui.input(f"Type {typed}").props("outlined dense").classes("full-width") if typed else None

        async def carry_out() -> None:
            if field is not None and (field.value or "").strip() != typed:
                ui.notify(f"Type {typed} to confirm.", type="warning")
                return
            dialog.close()
            with page:
                await do()

        with ui.element("div").classes("gw-actions"):
            button(confirm, carry_out, kind="danger" if typed else "primary")
            button("Close", dialog.close)
    dialog.open()


def ago(at: float) -> str:
    """The time since, in the largest unit: ``"3 min"``."""
    return span(time.time() - at)


def span(seconds: float) -> str:
    """A time in its largest unit: ``"3 min"``."""
    for name, unit in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"


def isolated(name: str) -> str:
    """A name for use within a sentence: one that would turn its neighbours' direction is as in <bdi>."""
    kinds = {unicodedata.bidirectional(each) for each in name}
    if kinds.isdisjoint(TURNING):
        return name
    plain_name = "".join(each for each in name if unicodedata.bidirectional(each) not in CONTROLS)
    return f"\u2068{plain_name}\u2069"


def cost_of(info: gradwire.ServerInfo, engine_s: float) -> str:
    """The price of so many seconds of an engine; "" where the server has no price."""
    return money(info.cost(engine_s)) if info.price_per_hour else ""


def size_of(number: float) -> str:
    """Bytes in three digits: ``"1.24 MB"``."""
    text = short(number)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def counted(number: int, unit: str) -> str:
    """A number of things: ``"1 row"``, ``"1,200 rows"``."""
    return f"{number:,} {unit}" + ("" if number == 1 else "s")


def short(number: float) -> str:
    """A number in three digits and a letter: ``"1.24M"``."""
    for letter, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"
