"""The declaration of a protocol of the HTTP door, and the request context of its routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller

IGNORED = "gradwire.ignored"
"""Key of a request's scope with the names of what it asks for in vain, which its answer's ``gradwire-ignored`` has."""

ErrorBody = Callable[[int, pb.Error], Mapping[str, Any]]
"""``(status, error)`` -> the JSON object that the protocol answers with."""


@dataclass(frozen=True)
class DirectCall:
    """A request whose body was received. ``media_type`` has no parameters."""

    caller: Caller
    content: bytes
    media_type: str
    traceparent: str


DirectRoute = Callable[[DirectCall], Awaitable[Response | None]]
"""A route that is answered without FastAPI's layers; None for a request that is not a valid call of it."""

OversizedRoute = Callable[[DirectCall, pb.Error], Awaitable[Response | None]]
"""``(call, reason)`` -> the answer to a request whose body is above the limit; the call has the body's beginning.

None for a request that is answered with the reason.
"""


@dataclass(frozen=True)
class HttpProtocol:
    """One protocol.

    Attributes:
        name: Its name in metrics and logs.
        prefix: Beginning of its paths, without a slash at the end.
        app: Its routes, relative to the prefix.
        open_paths: Beginnings of paths, relative to the prefix, that need no key.
        direct: POST routes that are answered without FastAPI's layers, by path; the application has them too.
        oversized: POST routes that answer a body above the limit in their own way, by path.
        uploads: POST routes, with ``*`` for an id, that read their body themselves, part by part, as it may be as large
            as a file.
        for_agents: Paths, relative to the prefix, with ``*`` for anything, that the keys of rollout sessions open.
        paths: The paths, relative to the prefix, with what is below them; for a protocol among those of another.
    """

    name: str
    prefix: str
    app: FastAPI
    error_body: ErrorBody
    open_paths: tuple[str, ...] = ()
    direct: Mapping[str, DirectRoute] = field(default_factory=dict)
    oversized: Mapping[str, OversizedRoute] = field(default_factory=dict)
    uploads: tuple[str, ...] = ()
    for_agents: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("/",)

    def serves(self, path: str) -> bool:
        """Whether a path belongs to the protocol."""
        return any(
            path == (whole := self.prefix + each) or path.startswith(whole.rstrip("/") + "/") for each in self.paths
        )


# These are coroutines, as FastAPI calls plain functions in a thread.
async def _caller(request: Request) -> Caller:
    caller: Caller = request.scope["gradwire.caller"]
    return caller


async def _traceparent(request: Request) -> str:
    return request.headers.get("traceparent", "")


async def _body(request: Request) -> bytes:
    return await request.body()


CallerOf = Annotated[Caller, Depends(_caller)]
"""A route's parameter of this type is the authenticated caller."""
TraceparentOf = Annotated[str, Depends(_traceparent)]
"""A route's parameter of this type is the caller's trace context, for ``OperationHeader.traceparent``."""
BodyOf = Annotated[bytes, Depends(_body)]
"""A route's parameter of this type is the body as it was sent."""
