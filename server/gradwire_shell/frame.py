"""The frame of a page: navigation, theme, keys and the form that asks for a key."""

from __future__ import annotations

import html
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exception_handlers import http_exception_handler, request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from gradwire_http.browsers import local_path
from nicegui import Client, app, events, ui
from nicegui.element import Element

from gradwire_shell.components import button, error, named, plain, title
from gradwire_shell.prerendered import as_html, theme_script

CSS = (Path(__file__).parent / "theme.css").read_text(encoding="utf-8")
THEMES: dict[bool | None, tuple[str, str]] = {
    None: ("contrast", "as the system"),
    False: ("light_mode", "light"),
    True: ("dark_mode", "dark"),
}
KEYS = {
    "/": "search",
    "j k": "next and previous row",
    "Enter": "open the row",
    "x": "select the row",
    "?": "this help",
}

HELD = """<script>
// A press ends as a click of its button also where what is above it grows meanwhile, unless the pointer is moved away.
let pressed = null;
addEventListener("pointerdown", (down) => {
  pressed = { button: down.target.closest?.(".q-btn"), x: down.clientX, y: down.clientY };
  pressed.button?.setPointerCapture(down.pointerId);
});
addEventListener("pointermove", (move) => {
  if (!pressed?.button?.hasPointerCapture(move.pointerId)) return;
  if (Math.hypot(move.clientX - pressed.x, move.clientY - pressed.y) > 16)
    pressed.button.releasePointerCapture(move.pointerId);
});
</script>"""
SIGN_IN = """<!DOCTYPE html>
<html lang="en-US"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sign in · gradwire</title><style>*, ::before, ::after { box-sizing: border-box } body { margin: 0 }
label { display: grid; gap: .25rem } .gw-primary { font: inherit; font-weight: 500; border: 0; border-radius: 4px;
padding: .55rem 1rem; align-self: start; cursor: pointer; color: var(--on-accent); background: var(--accent) }
%s</style></head><body><script>%s</script>
<main class="gw-main" style="max-width: 26rem; padding-top: 18vh"><form class="gw-panel" method="post">
<h1 class="gw-title">gradwire %s</h1>
<label>%s<input class="gw-search" style="width: 100%%" type="password" name="key" autofocus></label>
<button class="gw-primary">Sign in</button>
<div role="alert" style="color: var(--bad)">%s</div></form></main></body></html>"""
MOST_TYPED = 3 * 4096 + len("key=")
"""Bytes of a form with a key of 4,096 characters, each of which may be written as three."""
RESPONSE_TIMEOUT_S = 60.0
"""Seconds that a page may take to be made; NiceGUI's three are too few on a machine that trains."""
RECONNECT_TIMEOUT_S = 120.0
"""Seconds that a disconnected page keeps its state; then it reloads, and what was typed or said is lost. A browser on a
machine that trains may be that slow to answer."""
UNCONNECTED_S = 600.0
"""Seconds from the beginning of a page that its browser has to connect. NiceGUI's minute, for which it has no setting,
can be over on a busy machine before the scripts are loaded, and then the page reloads."""
Client.prune_instances.__func__.__kwdefaults__["client_age_threshold"] = UNCONNECTED_S  # type: ignore[attr-defined]
MOST_UNCONNECTED = 500
"""Pages that may wait for their browsers to connect. Each takes 110 KB, and needs no key to be asked for."""


def _end_oldest_unconnected() -> None:
    waiting = [each for each in Client.instances.values() if each.tab_id is None]
    for client in waiting[:-MOST_UNCONNECTED]:  # they stand in the order of their beginning
        client.delete()


app.timer(1.0, _end_oldest_unconnected)


def add_pages(within: FastAPI, product: str, *, secret: str, sections: Sequence[tuple[str, str]]) -> None:
    """Add the pages to an application, after its own routes.

    Args:
        secret: Signs the cookies of the browsers' sessions.
        sections: Navigation of the page that answers a mistyped address.
    """
    _answer_mistyped_addresses(product, sections)
    ui.run_with(
        within,
        title=f"gradwire {product}",
        language="en-US",
        storage_secret=secret,
        show_welcome_message=False,
        reconnect_timeout=RECONNECT_TIMEOUT_S,
        gzip_middleware_factory=None,  # a policy's nonces are written first
        tailwind=False,  # no page uses it, and its script would take each 50 ms
    )
    app.config.quasar_config["loadingBar"] = {"skipHijack": True}  # it has no name, and shows while nothing is loaded


def _answer_mistyped_addresses(product: str, sections: Sequence[tuple[str, str]]) -> None:
    def says(request: Request, status: int, sentences: Sequence[str]) -> Response:
        with Client(ui.page(""), request=request) as client, frame(product, sections, ""):
            title("There is no such page")
            for sentence in sentences:
                error(sentence)
        return client.build_response(request, status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, wrong: RequestValidationError) -> Response:
        if getattr(request.scope["endpoint"], "__wrapped__", None) not in Client.page_routes:
            return await request_validation_exception_handler(request, wrong)
        found = [f"{each['loc'][-1]} in the address is {each['input']!r}: {each['msg']}." for each in wrong.errors()]
        return says(request, 422, found)

    @app.exception_handler(404)
    async def unknown(request: Request, wrong: HTTPException) -> Response:
        if request.scope.get("endpoint") not in (None, app) or "/api/" in request.url.path:
            return await http_exception_handler(request, wrong)
        return says(request, 404, [f"Nothing is at {request.url.path}; the menu has what there is."])


