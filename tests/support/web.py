"""A web server in the tests' process, for what stands in for somebody else's service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.blocking import DETECTOR


class Quiet(BaseHTTPRequestHandler):
    """Prints no line for each request."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve requests on a port of loopback; the context is ``HOST:PORT``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            with DETECTOR.excused():  # it looks twice a second whether it shall end
                server.shutdown()
