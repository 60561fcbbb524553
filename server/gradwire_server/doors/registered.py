"""The doors of a server, in one list."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwire_server.core.core import Core
from gradwire_server.doors.door import Door


def _grpc(core: Core) -> Door:
    from gradwire_server.doors.grpc.door import GrpcDoor

    return GrpcDoor(core)


def _http(core: Core) -> Door | None:
    if not core.config.http:
        return None
    from gradwire_server.doors.http.door import HttpDoor  # FastAPI is in an extra of its own

    return HttpDoor(core)


DOORS: Mapping[str, Callable[[Core], Door | None]] = {"http": _http, "grpc": _grpc}
"""Each door's name, and how it is made in front of a core; None if the settings leave it out. They open in this order,
and close in the reverse."""
