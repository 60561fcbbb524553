"""Connect to a server, or start an embedded one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.descriptions import ServerInfo
from gradwire.embedded import EmbeddedServer
from gradwire.errors import InvalidArgumentError, ServerStartError, UnsupportedError
from gradwire.service import ServiceClient
from gradwire.wire.options import check_options
from gradwire.wire.tls import SECURE_SCHEMES, checked_tls
from gradwire.wire.transport import Transport

PROTOCOL = 1
MAX_PORT = 65535

PathLike = str | os.PathLike[str]


class ConnectionOptions(TypedDict, total=False):
    """The keyword arguments of :func:`gradwire.connect`.

    Attributes:
        api_key: Defaults to the environment variable ``GRADWIRE_API_KEY``; for an embedded server, to a random
            key.
        models: Embedded server only: names or paths of models, as for ``gradwire serve --model``, or paths by name.
        state_dir: Embedded server only: folder for runs and checkpoints; by default a temporary folder.
        server_args: Embedded server only: further arguments of ``gradwire serve``.
        ca_cert: PEM file with the authority that signed the server's certificate; turns TLS on.
        client_cert: PEM file with this client's certificate, for mTLS.
        client_key: PEM file with the private key of ``client_cert``.
        connect_timeout: Seconds to wait for the first answer; 15 by default.
        start_timeout: Seconds to wait until an embedded server listens; 300 by default.
        reconnect_timeout: Seconds that operations wait for a server that became unreachable; 600 by default.
    """

    api_key: str | None
    models: str | Sequence[PathLike] | Mapping[str, PathLike]
    state_dir: PathLike | None
    server_args: Sequence[str]
    ca_cert: PathLike | None
    client_cert: PathLike | None
    client_key: PathLike | None
    connect_timeout: float
    start_timeout: float
    reconnect_timeout: float


class Connection:
    """A pending connection: ``await`` it, or enter it with ``async with``, to get the service."""

    def __init__(self, address: str | None, options: ConnectionOptions) -> None:
        self._address, self._options = address, options
        self._service: ServiceClient | None = None

    def __await__(self) -> Generator[Any, None, ServiceClient]:
        return open_service(self._address, self._options).__await__()

    async def __aenter__(self) -> ServiceClient:
        self._service = await self
        return self._service

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._service is not None:
            await self._service.close()


def connect(address: str | None = None, **options: Unpack[ConnectionOptions]) -> Connection:
    """Connect to a server, or start one: ``service = await connect(...)`` or ``async with connect(...) as service``.

    Args:
        address: ``HOST:PORT``, ``https://HOST:PORT`` for TLS, or ``unix:PATH`` of a socket. None starts an embedded
            server on this machine that serves ``models`` and stops when the service is closed.
        options: ``api_key``, ``ca_cert``, ``models``, ``state_dir`` and others: see
            :class:`gradwire.ConnectionOptions`.

    Raises:
        ConnectionLostError: Nothing answers at the address.
        ServerStartError: The embedded server did not start.
        UnauthenticatedError: The key is missing or wrong.
    """
    check_options(ConnectionOptions, options, connect)
    return Connection(address, options)


def _has_port(address: str) -> bool:
    """Whether an address is ``HOST:PORT``; one with a scheme may leave the port out, and ``unix:PATH`` has none."""
    if address.startswith("unix:"):
        return True
    host, _, port = address.rstrip("/").rpartition(":")
    return bool(host) and (port.startswith("//") or (port.isdigit() and int(port) <= MAX_PORT))


def _check_server_installed() -> None:
    """Check that a server can be started on this machine.

    Raises:
        ServerStartError: The light client is installed alone.
    """
    missing = [name for name in ("torch", "transformers", "pydantic") if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerStartError(
            f"with no address a server is started on this machine, and {missing[0]} is not installed: pip install "
            "'gradwire[server]', or give the address of a server that runs elsewhere"
        )


async def open_service(address: str | None, options: ConnectionOptions) -> ServiceClient:
    """Open the service that :func:`connect` describes."""
    tls = checked_tls(options.get("ca_cert"), options.get("client_cert"), options.get("client_key"))
    given, api_key = options.get("models", ()), options.get("api_key")
    if isinstance(given, Mapping):
        given = [f"{name}={os.fspath(path)}" for name, path in given.items()]
    models = [given] if isinstance(given, str | os.PathLike) else list(given)
    state_dir, server_args = options.get("state_dir"), options.get("server_args", ())
    connect_timeout = options.get("connect_timeout", 15.0)
    embedded = None
    if address is None:
        if not models:
            raise InvalidArgumentError(
                "connect() with no address starts a server, which needs a model: connect(models=[NAME_OR_PATH])",
                field="models",
                rule="at least one",
            )
        _check_server_installed()
        folder = Path(state_dir) if state_dir else None
        embedded = EmbeddedServer([os.fspath(each) for each in models], folder, server_args, api_key or "")
    elif models or state_dir or server_args:
        raise InvalidArgumentError(
            "models, state_dir and server_args apply only to a server that connect() starts; remove them or the "
            "address",
            field="address",
            rule="no address",
        )
    elif "://" in address and not address.startswith(SECURE_SCHEMES):
        scheme, _, rest = address.rstrip("/").partition("://")
        raise InvalidArgumentError(
            f"the address begins with {scheme}://, and this client speaks gRPC: write {rest}, for TLS "
            "with https:// before it; the door for HTTP has a port of its own, for the clients of OpenAI and Tinker",
            field="address", rule="HOST:PORT",
        )  # fmt: skip
    elif not _has_port(address):
        raise InvalidArgumentError(
            f"the address {address!r} has no port: write HOST:PORT", field="address", rule="HOST:PORT"
        )
    transport = None
    try:
        if embedded is not None:
            address = await embedded.listening(options.get("start_timeout", 300.0))
        transport = Transport(
            address or "",
            api_key=embedded.key if embedded else api_key or os.environ.get("GRADWIRE_API_KEY"),
            tls=tls,
            patience_s=options.get("reconnect_timeout", 600.0),
            check_alive=embedded.check_alive if embedded else lambda: None,
        )
        answer = await transport.unary(
            lambda stub: stub.GetServerInfo,
            pb.GetServerInfoRequest(),
            timeout_s=connect_timeout,
            patience_s=connect_timeout,
        )
        if answer.protocol > PROTOCOL:
            raise UnsupportedError(
                f"the server speaks protocol {answer.protocol}, this client speaks {PROTOCOL}: upgrade the package "
                "gradwire"
            )
        service = ServiceClient(transport, ServerInfo.from_message(answer), embedded)
        await service.list_losses()
        return service
    except BaseException:
        if transport is not None:
            await transport.close()
        if embedded is not None:
            await embedded.close()
        raise
