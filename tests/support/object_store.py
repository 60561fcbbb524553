"""A real S3 server over HTTP on loopback (moto), in front of which requests fail as they do on a network."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
Fault = Callable[["Faults", dict[str, Any], Any], Iterable[bytes]]
"""Answers a WSGI request in place of the server."""


def unavailable(faults: Faults, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """The server is overloaded and says so."""
    start("503 Slow Down", [("Content-Type", "text/plain")])
    return [b"slow down"]


def lost_answer(faults: Faults, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """The server does what it is asked, and the answer is lost."""
    b"".join(faults.app(environ, lambda *_: None))
    return unavailable(faults, environ, start)


def silent(faults: Faults, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """The server says nothing until the client has given up."""
    faults.over.wait(60)
    return unavailable(faults, environ, start)


def torn_upload(faults: Faults, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """Half of what is sent arrives, and the server takes it for all."""
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    half = body[: len(body) // 2]
    return faults.app(environ | {"wsgi.input": io.BytesIO(half), "CONTENT_LENGTH": str(len(half))}, start)


def slow_read(faults: Faults, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """The answer trickles."""
    for piece in faults.app(environ, start):
        for at in range(0, len(piece), 1 << 16):
            time.sleep(0.01)  # of the server's, which has no other way to be slow
            yield piece[at : at + (1 << 16)]


class Faults:
    """The server's application, with faults for the next requests that match."""

    def __init__(self, app: Any) -> None:
        self.app, self.over = app, threading.Event()
        self.requests: list[tuple[str, str]] = []
        self._planned: list[list[Any]] = []
        self._lock = threading.Lock()

    def plan(self, fault: Fault, method: str, part: str, times: int = 1) -> None:
        """Let the next requests of a method whose path contains a text fail; ``times=-1`` for all."""
        self._planned.append([fault, method, part, times])

    @property
    def planned(self) -> list[tuple[str, str]]:
        """Method and path of the faults that have not happened as often as planned."""
        return [(method, part) for _, method, part, times in self._planned if times > 0]

    def mend(self) -> None:
        """Plan no more faults."""
        self._planned.clear()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with self._lock:
            self.requests.append((method, path))
            planned = next((p for p in self._planned if p[1] == method and p[2] in path and p[3]), None)
            if planned is not None:
                planned[3] -= 1
        answer = self.app if planned is None else lambda *call: planned[0](self, *call)
        found: Iterable[bytes] = answer(environ, start)
        return found


class S3:
    """The server.

    Attributes:
        environment: Variables by which a client finds it.
        faults: What goes wrong.
    """

    def __init__(self, faults: Faults, port: int) -> None:
        self.faults = faults
        self.environment = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Names and sizes of what is in the bucket."""
        import obstore

        return {each["path"]: each["size"] for page in obstore.list(self._store(), prefix) for each in page}

    def overwrite(self, key: str, content: bytes) -> None:
        """Change an object behind everyone's back."""
        import obstore

        obstore.put(self._store(), key, content)

    def remove(self, key: str) -> None:
        """Delete an object behind everyone's back."""
        import obstore

        obstore.delete(self._store(), key)

    def _store(self) -> Any:
        from obstore.store import S3Store

        config = {key.lower(): value for key, value in self.environment.items()}
        options: Any = {"allow_http": True}
        return S3Store(BUCKET, config=config, client_options=options)  # type: ignore[arg-type,unused-ignore]


@contextmanager
def s3_server() -> Iterator[S3]:
    """Start the server with an empty bucket; skips the test where moto or obstore is not installed."""
    for package in ("moto", "flask_cors", "obstore"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'gradwire[store,dev]'")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    faults = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        s3 = S3(faults, server.server_port)
        _make_bucket(s3)
        for key in s3.objects():  # moto keeps them for the whole process
            s3.remove(key)
        yield s3
    finally:
        faults.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _make_bucket(s3: S3) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3.environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