def page_at(path: str, *, title: str) -> ui.page:
    """Decorate a function that makes the page of a path."""
    return ui.page(path, title=title, response_timeout=RESPONSE_TIMEOUT_S)


@contextmanager
def frame(
    product: str,
    sections: Sequence[tuple[str, str]],
    here: str,
    *,
    narrow: bool = False,
    keys: dict[str, str] = KEYS,
    sign_out: Callable[[], object] | None = None,
) -> Iterator[Element]:
    """A page's frame; its content goes into the body of ``with``, which gets the place for the server's state.

    Args:
        product: Name beside the brand.
        sections: Names and paths of the navigation.
        here: Path of the section that the page belongs to.
        narrow: Whether lines stay short on a wide screen.
        keys: The page's keys and their effects, for the help.
        sign_out: Called by the button that ends the session; None: there is none.
    """
    ui.add_head_html(f"<style>{CSS}</style>")
    ui.add_head_html(HELD)
    ui.dark_mode(app.storage.user.get("dark"))
    plain("Skip to the content", "gw-skip", "a").props("href=#content")
    with ui.element("header").classes("gw-bar"):
        with ui.element("div").classes("gw-brand"):
            plain("gradwire ")
            plain(product)
        with ui.element("nav").classes("gw-nav").props("aria-label=Sections"):
            for name, path in sections:
                link = ui.link(name, path)
                if path == here:
                    link.props("aria-current=page")
        status = ui.element("div").classes("gw-server").props("role=status")
        _theme()
        shown = _help(keys)
        named(button("", shown.open, kind="icon", icon="keyboard").props("dense"), "Keys")
        if sign_out is not None:
            named(button("", sign_out, kind="icon", icon="logout").props('dense title="Sign out"'), "Sign out")
    with ui.element("div").classes("gw-main" + (" narrow" if narrow else "")).props("id=content"):  # inside the main
        yield status
    client = ui.context.client
    if not client.has_socket_connection:  # else a page that asked its browser for something is made already
        dark, query = app.storage.user.get("dark"), client.request.query_params
        ui.add_body_html(as_html(client.content, dark=dark, query=query, behind=behind_proxy))


def _theme() -> None:
    chosen = app.storage.user.get("dark")
    icon, word = THEMES[chosen]

    def change() -> None:
        order = list(THEMES)
        app.storage.user["dark"] = order[(order.index(app.storage.user.get("dark")) + 1) % len(order)]
        ui.navigate.reload()

    switch = button("", change, kind="icon", icon=icon).props("dense")
    switch.props["aria-label"] = switch.props["title"] = f"Theme: {word}"


def _help(keys: dict[str, str]) -> ui.dialog:
    with named(ui.dialog(), "Keys") as dialog, ui.card():
        title("Keys", 2)
        with ui.element("dl").classes("gw-facts"):
            for key, meaning in (keys | {"?": "this help"}).items():
                with ui.element("dt"):
                    plain(key, tag="kbd")
                plain(meaning, tag="dd")

    def pressed(event: events.KeyEventArguments) -> None:
        if event.action.keydown and event.key == "?":
            dialog.open()

    ui.keyboard(pressed)
    return dialog


def behind_proxy(path: str, request: Request | None = None) -> str:
    """A path of the pages as a browser asks for it: behind the one under which a proxy shows them (root_path).

    Args:
        request: A browser's; None: the one for the page that is being made.
    """
    return str((request or ui.context.client.request).scope.get("root_path", "")) + path


def add_sign_in(product: str, label: str, enter: Callable[[str], Awaitable[str]]) -> None:
    """Add the page ``/login``, which asks for a key: a form that needs no script, so that no key is typed in vain.

    Args:
        label: The key's name.
        enter: Takes the key for the browser of the request, and returns why it is refused; "" where it is not.
    """

    def shown(refusal: str, status: int) -> HTMLResponse:
        product_, label_, refusal_ = map(html.escape, (product, label, refusal))
        page = SIGN_IN % (CSS, theme_script(app.storage.user.get("dark")), product_, label_, refusal_)
        return HTMLResponse(page, status)

    async def take(request: Request, next: str = "/") -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_TYPED:
                return shown("This is no key: it is longer than 4,096 characters.", 413)
        key = parse_qs(body.decode("ascii", "replace")).get("key", [""])[0].strip()
        if refusal := await enter(key):
            return shown(refusal, 401)
        target = behind_proxy(local_path(next, "/"), request)
        return RedirectResponse(target, 303)  # a browser keeps what stands behind the "#"

    app.remove_route("/login")
    app.get("/login")(lambda: shown("", 200))
    app.post("/login")(take)
