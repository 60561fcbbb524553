"""A real grpc.aio server over an engine without a model."""

from __future__ import annotations

from support.front import door, start

__all__ = ["door", "start"]
