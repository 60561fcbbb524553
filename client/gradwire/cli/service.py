"""Shared parts of the commands that speak to a server: options, connection, failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from gradwire import errors, sync
from gradwire.cli.text import plain

ADDRESS = "127.0.0.1:50051"
CONNECT_S = 3.0

Address = Annotated[str, typer.Option("--address", help="HOST:PORT of a server; https://HOST:PORT for TLS.")]
ApiKey = Annotated[str, typer.Option(envvar="GRADWIRE_API_KEY", help="Key of a server with keys.")]
CaCert = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file: who signed the server's certificate.")
]
ClientCert = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file with a certificate of yours, for mTLS.")
]
ClientKey = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file with its key.")]


@dataclass(frozen=True)
class Access:
    """Address of a server, and the credentials for it."""

    address: str
    api_key: str = ""
    ca_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None


@contextmanager
def connected(access: Access) -> Iterator[sync.ServiceClient]:
    """Connect to a server. An error within ends the command in one sentence: status 2 if the request is wrong, else 1.

    A call is not repeated while the server is away.
    """
    try:
        with sync.connect(
            access.address,
            api_key=access.api_key or None,
            ca_cert=access.ca_cert,
            client_cert=access.client_cert,
            client_key=access.client_key,
            connect_timeout=CONNECT_S,
            reconnect_timeout=0.0,
        ) as service:
            yield service
    except errors.GradwireError as error:
        message = plain(str(error))
        where = "" if access.address in message else f"{access.address}: "
        Console(stderr=True, soft_wrap=True).print(Text(f"gradwire: {where}{message}", "red"))
        raise typer.Exit(2 if isinstance(error, errors.InvalidRequestError) else 1) from None
