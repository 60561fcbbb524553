"""Components of pages: tables, plots, empty and error states, and lines of code to copy. They show strings as text.

What they show many of is in tuples: NiceGUI watches every item of a list for changes, which takes longer than a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from nicegui import ui
from nicegui.element import Element
from nicegui.elements import echart as _library  # noqa: F401  it offers the library that chart.js imports
from nicegui.events import GenericEventArguments

E = TypeVar("E", bound=Element)
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """A column of a :class:`Table`.

    Attributes:
        name: Key of its cells in a row; ``NAME_sub`` is shown beside a cell, ``NAME_hint`` on hover, and by the number
            ``NAME_sort`` rows are ordered and filtered.
        label: Its heading.
        hint: The heading's meaning, on hover.
        num: Whether its cells are numbers.
        link: Whether its cells link to the row's ``href``.
        state: Whether its cells are states, shown with a mark.
        curve: Whether its cells are small curves: an SVG polyline's points, 100 wide and 24 high.
        mean: Whether the head of a group shows the mean of its cells.
        sparse: Whether it is left out while no row has a value.
        wraps: Whether its cells have as many lines as they need.
    """

    name: str
    label: str
    hint: str = ""
    num: bool = False
    link: bool = False
    state: bool = False
    curve: bool = False
    mean: bool = False
    sparse: bool = False
    wraps: bool = False


class Table(Element, component="table.js"):
    """A dense table; with ``search`` it can be searched, ordered, and walked through by keys.

    Args:
        rows: Texts and numbers by column, with ``key`` and, for links, ``href``; with ``group``, rows of a group stand
            together.
        label: Its title for screen readers.
        search: Placeholder of its search field; "" for no field.
        none: The sentence shown where there are no rows.
        instead: The element in the table's place where there are no rows.
        on_chosen: Called with the keys of the selected rows; None: rows cannot be selected.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Mapping[str, Any]],
        *,
        label: str,
        search: str = "",
        unit: str = "rows",
        none: str = "",
        instead: Element | None = None,
        on_chosen: Callable[[list[str]], object] | None = None,
    ) -> None:
        super().__init__()
        self._props |= {"columns": tuple(vars(column) for column in columns), "given": tuple(rows)}
        self._props |= {"label": label, "search": search, "unit": unit, "none": none}
        self._props["searchable"], self._props["selectable"] = bool(search), on_chosen is not None
        self._instead = instead
        self._show_instead()
        if on_chosen is not None:
            chosen = on_chosen

            def select(event: GenericEventArguments) -> None:
                chosen([str(key) for key in event.args])

            self.on("chosen", select)

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show other rows, if they are others; the browser gets those that have changed."""
        before, now = self._props["given"], tuple(rows)
        changed = [row for row, known in zip(now, before) if row != known]
        same = [row["key"] for row in now] == [row["key"] for row in before]
        if same and len(changed) < len(now):
            with self._props.suspend_updates():
                self._props["given"] = now
            if changed:
                self.run_method("patch", changed)
        elif not same or changed:
            self._props["given"] = now
        self._show_instead()

    def show_columns(self, columns: Sequence[Column]) -> None:
        """Have other columns, if they are others."""
        shown = tuple(vars(column) for column in columns)
        if shown != self._props["columns"]:
            self._props["columns"] = shown

    def _show_instead(self) -> None:
        if self._instead is not None:
            self._instead.set_visibility(not self._props["given"])
            self.set_visibility(bool(self._props["given"]))


@dataclass(frozen=True)
class Curve:
    """A curve of a :class:`Plot`: ``points`` are pairs, ``colour`` counts from 0, ``faint`` is for raw values."""

    name: str
    points: Sequence[Sequence[float]]
    colour: int = 0
    faint: bool = False


def _columns(curves: Sequence[Curve]) -> tuple[dict[str, Any], ...]:
    columns = []
    for curve in curves:
        x, y = zip(*curve.points, strict=True) if curve.points else ((), ())
        columns.append({"name": curve.name, "x": x, "y": y, "colour": curve.colour, "faint": curve.faint})
    return tuple(columns)


class Plot(Element, component="plot.js", dependencies=["chart.js"], default_classes="gw-plot"):
    """Curves over a common axis; drag to zoom, double-click for all.

    Args:
        title: Its title for screen readers.
        on_range: Called with the two ends of the range that was dragged, or None for all.
        as_html: Draws the curves, by name, for a browser whose scripts have not come; None: they wait.
    """

    def __init__(
        self,
        curves: Sequence[Curve],
        *,
        title: str,
        on_range: Callable[[tuple[float, float] | None], object] | None = None,
        as_html: Callable[[Mapping[str, Sequence[tuple[float, float]]]], str] | None = None,
    ) -> None:
        super().__init__()
        self.as_html = as_html
        self._props |= {"series": _columns(curves), "title": title, "axis": "", "level": None}
        if on_range is not None:
            zoomed = on_range

            def select(event: GenericEventArguments) -> None:
                ends = event.args
                zoomed((float(ends[0]), float(ends[1])) if isinstance(ends, list) and len(ends) == 2 else None)

            self.on("range", select)

    def show(self, curves: Sequence[Curve], *, axis: str = "", level: tuple[float, float] | None = None) -> None:
        """Show other curves, if they are others: drawing costs a browser most.

        Args:
            axis: The x axis: ``"time"`` in milliseconds, or a whole number's name.
            level: The ends of the vertical axis; None: those of the curves.
        """
        shown = {"series": _columns(curves), "axis": axis, "level": level}
        if any(self._props[name] != value for name, value in shown.items()):
            self._props |= shown
            self.update()


class Drawn(Element):
    """A place whose texts are drawn anew when what it shows is another.

    A click on what is drawn anew at that moment is lost: what can be clicked belongs into :class:`Items`.
    """

    def __init__(self) -> None:
        super().__init__("div")
        self._shown: object = None

    def show(self, value: T, draw: Callable[[T], object]) -> None:
        """Draw a value that is not None."""
        if value != self._shown:
            self._shown = value
            self.clear()
            with self:
                draw(value)


class Items(Element):
    """Items, each with its classes; one that stays is never drawn anew, so that no click on it is lost."""

    def __init__(self, classes: str = "gw-items", each: str = "gw-item") -> None:
        super().__init__("div")
        self.classes(classes)
        self._each = each
        self._drawn: dict[str, tuple[Element, Callable[[Any], object]]] = {}

    def show(self, items: Mapping[str, T], draw: Callable[[T], Callable[[T], object]]) -> None:
        """Show items by their keys, in this order.

        Args:
            draw: Makes an item, and returns the function that shows a later value in it.
        """
        for key in self._drawn.keys() - items.keys():
            self._drawn.pop(key)[0].delete()
        for place, (key, item) in enumerate(items.items()):
            if key not in self._drawn:
                with self, ui.element("section").classes(self._each) as element:
                    self._drawn[key] = element, draw(item)
                element.move(self, place)
            self._drawn[key][1](item)


class Lines(Element):
    """Texts below each other, each with these classes; a line stays where it is while its text changes."""

    def __init__(self, texts: Sequence[str] = (), classes: str = "") -> None:
        super().__init__("div")
        self.classes("gw-lines")
        self._each = classes
        self._labels: list[ui.label] = []
        self.show(texts)

    def show(self, texts: Sequence[str]) -> None:
        """Show other texts."""
        for label in self._labels[len(texts) :]:
            label.delete()
        del self._labels[len(texts) :]
        with self:
            self._labels += [ui.label().classes(self._each) for _ in texts[len(self._labels) :]]
        for label, text in zip(self._labels, texts, strict=True):
            label.text = text
        self.set_visibility(bool(texts))


def title(text: str, level: int = 1) -> Element:
    """A heading."""
    with ui.element(f"h{level}").classes("gw-title") as heading:
        plain(text)
    return heading


def named(element: E, name: str) -> E:
    """The element, with a name for screen readers."""
    element.props["aria-label"] = name
    return element


def plain(text: str, classes: str = "", tag: str = "span") -> Element:
    """A text, whatever it contains."""
    element = ui.label(text).classes(classes)
    element.tag = tag
    return element


def state(word: str, hint: str = "") -> Element:
    """A state with its mark."""
    element = plain(word, f"gw-state {word}")
    if hint:
        element.props["title"] = hint
    return element


def empty(sentence: str, code: str = "") -> None:
    """Show a place without content: what would be there, and what to type."""
    with ui.element("div").classes("gw-empty"):
        ui.label(sentence).classes("quiet")
        if code:
            sdk_line(code)


def error(sentence: str) -> ui.label:
    """A failure, in the words of whoever reports it."""
    return ui.label(sentence).classes("gw-error").props("role=alert")


def sdk_line(code: str) -> None:
    """A line of code that does the same, with a button that copies it."""
    with ui.element("div").classes("gw-sdk"):
        plain(code, tag="code").props("tabindex=0")
        copied = partial(copy, json.dumps(code))
        named(button("", copied, kind="icon", icon="content_copy").props("dense"), "Copy the code")


def keep_in_address(**values: str) -> None:
    """Have the page's address say what is shown, so that a link to it shows the same; "" leaves a value out."""
    ui.run_javascript(
        "const address = new URL(location);"
        f"for (const [name, value] of Object.entries({json.dumps(values)}))"
        "  value ? address.searchParams.set(name, value) : address.searchParams.delete(name);"
        "history.replaceState(history.state, '', address);"
    )


