"""Keyword arguments that several functions take, declared once as a ``TypedDict``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gradwire.errors import did_you_mean


def check_options(kind: type, options: Mapping[str, object], caller: Callable[..., Any]) -> None:
    """Check the names of keyword arguments, as Python does without ``**``.

    Args:
        kind: The ``TypedDict`` with the known names.
        caller: The function or class that has them beside its own, for the error.

    Raises:
        TypeError: A name is unknown.
    """
    for name in options:
        if name not in kind.__annotations__:
            own = (each.name for each in inspect.signature(caller).parameters.values() if each.kind != each.VAR_KEYWORD)
            known = [*own, *kind.__annotations__]
            hint = did_you_mean(name, known) or f"; it takes {', '.join(known)}"
            raise TypeError(f"{caller.__name__}() has no argument {name!r}{hint}")
