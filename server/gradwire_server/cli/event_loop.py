"""The event loop of the processes that speak gRPC all the time: the front, and the agent of an engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.util import find_spec

GRPC = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}
"""Variables of gRPC, where nobody says otherwise.

Children are replaced by other programs at once. With gRPC's handlers of forks they can die before that.

gRPC's newer engine of events hands each message through threads of its own before Python's gets it; without it, the
thread that waits for messages reads them itself. An operation takes 3 switches between threads fewer in the front, and
6 fewer on the way to an engine of an agent.
"""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Prepare gRPC, before it is imported; return uvloop's event loops if it is installed, else None: asyncio's own."""
    for name, value in GRPC.items():
        os.environ.setdefault(name, value)
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
