"""The HTTP doors' routes, from their own route tables, so that tests of every route forget none."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.doors.http.door import HttpDoor

HIDDEN = {"/embeddings", "/responses", "/conversations", "/conversations/{rest:path}"}
"""Routes that no document has: they only say why there is nothing."""


def documents(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The OpenAPI document of each protocol, which has each of its routes, by the protocol's name.

    Its server is the prefix of the routes. ``folder`` becomes the state folder of a server that does not start.
    """
    found = {}
    for protocol in HttpDoor(Core(ServerConfig(state_dir=folder, models={"tiny": "none"}))).protocols():
        document = protocol.app.openapi()
        hidden = {route.path for route in _routes(protocol.app.routes) if not route.include_in_schema}
        assert hidden <= HIDDEN, hidden
        found[protocol.name] = {**document, "servers": [{"url": protocol.prefix or "/"}]}
    return found


def endpoints(folder: Path) -> dict[str, str]:
    """The source of the function behind each route, by ``METHOD /path``; ``folder`` as of :func:`documents`."""
    found = {}
    for protocol in HttpDoor(Core(ServerConfig(state_dir=folder, models={"tiny": "none"}))).protocols():
        for route in _routes(protocol.app.routes):
            [method] = route.methods
            found[f"{method} {protocol.prefix}{route.path}"] = inspect.getsource(route.endpoint)
    return found


def _routes(routes: Iterable[Any]) -> Iterator[APIRoute]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:
            yield from _routes(router.routes)
