"""Logs of the front and of the engine: a line of text or a JSON object each, with the run and operation it is about.

What clients send is not logged: no prompt, no token, no key. Messages name runs, numbers, kinds and error codes. An
error that nobody foresaw is logged with its traceback, under the request id that the client was given.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

Format = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")

_ABOUT: ContextVar[tuple[str, int]] = ContextVar("gradwire_log_about", default=("", 0))
_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


@contextmanager
def about(run_id: str, seq: int) -> Iterator[None]:
    """Everything that is logged inside, in this task or thread, is about this operation."""
    token = _ABOUT.set((run_id, seq))
    try:
        yield
    finally:
        _ABOUT.reset(token)


class _About(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        run_id, seq = _ABOUT.get()
        if run_id and not hasattr(record, "run_id"):
            record.run_id, record.seq = run_id, seq
        return True


class JsonFormatter(logging.Formatter):
    """``time, level, process, logger, message``, what was given as ``extra`` (``run_id``, ``seq``, ``request_id``…),
    and ``exception`` where there is one.

    Args:
        process: ``"front"`` or ``"engine"``.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Time, process, level, logger, message; the run and number at the end."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        run_id = getattr(record, "run_id", "")
        return f"{line} [{run_id} #{getattr(record, 'seq', 0)}]" if run_id else line


def configure(level: str, format: Format, process: str, stream: TextIO | None = None) -> None:
    """Sets the process' logging up; it goes to ``stream``, standard error by default.

    Args:
        level: of what gradwire says; other packages are heard from ``warning`` on.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    handler.addFilter(_About())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("gradwire_server", "gradwire_losses"):
        logging.getLogger(package).setLevel(level.upper())
