"""Bodies: JSON is counted before objects are made of it, on every route, so that none can hold up the service."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from gradwire_http.json_bounds import JsonBounds, UnboundedJsonError

from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store.problems import TooLargeError, UnprocessableError

ROW_FIELDS = 16
"""Fields that a row of feedback may have: more than it knows, so that a misspelt one is named."""
BOUNDS = JsonBounds(values=1 << 14, containers=1 << 12)
ROWS = JsonBounds(values=LIMITS.batch_rows * ROW_FIELDS, containers=LIMITS.batch_rows * ROW_FIELDS)
"""Bounds of a body with many rows of feedback."""


async def check(body: bytes, bounds: JsonBounds) -> None:
    """Check how much a body of JSON, or of lines of JSON, holds.

    Raises:
        ProblemError: It holds more than the bounds, or is no JSON in UTF-8.
    """
    try:
        await bounds.check(body)
    except UnboundedJsonError as error:
        if error.what in ("values", "containers"):
            raise TooLargeError(f"the body cannot be read: {error}; send it in parts") from None
        raise UnprocessableError(f"the body cannot be read: {error}") from None


class CountedRoute(APIRoute):
    """A route whose body is counted before it is parsed; one that reads its body itself counts it itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler."""
        handler = super().get_route_handler()

        async def counted(request: Request) -> Response:
            if self.body_field is not None:
                await check(await request.body(), BOUNDS)
            return await handler(request)

        return counted
