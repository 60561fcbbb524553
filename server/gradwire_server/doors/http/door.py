"""The HTTP listener: uvicorn in the server's event loop, with every protocol behind its guard."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi.responses import JSONResponse, PlainTextResponse
from gradwire_http.browsers import BrowserGuard, body_refusal
from gradwire_http.heads import BoundedHeads
from gradwire_http.request_headers import headers_of
from gradwire_proto.v1 import training_pb2 as pb
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gradwire_server.config import ServerConfig
from gradwire_server.core.core import VERSION, Core
from gradwire_server.core.rollouts.sessions import PATH as SESSIONS
from gradwire_server.doors.certificates import Certificates
from gradwire_server.doors.door import Door
from gradwire_server.doors.http.anthropic import app as anthropic
from gradwire_server.doors.http.errors import error_response
from gradwire_server.doors.http.guard import SESSION, GuardedProtocol
from gradwire_server.doors.http.openai import app as openai
from gradwire_server.doors.http.openai import errors as openai_errors
from gradwire_server.doors.http.openai import tokens
from gradwire_server.doors.http.protocol import HttpProtocol
from gradwire_server.doors.http.tinker import app as tinker
from gradwire_server.errors import NotNow


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's connection, whose head and body of an answer leave together.

    uvicorn writes them one after the other: two system calls, and a client that wakes up for the head alone.
    """

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        gathering: Any = GatheringTransport(transport)
        super().connection_made(gathering)


class GatheringTransport:
    """A transport that sends what was written in one turn of the event loop by one call.

    Args:
        transport: The transport that sends, and that does all else.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._parts = transport, list[bytes]()
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        """Send the data at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Send what was written, and close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


log = logging.getLogger(__name__)

CLOSE_S = 5
KEEP_ALIVE_S = 75
RENEW_S = 10.0
"""Seconds after which changed TLS files are noticed."""
BACKLOG = 2048
_SESSION = re.compile(rf"{SESSIONS}/([A-Za-z0-9-]{{1,100}})(/.*)?")
REFUSAL_CODES = {
    403: pb.ERROR_CODE_PERMISSION_DENIED,
    415: pb.ERROR_CODE_INVALID_ARGUMENT,
    421: pb.ERROR_CODE_PERMISSION_DENIED,
}
"""Error codes of the statuses with which requests of browsers are refused."""


class HttpDoor(Door):
    """The HTTP server in front of a started core.

    Args:
        listens_on: ``HOST:PORT``; that of the settings if empty.

    Attributes:
        address: ``HOST:PORT`` where the door listens, once it is open.
    """

    def __init__(self, core: Core, listens_on: str = "") -> None:
        self._core, self._listens_on = core, listens_on or core.config.http
        self._stopping = asyncio.Event()
        self._tinker = tinker.Tinker(core, self._stopping)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.address = ""

    @property
    def url(self) -> str:
        """Where clients reach the door."""
        return f"http{'s' if self._core.config.tls_cert else ''}://{self.address}"

    async def open(self) -> None:
        """Listen on the configured address.

        Raises:
            SystemExit: The address cannot be bound, or a TLS file cannot be read; with a message.
        """
        config = self._core.config
        listener = _listener(self._listens_on)
        host, port = listener.getsockname()[:2]
        self.address = f"{f'[{host}]' if ':' in host else host}:{port}"
        await self._tinker.start()
        protocols = await asyncio.to_thread(self.protocols)
        settings = uvicorn.Config(
            _root(self._core, self._listens_on, protocols, self._stopping), http=_Connection,
            log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none", proxy_headers=False,
            server_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CLOSE_S,
            **_tls(config),
        )  # fmt: skip
        try:
            settings.load()
        except (OSError, ssl.SSLError) as error:
            listener.close()
            raise SystemExit(f"gradwire: the TLS files cannot be used for HTTP: {error}") from error
        self._core.rollouts.url = self.url
        self._server = _Server(settings)
        if settings.ssl is not None:
            self._renewing = asyncio.create_task(_renew(Certificates(config), settings.ssl))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        started = asyncio.create_task(self._server.up.wait())
        await asyncio.wait([self._serving, started], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            listener.close()
            raise NotNow(f"gradwire: HTTP cannot be served on {self._listens_on}: {self._serving.exception()}")

    def protocols(self) -> tuple[HttpProtocol, ...]:
        """Build every protocol's routes, which takes FastAPI a few tenths of a second."""
        return (
            tinker.protocol(self._tinker),
            anthropic.protocol(self._core),
            tokens.protocol(self._core),
            openai.protocol(self._core, self._stopping),
        )

    async def announce_end(self) -> None:
        """Answer health checks with 503, and end the requests that wait for a result."""
        self._stopping.set()

    async def close(self) -> None:
        """Accept nothing more, let requests end, and stop. A second call does nothing."""
        self._stopping.set()
        server, self._server = self._server, None
        serving, self._serving = self._serving, None
        if server is not None and serving is not None:
            server.should_exit = True
            if self._renewing is not None:
                self._renewing.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._tinker.stop()


class _Connection(BoundedHeads, GatheringProtocol):
    """A connection whose heads are bounded, and whose answers leave in one piece."""


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the command, and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets=sockets)
        self.up.set()


