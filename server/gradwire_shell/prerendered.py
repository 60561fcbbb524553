"""A page's elements as HTML that needs no script: what a browser shows until the scripts that make the page have come.

They are 460 kB, and 830 kB with plots, which takes a slow network many seconds; a fast one waits for them to run. Links
work at once; what needs a script looks as it will, and does nothing yet.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nicegui.element import Element

from gradwire_shell.components import Column, Plot, Table

FIRST_ROWS, FIRST_PLOTS, PLOT_POINTS = 30, 4, 200
ATTRIBUTES = ("role", "title", "tabindex")
FIELDS = {"select", "input", "textarea", "number"}
WITHOUT_LOOK = {"dialog", "timer", "keyboard", "dark_mode", "tooltip", "menu", "upload"}
HEAD = """<style>
.gw-before .q-btn { pointer-events: none } .gw-before .q-icon { width: 1em; height: 1em }
.gw-before .gw-field { height: 40px; box-sizing: border-box; border: 1px solid var(--edge); border-radius: 4px;
padding: 0 12px; line-height: 38px; overflow: hidden; white-space: nowrap; color: var(--quiet) }
.gw-before ~ #esm-fallback { height: auto }</style>"""
AWAITS = """<script>
%s
new MutationObserver((_, watching) => {
  if (!document.getElementById("app")?.hasChildNodes()) return;
  document.querySelector(".gw-before").remove();
  watching.disconnect();
}).observe(document.body, { childList: true, subtree: true });
</script>"""
"""Gives the page its theme, and takes the HTML away once the page is made: before a browser shows both, and before it
fires its load event."""


def as_html(content: Element, *, dark: bool | None, query: Mapping[str, str], behind: Callable[[str], str]) -> str:
    """The visible elements below one as HTML.

    Args:
        dark: The page's theme; None: the system's.
        query: The query of the page's address, by which a table searches and orders its rows.
        behind: A path as a browser asks for it.
    """
    drawn = _Drawing(not {"search", "order"} & {*query}, behind).of(content)
    return HEAD + _tag("div", drawn, {"class": "gw-before nicegui-layout"}) + AWAITS % theme_script(dark)


def theme_script(dark: bool | None) -> str:
    """What gives the page's body its theme; None: the system's."""
    wanted = "matchMedia('(prefers-color-scheme: dark)').matches" if dark is None else str(dark).lower()
    return f'document.body.classList.add({wanted} ? "body--dark" : "body--light");'


class _Drawing:
    def __init__(self, as_given: bool, behind: Callable[[str], str]) -> None:
        self._as_given, self._behind, self._plots = as_given, behind, 0

    def of(self, element: Element) -> str:
        """An element with what is in it; "" where it is hidden."""
        kind = element.tag.removeprefix("nicegui-").removeprefix("q-")
        if not element.visible or kind in WITHOUT_LOOK:
            return ""
        props, classes = element.props, [*element.classes]
        about = {key: value for key, value in props.items() if key in ATTRIBUTES or key.startswith("aria-")}
        about["style"] = ";".join(f"{key}:{value}" for key, value in element.style.items())
        name, native = element.tag, kind == element.tag
        label = "" if native else html.escape(str(props.get("label") or ""))
        if isinstance(element, Table):
            name, inner = "div", self._table(props)
        elif isinstance(element, Plot):
            name, inner = "div", self._plot(element)
            about = about | {"title": "", "data-of": f"c{element.id}"}
        elif kind in FIELDS:
            name, inner, classes = "div", label, [*classes, "gw-field"]
        elif kind.startswith("expansion"):  # they begin closed
            inner = _tag("div", label, {"class": "q-item"})
            name = "div"
        elif kind == "btn":
            face = (_tag("i", "", {"class": "q-icon"}) if props.get("icon") else "") + label
            inner = _tag("span", face, {"class": "q-btn__content text-center col items-center justify-center row"})
            name, classes = "button", [*classes, "q-btn", "q-btn-item", "q-btn--flat"]
            about["disabled"] = ""
        else:
            text = html.escape(str(getattr(element, "text", "") or "")) or label
            inner = text + "".join(map(self.of, element.default_slot.children))
            if kind in ("link", "a"):
                to = str(props.get("href", ""))
                name, about["href"] = "a", self._behind(to) if to.startswith("/") else to
            elif not native:
                name = "div"
        return _tag(name, inner, {"class": " ".join(classes), **about})

    def _table(self, table: Mapping[str, Any]) -> str:
        given: Sequence[Mapping[str, Any]] = table["given"]
        columns = [
            Column(**each)
            for each in table["columns"]
            if not each["sparse"] or any(row.get(each["name"]) not in ("", None) for row in given)
        ]
        box = _tag("td", _tag("input", "", {"type": "checkbox", "disabled": "", "aria-hidden": "true"}))
        rows = given[:FIRST_ROWS] if self._as_given and not any("group" in row for row in given) else ()
        head = "".join(_tag("th", html.escape(each.label), {"class": "num" if each.num else ""}) for each in columns)
        body = "".join(
            _tag(
                "tr",
                (box if table["selectable"] else "") + "".join(_cell(row, each) for each in columns),
                {"data-key": row["key"]},
            )
            for row in rows
        )
        head = _tag("thead", _tag("tr", ("<td></td>" if table["selectable"] else "") + head))
        drawn = _tag("table", head + _tag("tbody", body))
        if not given:
            drawn += _tag("div", html.escape(table["none"]), {"class": "gw-none"})
        search = {"class": "gw-search", "type": "search", "placeholder": table["search"], "disabled": ""}
        tools = _tag("div", _tag("input", "", search), {"class": "gw-tools"}) if table["searchable"] else ""
        return tools + _tag("div", drawn, {"class": "gw-table"})

    def _plot(self, plot: Plot) -> str:
        """The first plots of those that can be drawn without a script; the others wait."""
        if plot.as_html is None or self._plots == FIRST_PLOTS:
            return ""
        self._plots += 1
        series = [each for each in plot.props["series"] if not each["faint"]]
        return plot.as_html({each["name"]: _thinned([*zip(each["x"], each["y"], strict=True)]) for each in series})


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest and the highest point of each part of a curve, in their order."""
    size = -(-2 * len(points) // PLOT_POINTS)
    if size <= 2:
        return points
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [
        each for part in parts for each in sorted({min(part, key=lambda at: at[1]), max(part, key=lambda at: at[1])})
    ]


def _cell(row: Mapping[str, Any], column: Column) -> str:
    text = html.escape(str(row.get(column.name, "")))
    if row.get("href") and column.link:
        text = _tag("a", text, {"href": row["href"]})
    elif column.state:
        text = _tag("span", text, {"class": f"gw-state {row.get(column.name, '')}"})
    elif column.curve and text:
        line = _tag("polyline", "", {"points": row[column.name]})
        text = _tag("svg", line, {"class": "gw-spark", "viewBox": "-2 -2 104 28", "preserveAspectRatio": "none"})
    if below := row.get(f"{column.name}_sub"):
        text += _tag("span", html.escape(str(below)), {"class": "sub"})
    return _tag("td", text, {"class": " ".join(each for each in ("num", "wraps") if getattr(column, each))})


def _tag(name: str, inner: str = "", attributes: Mapping[str, Any] | None = None) -> str:
    """An element around HTML; attributes are escaped, and left out where they are empty."""
    about = "".join(
        f' {key}="{html.escape(str(value))}"'
        for key, value in (attributes or {}).items()
        if value or key in ("disabled", "href")
    )
    return f"<{name}{about}>" if name == "input" else f"<{name}{about}>{inner}</{name}>"
