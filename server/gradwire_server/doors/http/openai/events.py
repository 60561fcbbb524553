"""Streams of server-sent events in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse

from gradwire_server.doors.http.errors import internal_error, status_of
from gradwire_server.doors.http.protocol import ErrorBody
from gradwire_server.errors import ServiceError


async def event_stream(
    events: AsyncGenerator[Mapping[str, Any]], error_body: ErrorBody, path: str
) -> StreamingResponse:
    """A response with these events; an error before the first one is raised, a later one is the last event.

    Raises:
        ServiceError: The request is refused.
    """
    first = await anext(events)

    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(events):
            try:
                yield _line(first)
                async for event in events:
                    yield _line(event)
            except ServiceError as error:
                yield _line(error_body(status_of(error.error), error.error))
            except Exception as error:  # the outermost handler, as the response has begun
                yield _line(error_body(500, internal_error(error, path)))
            else:
                yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _line(event: Mapping[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    for char in "\x85\u2028\u2029":  # httpx and others take these for the end of a line
        text = text.replace(char, f"\\u{ord(char):04x}")
    return b"data: " + text.encode(errors="replace") + b"\n\n"