def _root(core: Core, listens_on: str, protocols: Sequence[HttpProtocol], stopping: asyncio.Event) -> ASGIApp:
    """The application that gives each request to the protocol of its path."""
    guards = [(protocol, GuardedProtocol(core, protocol)) for protocol in protocols]
    known = ", ".join(f"{protocol.prefix}{protocol.paths[0].rstrip('/')} ({protocol.name})" for protocol in protocols)
    keyless = BrowserGuard(names=(listens_on.rpartition(":")[0], *core.config.host_names))
    keyed = BrowserGuard(names=None)

    async def root(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope = _in_session(scope, protocols)
        path = scope["path"]
        headers = headers_of(scope["headers"])
        browsers = keyed if core.keys.required else keyless
        protocol, guard = next((each for each in guards if each[0].serves(path)), (None, None))
        if (refused := browsers.refusal(scope["method"], headers) or body_refusal(headers)) is not None:
            status, message = refused
            error = pb.Error(code=REFUSAL_CODES[status], message=message)
            body = protocol.error_body if protocol is not None else _any_error_body
            await error_response(error, body, status)(scope, receive, send)
            return
        if protocol is not None and guard is not None:
            await guard({**scope, "root_path": scope.get("root_path", "") + protocol.prefix}, receive, send)
            return
        if path == "/version" or (path == "/" and scope["method"] in ("GET", "HEAD")):  # agents ask whether it is there
            await JSONResponse({"version": VERSION})(scope, receive, send)
            return
        if path in ("/healthz", "/health"):
            healthy = not stopping.is_set()
            await PlainTextResponse("ok" if healthy else "stopping", 200 if healthy else 503)(scope, receive, send)
            return
        message = f"{path[:200]} is not served here; there are {known}, /healthz, /health and /version"
        error = pb.Error(code=pb.ERROR_CODE_UNSUPPORTED, message=message)
        await error_response(error, _any_error_body, 404)(scope, receive, send)

    return root


def _in_session(scope: Scope, protocols: Sequence[HttpProtocol]) -> Scope:
    """A request under the URL of a rollout session as one at the root, with a note of the session.

    Agents disagree on whether a base URL ends with ``/v1``: it may be there, or not, or twice.
    """
    found = _SESSION.fullmatch(scope["path"])
    if found is None:
        return scope
    session_id, path = found[1], found[2] or "/"
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    if not any(protocol.serves(path) for protocol in protocols) and path != "/":
        path = f"/v1{path}"
    return {**scope, "path": path, "raw_path": path.encode(), SESSION: session_id}


def _any_error_body(status: int, error: pb.Error) -> Mapping[str, Any]:
    """An error outside every protocol's paths: its caller may speak any of them, so it has the form of each."""
    return {**tinker.error_body(status, error), **openai_errors.error_body(status, error)}


def _listener(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        (family, kind, protocol, _, target), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise NotNow(f"gradwire: cannot listen on --http {address}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _tls(config: ServerConfig) -> dict[str, Any]:
    if config.tls_cert is None:
        return {}
    settings: dict[str, Any] = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
    if config.tls_client_ca is not None:
        settings |= {"ssl_ca_certs": str(config.tls_client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return settings


async def _renew(files: Certificates, context: ssl.SSLContext) -> None:
    """Give new connections the certificate of the files."""
    while True:
        await asyncio.sleep(RENEW_S)
        if await asyncio.to_thread(files.changed):
            files.load_into(context)
