"""The front's own fixtures: a real grpc.aio server over a fake engine."""

from __future__ import annotations

from tests.server.front.conftest import door, one_loop, start

__all__ = ["door", "one_loop", "start"]
