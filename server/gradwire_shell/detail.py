"""Components that show many small things at once: tokens by a figure, and work over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui.element import Element
from nicegui.elements import echart as _library  # noqa: F401  it offers the library that chart.js imports


class Tokens(Element, component="tokens.js"):
    """Sequences of tokens, coloured by a figure.

    Args:
        sequences: Mappings of ``label``, ``facts``, and lists with an entry for each token: ``texts``, ``ids``,
            ``scored``, ``logprob``, ``sampler``, ``advantage``; None where a token has no such figure.
        by: ``"ratio"``, ``"difference"``, ``"advantage"``, ``"logprob"`` or ``"mask"``.
    """

    def __init__(self, sequences: Sequence[Mapping[str, Any]], by: str) -> None:
        super().__init__()
        self._props |= {"sequences": tuple(sequences), "by": by}

    def colour(self, by: str) -> None:
        """Colour by another figure."""
        self._props["by"] = by
        self.update()


class Lanes(Element, component="lanes.js", dependencies=["chart.js"], default_classes="gw-lanes"):
    """A timeline of lanes.

    Args:
        title: Its title for screen readers.
        colours: Name of a kind -> the theme's colour, such as ``"--s1"``.
    """

    def __init__(self, title: str, colours: Mapping[str, str]) -> None:
        super().__init__()
        self._props |= {"title": title, "colours": dict(colours), "lanes": (), "boxes": ()}

    def show(self, lanes: Sequence[str], boxes: Sequence[Sequence[Any]]) -> None:
        """Show boxes, if they are others: the lane's number, begin and end in milliseconds, kind, and text on hover."""
        shown = {"lanes": tuple(lanes), "boxes": tuple(boxes)}
        if shown["lanes"] != self._props["lanes"] or shown["boxes"] != self._props["boxes"]:
            self._props |= shown
            self.style(f"height: {max(len(lanes), 2) * 2.2 + 2.5}rem")
            self.update()
