"""Streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse

from gradwire_server.doors.http.errors import internal_error, status_of
from gradwire_server.doors.http.protocol import ErrorBody
from gradwire_server.errors import ServiceError

KEEP_ALIVE_S = 5.0
"""Seconds without an event after which a comment says that the request waits for its turn."""
WAITING = b": waiting\n\n"
"""A comment, which clients skip; proxies and people see that the connection lives."""
Event = Mapping[str, Any]


async def event_stream(
    events: AsyncGenerator[Event], error_body: ErrorBody, path: str, *, typed: bool = False
) -> StreamingResponse:
    """A response with these events; a first error within ``KEEP_ALIVE_S`` is raised, a later one is the last event.

    Args:
        typed: Whether each event has its ``type`` as its name too; such a stream ends without ``[DONE]``.

    Raises:
        ServiceError: The request is refused.
    """
    kept_alive = _kept_alive(events)

    def line(event: Event | None) -> bytes:
        name = f"event: {event.get('type', 'error')}\n" if typed and event is not None else ""
        return name.encode() + _line(event)

    first = await anext(kept_alive)

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(kept_alive):
            try:
                yield line(first)
                async for event in kept_alive:
                    yield line(event)
            except ServiceError as error:
                yield line(error_body(status_of(error.error), error.error))
            except Exception as error:  # the outermost handler, as the response has begun
                yield line(error_body(500, internal_error(error, path)))
            else:
                if not typed:
                    yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _kept_alive(events: AsyncGenerator[Event]) -> AsyncGenerator[Event | None]:
    """Yield the events, and None whenever none has come for ``KEEP_ALIVE_S``."""

    async def next_event() -> Event | None:
        return await anext(events, None)

    task = asyncio.create_task(next_event())
    try:
        while True:
            await asyncio.wait([task], timeout=KEEP_ALIVE_S)
            if not task.done():
                yield None
                continue
            event = task.result()
            if event is None:
                return
            yield event
            task = asyncio.create_task(next_event())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await events.aclose()


def _line(event: Event | None) -> bytes:
    if event is None:
        return WAITING
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    for char in "\x85\u2028\u2029":  # httpx and others take these for the end of a line
        text = text.replace(char, f"\\u{ord(char):04x}")
    return b"data: " + text.encode(errors="replace") + b"\n\n"
