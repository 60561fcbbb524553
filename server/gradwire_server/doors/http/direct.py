"""Routes that a training loop calls at every step, answered without FastAPI's layers.

Those layers take several times as long as such a route's own work. FastAPI has these routes too: it describes them, and
it answers requests that are not valid calls of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from gradwire_server.doors.http.protocol import BodyOf, CallerOf, DirectCall, DirectRoute, TraceparentOf


class _NotValid(Exception):
    """The body is not what the route takes."""


def direct_routes(routers: Iterable[APIRouter], paths: Collection[str]) -> dict[str, DirectRoute]:
    """The POST routes of these paths.

    Raises:
        TypeError: A route has a parameter other than :data:`CallerOf`, :data:`TraceparentOf`, :data:`BodyOf`, and a
            pydantic model for a body of JSON.
    """
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return {route.path: _direct(route.endpoint) for route in routes if route.path in paths}


def _direct(endpoint: Callable[..., Awaitable[Any]]) -> DirectRoute:
    hints = get_type_hints(endpoint, include_extras=True)
    readers = {name: _reader(hint) for name, hint in hints.items() if name != "return"}

    async def answer(call: DirectCall) -> Response | None:
        try:
            values = {name: read(call) for name, read in readers.items()}
        except _NotValid:
            return None
        result = await endpoint(**values)
        return result if isinstance(result, Response) else JSONResponse(result)

    return answer


def _reader(hint: Any) -> Callable[[DirectCall], Any]:
    for known, read in _READERS:
        if hint == known:
            return read
    if not (isinstance(hint, type) and issubclass(hint, BaseModel)):
        raise TypeError(f"a route that is answered directly cannot take {hint}")
    model = hint

    def parsed(call: DirectCall) -> BaseModel:
        if call.media_type != "application/json":
            raise _NotValid
        try:
            return model.model_validate_json(call.content)
        except ValidationError:
            raise _NotValid from None

    return parsed


_READERS: tuple[tuple[Any, Callable[[DirectCall], Any]], ...] = (
    (CallerOf, lambda call: call.caller),
    (TraceparentOf, lambda call: call.traceparent),
    (BodyOf, lambda call: call.content),
)
