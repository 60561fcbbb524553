"""Keyword arguments that several functions take, declared once as a ``TypedDict``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches


def check_options(kind: type, options: Mapping[str, object], caller: str) -> None:
    """Check the names of keyword arguments, as Python does without ``**``.

    Args:
        kind: The ``TypedDict`` with the known names.
        caller: The function that has them, for the error.

    Raises:
        TypeError: A name is unknown.
    """
    known = kind.__annotations__
    for name in options:
        if name not in known:
            close = get_close_matches(name, known)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(known)}"
            raise TypeError(f"{caller}() has no argument {name!r}{hint}")
