"""`gradwire engine`: lends an engine of this machine to a server on another one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gradwire_server.cli.event_loop import loop_factory
from gradwire_server.cli.parent import outlived
from gradwire_server.cli.saying import fail, say
from gradwire_server.config import parse_model
from gradwire_server.observability import logs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@app.command()
def engine(
    front: Annotated[str, typer.Option(help="https://HOST:PORT of the server's gRPC; http:// on this machine.")],
    key: Annotated[
        str, typer.Option(envvar="GRADWIRE_API_KEY", help="Made by `gradwire keys create NAME --engine`.")
    ] = "",
    name: Annotated[str, typer.Option(help="What the server calls this engine; the host name when absent.")] = "",
    ca_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the authority that signed the server's certificate.")
    ] = None,
    client_cert: Annotated[Path | None, typer.Option(help="PEM file with a certificate of this machine.")] = None,
    client_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="One of the server's models to serve, NAME or NAME=FOLDER here; all when absent. Repeat."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="As for `gradwire serve`, like the following.")] = None,
    ranks: Annotated[str | None, typer.Option()] = None,
    shard: Annotated[str | None, typer.Option()] = None,
    threads: Annotated[int | None, typer.Option()] = None,
    run_memory: Annotated[str | None, typer.Option()] = None,
    run_host_memory: Annotated[str | None, typer.Option()] = None,
    sampling_cache: Annotated[str | None, typer.Option()] = None,
    reference_cache_gib: Annotated[float | None, typer.Option()] = None,
    activation_budget_gib: Annotated[float | None, typer.Option()] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of this machine for what leaves memory and what was read from the server's --store;"
            " ~/.cache/gradwire/NAME when absent."
        ),
    ] = None,
    die_with_parent: Annotated[bool, typer.Option(help="Stop when the process that started this one ends.")] = False,
    log_level: Annotated[LogLevel, typer.Option()] = "warning",
    log_format: Annotated[LogFormat, typer.Option()] = "text",
) -> None:
    """Lend an engine of this machine to a server: it gets runs like the server's own engines.

    Both machines need the same version of gradwire, and a place for checkpoints: the server's --store, or its state
    folder at the same path, as on a network file system. The base models are this machine's own. The engine starts
    again by itself. When the server is out of reach it ends, and its runs go on elsewhere.
    """
    own = {
        "models": {name: path if "=" in text else "" for text in model or [] for name, path in [parse_model(text)]},
        "device": device, "ranks": ranks, "shard": shard, "threads": threads, "run_memory": run_memory,
        "run_host_memory": run_host_memory, "sampling_cache": sampling_cache,
        "reference_cache_gib": reference_cache_gib, "activation_budget_gib": activation_budget_gib,
        "log_level": log_level, "log_format": log_format,
    }  # fmt: skip
    loops = loop_factory()
    from gradwire_server.agent.front import Front

    os.umask(0o077)
    logs.configure(log_level, log_format, "agent")
    try:
        reached = Front(front, key, ca_cert, client_cert, client_key)
    except ValueError as error:
        fail(str(error))
    given = {setting: value for setting, value in own.items() if value not in (None, {})}
    parent = os.getppid() if die_with_parent else None
    with asyncio.Runner(loop_factory=loops) as runner:
        refusal = runner.run(_run(reached, name or socket.gethostname(), given, state_dir, parent))
    if refusal:
        fail(refusal)


async def _run(front: Any, name: str, own: dict[str, Any], folder: Path | None, parent: int | None) -> str:
    """Run the agent until a signal; returns why it ended by itself."""
    from gradwire_server.agent.agent import Agent
    from gradwire_server.errors import ServiceError

    try:
        folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / name
    except RuntimeError:
        return "there is no home folder for the engine's files; name one by --state-dir"
    running = asyncio.ensure_future(Agent(front, name, own, folder).run())
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(each, running.cancel)
    watching = asyncio.ensure_future(outlived(parent)) if parent else None
    if watching is not None:
        watching.add_done_callback(lambda _: running.cancel())
    say(f"the engine {name} is for {front.address}")
    try:
        await running
    except asyncio.CancelledError:
        return ""
    except (ServiceError, OSError) as error:
        return str(error)
    return ""
