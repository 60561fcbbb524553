"""`gradwire console`: serve the console of a server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import gradwire
import typer
import uvicorn
from gradwire_http.heads import BoundedHeads
from gradwire_shell.serving import HttpServer, listen, url_of
from rich.console import Console

from gradwire_console import alerts
from gradwire_console.feedback import Feedback

if TYPE_CHECKING:
    from gradwire_console.workspace import Server

app = typer.Typer(help="See and steer a server's trainings in a browser.", add_completion=False)
console = Console(stderr=True, soft_wrap=True)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
GRACE_S = 2
PARENT_CHECK_S = 0.5


@app.command()
def serve(
    server: Annotated[str, typer.Argument(help="HOST:PORT of the gradwire server.")] = "127.0.0.1:50051",
    address: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 picks a free one.")] = "127.0.0.1:8080",
    ca_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the authority that signed the server's certificate.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show, and change nothing.")] = False,
    sign_in: Annotated[
        bool, typer.Option("--sign-in", help="Ask for a key of the server also on this machine.")
    ] = False,
    feedback: Annotated[
        str,
        typer.Option(
            help="Address of a feedback service: the playground hands it answers to rate, pages show the ratings. Its"
            " key, of the role read, is taken from GRADWIRE_FEEDBACK_KEY."
        ),
    ] = "",
    webhook: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Where alerts on runs are posted as JSON, such as a chat's; of the key in GRADWIRE_API_KEY.",
        ),
    ] = "",
    host_name: Annotated[
        list[str] | None,
        typer.Option(help="A further name by which a console without sign-in is asked, as behind a proxy; repeat."),
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path under which a proxy shows the console, such as /console.")] = "",
    parent_pid: Annotated[int | None, typer.Option(help="Stop when this is no longer the parent process.")] = None,
) -> None:
    """Serve the console.

    On this machine it acts with the key in GRADWIRE_API_KEY, or with none if the server asks for none. Elsewhere, and
    with --sign-in, each browser signs in with a key of the server.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65_535:
        _fail(f"--address {address!r} is not HOST:PORT")
    host = host.strip("[]") or "0.0.0.0"
    try:
        beside = Feedback(feedback, os.environ.get("GRADWIRE_FEEDBACK_KEY", "")) if feedback else None
        webhook = webhook and alerts.checked(webhook)
    except ValueError as wrong:
        _fail(str(wrong))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with tempfile.TemporaryDirectory(prefix="gradwire-console-") as folder:
        os.environ["NICEGUI_STORAGE_PATH"] = folder  # read at the import
        try:
            names = (host, *(host_name or ()))
            asyncio.run(
                _serve(server, names, int(port), ca_cert, read_only, sign_in, beside, webhook, root_path, parent_pid)
            )
        except (gradwire.GradwireError, OSError) as error:
            _fail(str(error))


async def _serve(
    address: str,
    names: Sequence[str],
    port: int,
    ca_cert: Path | None,
    read_only: bool,
    sign_in: bool,
    feedback: Feedback | None,
    webhook: str,
    root_path: str,
    parent_pid: int | None,
) -> None:
    from gradwire_console.application import create_application
    from gradwire_console.workspace import Server, Workspaces

    server, host = Server(address, ca_cert), names[0]
    key: str | None = os.environ.get("GRADWIRE_API_KEY", "")
    if sign_in or host not in LOOPBACK or not await _is_taken(server, key or "", parent_pid):
        key = None
    if key is None and not sign_in and host not in LOOPBACK and await _is_taken(server, "", parent_pid):
        _fail(f"{host} is reachable from other machines, but the server asks for no key: listen on 127.0.0.1")
    workspaces = Workspaces(server, key, read_only, feedback)
    listener = listen(host, port)
    http = HttpServer(
        uvicorn.Config(
            create_application(workspaces, names),
            http=BoundedHeads,
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            root_path=root_path,
        )
    )
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, setattr, http, "should_exit", True)
    tasks = [asyncio.create_task(_stop_with(parent_pid, http))] if parent_pid else []
    if webhook:
        await _is_taken(server, os.environ.get("GRADWIRE_API_KEY", ""), parent_pid)
        followed = await workspaces.of_key(os.environ.get("GRADWIRE_API_KEY", ""))
        tasks.append(asyncio.create_task(alerts.Alerts(followed, webhook, url_of(listener) + root_path).run()))
    print(f"gradwire console: listening on {url_of(listener)}", flush=True)
    await http.serve(sockets=[listener])
    for task in tasks:
        task.cancel()


async def _is_taken(server: Server, key: str, parent_pid: int | None) -> bool:
    """Whether the server takes a key; waits for the server where it is not there yet."""
    waits = False
    while parent_pid in (None, os.getppid()):
        try:
            await (await server.connect(key)).close()
        except gradwire.UnauthenticatedError:
            return False
        except gradwire.ConnectionLostError as error:
            if not waits:
                console.print(f"gradwire console: waiting for the server: {error}", markup=False)
            waits = True
        else:
            return True
    raise typer.Exit(0)


async def _stop_with(parent_pid: int, http: uvicorn.Server) -> None:
    while os.getppid() == parent_pid:  # noqa: ASYNC110  nobody sets an event when a process ends
        await asyncio.sleep(PARENT_CHECK_S)
    http.should_exit = True


def _fail(message: str) -> None:
    console.print(f"gradwire: {message}", style="red", markup=False)
    raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """`gradwire console …`."""
    app(arguments, prog_name="gradwire console")


if __name__ == "__main__":
    main()
