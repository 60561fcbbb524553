"""``gradwire status`` and ``gradwire top``: show what a server is doing, once or continuously."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import grpc
import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gradwire_server.cli.status_view import Snapshot, Watcher, draw, plain

Address = Annotated[str, typer.Argument(help="HOST:PORT of a server; https://HOST:PORT for TLS.")]
ApiKey = Annotated[str, typer.Option(envvar="GRADWIRE_API_KEY", help="Key of a server with keys.")]
CaCert = Annotated[Path | None, typer.Option(help="PEM file: who signed the server's certificate.")]
ClientCert = Annotated[Path | None, typer.Option(help="PEM file with a certificate of yours, for mTLS.")]
ClientKey = Annotated[Path | None, typer.Option(help="PEM file with its key.")]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks, from which the rates are taken.")]
ADDRESS = "127.0.0.1:50051"


def status(
    address: Address = ADDRESS,
    api_key: ApiKey = "",
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    interval: Interval = 1.0,
) -> None:
    """Show what a server holds, what your runs are doing, and its limits."""
    with _watcher(address, api_key, ca_cert, client_cert, client_key) as watcher:
        try:
            before, now = None, watcher.look()
            if now.working:
                time.sleep(interval)
                before, now = now, watcher.look()
        except grpc.RpcError as error:
            _fail(address, error)
    out = Console(soft_wrap=not Console().is_terminal)
    out.print(draw(now, before))
    limits = ", ".join(f"{name}={value}" for name, value in sorted(now.info.limits.items()))
    out.print(Text(f"limits: {plain(limits)}"))


def top(
    address: Address = ADDRESS,
    api_key: ApiKey = "",
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    interval: Interval = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
) -> None:
    """Show what a server and your runs are doing, until you press Ctrl-C."""
    console = Console()
    with _watcher(address, api_key, ca_cert, client_cert, client_key) as watcher:
        try:
            before = watcher.look()
            if once:
                time.sleep(interval)
                console.print(draw(watcher.look(), before))
                return
        except grpc.RpcError as error:
            _fail(address, error)
        _watch(console, watcher, before, interval)


def _watch(console: Console, watcher: Watcher, before: Snapshot, interval: float) -> None:
    def picture(now: Snapshot) -> RenderableType:
        return draw(now, before, most=max(console.height - 14, 3))

    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            live.update(picture(before), refresh=True)
            while True:
                time.sleep(interval)
                try:
                    now = watcher.look()
                except grpc.RpcError as error:  # the server may be restarting
                    live.update(Text(f"{plain(_reason(error))}; trying again", "red"), refresh=True)
                    continue
                live.update(picture(now), refresh=True)
                before = now
        except KeyboardInterrupt:
            return


def _watcher(
    address: str, api_key: str, ca_cert: Path | None, client_cert: Path | None, client_key: Path | None
) -> Watcher:
    try:
        return Watcher(address, api_key, ca_cert=ca_cert, client_cert=client_cert, client_key=client_key)
    except OSError as error:
        Console(stderr=True).print(Text(f"gradwire: {error.filename} cannot be read: {error.strerror}", "red"))
        raise typer.Exit(1) from None


def _reason(error: grpc.RpcError) -> str:
    return error.details() or "no answer" if isinstance(error, grpc.Call) else "no answer"


def _fail(address: str, error: grpc.RpcError) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(Text(f"gradwire: {address}: {plain(_reason(error))}", "red"))
    raise typer.Exit(1)
