"""Answers to the console's questions to the server, shared by all pages and asked again only after a change."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
KEPT = 512


@dataclass(frozen=True)
class _Answer:
    version: Hashable
    asked_at: float
    task: asyncio.Task[Any]

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class Answers:
    """The newest answer to each question."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Answer] = OrderedDict()

    async def of(
        self,
        question: str,
        ask: Callable[[], Coroutine[Any, Any, T]],
        *,
        version: Hashable = None,
        every_s: float,
        stale_s: float = math.inf,
    ) -> T:
        """The answer to a question, at most ``every_s`` seconds older than the newest version.

        Args:
            ask: Asks the server; those that want the answer meanwhile share it.
            version: The stream's version of what the answer depends on: the server is asked again when it changes.
            every_s: Least seconds between two times that the server is asked, also where it fails.
            stale_s: Seconds after which it is asked again although the version is the same.

        Raises:
            GradwireError: Asking failed.
        """
        now = time.monotonic()
        known = self._known.get(question)
        age = math.inf if known is None else now - known.asked_at
        if known is None or (age >= every_s and (known.version != version or known.failed or age >= stale_s)):
            known = self._known[question] = _Answer(version, now, asyncio.create_task(ask()))
        self._known.move_to_end(question)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        answer: T = await asyncio.shield(known.task)
        return answer

    def forget(self, question: str) -> None:
        """Ask anew next time: the answer was changed from here."""
        self._known.pop(question, None)
