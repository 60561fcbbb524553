"""Logs of the front and the engine: one line of text or one JSON object per record, with its run and operation.

Data from clients is not logged: no prompts, tokens or keys. Messages name runs, numbers, kinds and error codes. An
unexpected error is logged with its traceback and the request id that the client received.
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

_ABOUT: ContextVar[tuple[str, int]] = ContextVar("gradwire_log_about", default=("", 0))
_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


@contextmanager
def about(run_id: str, seq: int) -> Iterator[None]:
    """Attach a run and an operation to every record logged inside the block by this task or thread."""
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
    """Format records as JSON objects.

    Keys: ``time``, ``level``, ``process``, ``logger``, ``message``, those given as ``extra`` (``run_id``, ``seq``,
    ``request_id``…), and ``exception`` if there is one.

    Args:
        process: ``"front"``, ``"engine"``, or ``"engine 1"`` with its number where there are several.
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
    """Format records as lines of text: time, process, level, logger, message, and at the end run and number."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        run_id = getattr(record, "run_id", "")
        return f"{line} [{run_id} #{getattr(record, 'seq', 0)}]" if run_id else line


def configure(level: str, format: Format, process: str, stream: TextIO | None = None) -> None:
    """Configure the logging of this process.

    Args:
        level: Lowest level of gradwire's records; for other packages it is always ``warning``.
        format: ``"text"`` or ``"json"``.
        process: Name of the process in each record: ``"front"`` or ``"engine"``.
        stream: Destination; standard error by default.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    handler.addFilter(_About())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("gradwire_server", "gradwire_losses"):
        logging.getLogger(package).setLevel(level.upper())
