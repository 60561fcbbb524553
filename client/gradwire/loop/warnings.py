"""Warnings that come with every step, logged once."""

from __future__ import annotations

import logging
from typing import Any


class WarnOnce:
    """Logs the first warning of each kind.

    Args:
        name: Name of the logger.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._known: set[str] = set()

    def __call__(self, kind: str, message: str, *args: Any) -> None:
        if kind not in self._known:
            self._known.add(kind)
            self._logger.warning(message, *args)