async def copy(expression: str) -> None:
    """Copy the text that a JavaScript expression gives, and say whether the browser has done it."""
    left = await ui.run_javascript(
        f"const text = {expression};"
        "return navigator.clipboard ? navigator.clipboard.writeText(text).then(() => '', () => text) : text",
        timeout=10.0,
    )
    if left:
        sentence = "Browsers let a page copy over https and from localhost only; this was to be copied:"
        ui.notify(f"{sentence} {left}", timeout=0, close_button="Close", multi_line=True)
    else:
        ui.notify("Copied.")


def facts(pairs: Mapping[str, object]) -> None:
    """Names and values; those without a value are left out."""
    with ui.element("dl").classes("gw-facts"):
        for name, value in pairs.items():
            if value not in ("", None):
                plain(name, tag="dt")
                plain(str(value), tag="dd")


def button(
    text: str, on_click: Callable[..., Any] | None, *, kind: str = "plain", icon: str | None = None
) -> ui.button:
    """A button: ``plain``, ``primary``, ``danger`` or ``icon``."""
    return ui.button(text, on_click=on_click, icon=icon, color=None).props("no-caps flat").classes(f"gw-{kind}")


def question(label: str, send: str, answer: Callable[[str], Any]) -> None:
    """A field and a button; either gives ``answer`` what was typed.

    The browser sends the text with the event: before a page is connected, an event may overtake those before it.
    """
    field = ui.input(label).props("outlined dense autofocus").classes("full-width")
    typed = f"() => emit(getHtmlElement({field.id}).value)"
    for element, event in ((field, "keydown.enter"), (button(send, None, kind="primary"), "click")):
        element.on(event, lambda told: answer(str(told.args).strip()), js_handler=typed)


def panel(heading: str = "") -> Element:
    """A bordered part of a page, for ``with``."""
    with ui.element("section").classes("gw-panel") as part:
        if heading:
            title(heading, 2)
    return part


def skeleton(height: str = "12rem") -> None:
    """Show a placeholder while something is loaded."""
    ui.element("div").classes("gw-skeleton").style(f"height: {height}").props("aria-hidden=true")


def bars(values: Sequence[int], edges: Sequence[float], title: str) -> None:
    """A small histogram: a bar for each count, which stands above it, over an axis from the first edge to the last."""
    most = max(values, default=0) or 1
    with named(ui.element("div").classes("gw-bars").props("role=img"), title):
        for value, (low, high) in zip(values, pairwise(edges), strict=True):
            bar = ui.element("i").style(f"height: {100 * value / most:.0f}%")
            bar.props["title"] = f"{low:.3g} to {high:.3g}: {value}"
            if value:
                with bar:
                    plain(str(value))
    with ui.element("div").classes("gw-ends quiet"):
        plain(f"{edges[0]:.4g}")
        plain(f"{edges[-1]:.4g}")
