"""Shared parts of the commands that speak to a server: options, connection, failures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from gradwire import errors, sync
from gradwire.cli.text import plain

ADDRESS = "127.0.0.1:50051"
CONNECT_S = 3.0

P = ParamSpec("P")


@dataclass(frozen=True)
class Access:
    """Address of a server, and the credentials for it. Each field is an option of the commands at :func:`server`."""

    address: Annotated[str, typer.Option(help="HOST:PORT of a server; https://HOST:PORT for TLS.")] = ADDRESS
    api_key: Annotated[str, typer.Option(envvar="GRADWIRE_API_KEY", help="Key of a server with keys.")] = ""
    ca_cert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file: who signed the server's certificate.")
    ] = None
    client_cert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file with a certificate of yours, for mTLS.")
    ] = None
    client_key: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file with its key.")] = None

    def options(self, patience_s: float = 0.0) -> dict[str, Any]:
        """Arguments of ``connect`` besides the address.

        Args:
            patience_s: Seconds for which calls are repeated while the server is away.
        """
        return {
            "api_key": self.api_key or None, "ca_cert": self.ca_cert, "client_cert": self.client_cert,
            "client_key": self.client_key, "connect_timeout": CONNECT_S, "reconnect_timeout": patience_s,
        }  # fmt: skip


def with_access(command: Callable[Concatenate[Access, P], None]) -> Callable[..., None]:
    """Give a command the options of :class:`Access` after its own; it gets them as its first parameter."""
    connection = inspect.signature(Access, eval_str=True).parameters

    @functools.wraps(command)
    def called(**given: Any) -> None:
        access = Access(**{name: given.pop(name) for name in connection})
        command(access, **given)  # type: ignore[call-arg]  # typer passes what the signature below declares

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *connection.values())]
    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return called


@contextmanager
def told(access: Access) -> Iterator[None]:
    """End the command in one sentence at an error: status 2 if the request or a file here is wrong, else 1."""
    try:
        yield
    except errors.GradwireError as error:
        message = plain(str(error))
        where = "" if access.address in message else f"{access.address}: "
        Console(stderr=True, soft_wrap=True).print(Text(f"gradwire: {where}{message}", "red"))
        raise typer.Exit(2 if isinstance(error, errors.InvalidRequestError) else 1) from None
    except OSError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"gradwire: {error}", "red"))
        raise typer.Exit(2) from None


@contextmanager
def connected(access: Access, patience_s: float = 0.0) -> Iterator[sync.ServiceClient]:
    """Connect to a server; errors within end the command as :func:`told` says.

    Args:
        patience_s: Seconds for which calls are repeated while the server is away.
    """
    with told(access), sync.connect(access.address, **access.options(patience_s)) as service:
        yield service
