"""Real object stores over HTTP on loopback, in front of which requests fail as they do on a network.

They are moto for S3 and Azurite for Azure. No emulator of Google's has what a store needs: moto stands in for it,
behind a translation of Google's headers, made after its reference of the XML API.
"""

from __future__ import annotations

import base64
import email.utils
import hmac
import http.client
import io
import itertools
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.blocking import DETECTOR
from support.server import free_port

BUCKET = "bucket"
AZURITE = Path(__file__).parents[2] / ".node-azurite" / "node_modules" / ".bin" / "azurite-blob"
AZURE_ACCOUNT, AZURE_VERSION = "devstoreaccount1", "2021-08-06"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's account, the same everywhere and published by Microsoft."""
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
OF_S3 = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""What moto takes for the signature of the bucket's owner."""
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]
"""A WSGI application."""
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
    """The server says nothing until the client has given up, or until it is mended."""
    faults.mended.wait(60)
    return unavailable(faults, environ, start)


def torn_upload(faults: Faults, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """Only half of what was sent is kept, and the server takes it for all."""
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    answer = list(faults.app(environ | {"wsgi.input": io.BytesIO(body)}, start))
    faults.overwrite(environ["PATH_INFO"].partition(f"/{BUCKET}/")[2], body[: len(body) // 2])
    return answer


def slow_read(faults: Faults, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """The answer trickles."""
    for piece in faults.app(environ, start):
        for at in range(0, len(piece), 1 << 16):
            time.sleep(0.01)  # of the server's, which has no other way to be slow
            yield piece[at : at + (1 << 16)]


class Faults:
    """The server's application, with faults for the next requests that match."""

    def __init__(self, app: Any) -> None:
        self.app, self.mended = app, threading.Event()
        self.overwrite: Callable[[str, bytes], None]
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
        """Plan no more faults, and end those that go on."""
        self._planned.clear()
        self.mended.set()
        self.mended = threading.Event()

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


class Objects:
    """The server of a bucket.

    Attributes:
        url: Address of the bucket.
        environment: Variables by which a client finds it.
        faults: What goes wrong.
        part: What the address of a request that writes a part of a large object contains.
        whole: Method, and a part of the address, of a request that begins or ends such an object.
        deletes: Method, and a part of the address, of a request that deletes objects.
    """

    def __init__(
        self,
        url: str,
        environment: dict[str, str],
        faults: Faults,
        part: str,
        whole: tuple[str, str],
        deletes: tuple[str, str],
    ) -> None:
        self.url, self.environment, self.faults = url, environment, faults
        self.part, self.whole, self.deletes = part, whole, deletes
        faults.overwrite = self.overwrite

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Names and sizes of what is in the bucket."""
        import obstore

        return {each["path"]: each["size"] for page in obstore.list(self._store(), prefix) for each in page}

    def read(self, key: str) -> bytes:
        """The content of an object."""
        import obstore

        return bytes(obstore.get(self._store(), key).bytes())

    def overwrite(self, key: str, content: bytes) -> None:
        """Change an object behind everyone's back."""
        import obstore

        obstore.put(self._store(), key, content)

    def remove(self, key: str) -> None:
        """Delete an object behind everyone's back."""
        import obstore

        obstore.delete(self._store(), key)

    def _store(self) -> Any:
        from obstore.store import from_url

        options: Any = {"allow_http": True}
        with mock.patch.dict(os.environ, self.environment):
            return from_url(self.url, client_options=options)


@contextmanager
def _served(faults: Faults) -> Iterator[int]:
    """Serve requests on a port of loopback."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        faults.mend()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def s3_server() -> Iterator[Objects]:
    """Start moto's S3 server with an empty bucket; skips the test where moto or obstore is not installed."""
    with _moto(_as_s3) as (faults, endpoint):
        yield _emptied(
            Objects(
                f"s3://{BUCKET}", CREDENTIALS | {"AWS_ENDPOINT_URL": endpoint}, faults,
                "partNumber", ("POST", "uploads"), ("POST", "?delete"),
            )
        )  # fmt: skip


@contextmanager
def google_server() -> Iterator[Objects]:
    """Start what speaks Google's XML API, with an empty bucket; skips the test as :func:`s3_server` does."""
    with _moto(_as_google) as (faults, endpoint):
        account = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
        account["private_key_id"] = ""
        yield _emptied(
            Objects(
                f"gs://{BUCKET}", {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}, faults,
                "partNumber", ("POST", "uploads"), ("DELETE", "/"),
            )
        )  # fmt: skip


@contextmanager
def _moto(spoken: Callable[[Application], Application]) -> Iterator[tuple[Faults, str]]:
    """moto's S3 server with a bucket, through an application that speaks as another does; its faults and address."""
    for package in ("moto", "flask_cors", "obstore"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'gradwire[store,dev]'")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    faults = Faults(spoken(DomainDispatcherApplication(create_backend_app)))
    with _served(faults) as port:
        endpoint = f"http://127.0.0.1:{port}"
        _make_bucket(endpoint)
        yield faults, endpoint


def _emptied(bucket: Objects) -> Objects:
    for key in bucket.objects():  # moto keeps them for the whole process
        bucket.remove(key)
    return bucket


def _as_s3(moto: Application) -> Application:
    """A write is compared with what is there and done in one, which moto's are not."""
    lock = threading.Lock()

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("PUT", "POST"):
            return moto(environ, start)
        with lock:
            return list(moto(environ, start))

    return app


def _as_google(s3: Application) -> Application:
    """Google's XML API on top of S3's, which it resembles: an object has a generation, and writes name that."""
    generations, numbers, lock = dict[str, str](), itertools.count(1), threading.Lock()

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        key, writes = environ["PATH_INFO"], environ["REQUEST_METHOD"] in ("PUT", "POST")
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = OF_S3
        source = environ.pop("HTTP_X_GOOG_COPY_SOURCE", None)
        if source is not None:
            environ["HTTP_X_AMZ_COPY_SOURCE"] = source

        def answer(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if writes and status.startswith("2"):
                generations[key] = str(next(numbers))
            return start(status, [*headers, ("x-goog-generation", generations.get(key, "0"))], *rest)

        if not writes:
            return s3(environ, answer)
        with lock:
            wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
            if wanted == "0":
                environ["HTTP_IF_NONE_MATCH"] = "*"
            elif wanted is not None and wanted != generations.get(key):
                start("412 Precondition Failed", [("Content-Type", "text/plain")])
                return [b"another generation"]
            return list(s3(environ, answer))

    return app


def _make_bucket(endpoint: str) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()


@contextmanager
def azure_server(folder: Path) -> Iterator[Objects]:
    """Start Azurite, Microsoft's emulator, with an empty container; skips the test where it is not installed."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'gradwire[store]'")
    if not AZURITE.exists():
        pytest.skip(f"needs Azurite: make {AZURITE.parents[2].name}/.installed")
    port = free_port()
    with DETECTOR.excused():
        azurite = subprocess.Popen(
            [AZURITE, "--blobPort", str(port), "--location", folder, "--silent", "--skipApiVersionCheck",
             "--disableTelemetry"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _make_container(port)
            faults = Faults(_forwarded(port))
            with _served(faults) as relay:
                address = f"http://127.0.0.1:{relay}"
                environment = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": address}
                whole = ("PUT", "comp=blocklist")
                yield Objects(f"az://{BUCKET}", environment, faults, "comp=block&", whole, ("POST", "comp=batch"))
        finally:
            azurite.terminate()
            azurite.wait(60)


def _forwarded(port: int) -> Application:
    """A WSGI application that is the HTTP server on another port."""

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        headers = {key[5:].replace("_", "-"): value for key, value in environ.items() if key.startswith("HTTP_")}
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers |= {"Content-Length": str(len(body))}
        if environ.get("CONTENT_TYPE"):
            headers["Content-Type"] = environ["CONTENT_TYPE"]
        there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            there.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, headers)
            answer = there.getresponse()
            content = answer.read()
            named = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP]
            start(f"{answer.status} {answer.reason}", named)
            return [content]
        finally:
            there.close()

    return app


def _make_container(port: int) -> None:
    """Make the container, once the emulator answers. The request is signed as Microsoft documents "Shared Key"."""
    deadline = time.monotonic() + 120
    while True:
        date, resource = email.utils.formatdate(usegmt=True), f"/{AZURE_ACCOUNT}/{BUCKET}"
        named = f"x-ms-date:{date}\nx-ms-version:{AZURE_VERSION}\n"
        text = "PUT" + 12 * "\n" + f"{named}/{AZURE_ACCOUNT}{resource}\nrestype:container"
        signature = hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), "sha256")
        headers = {
            "x-ms-date": date,
            "x-ms-version": AZURE_VERSION,
            "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}",
            "Content-Length": "0",
        }
        there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            there.request("PUT", f"{resource}?restype=container", headers=headers)
            assert there.getresponse().status == 201
            return
        except ConnectionError:
            assert time.monotonic() < deadline, "Azurite does not answer"
            time.sleep(0.1)
        finally:
            there.close()
