"""`gradwire fleet`: engines on the machines of a Ray cluster."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire.cli.service import Access, connected
from gradwire.fleet.plan import Plan, PlanError, read_plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
console = Console(stderr=True, soft_wrap=True)

CONNECT_S = 10.0

Address = Annotated[
    str, typer.Option("--ray", envvar="RAY_ADDRESS", help="HOST:PORT of the cluster's head; that of this machine.")
]


@app.callback()
def main() -> None:
    """Engines for a server, on the machines of a Ray cluster."""


@app.command()
def up(
    plan: Annotated[Path, typer.Argument(help="YAML file with the server and the engines.")],
    ray: Address = "auto",
    engine_key: Annotated[
        str, typer.Option(envvar="GRADWIRE_ENGINE_KEY", help="Made by `gradwire keys create NAME --engine`.")
    ] = "",
) -> None:
    """Start a fleet, or give the one that there is another plan. It stays when this command ends."""
    try:
        wanted = read_plan(plan)
    except PlanError as error:
        raise _refusal(str(error)) from None
    from gradwire.fleet.cluster import start_fleet

    _join(ray)
    start_fleet(wanted, engine_key)
    console.print(f"gradwire: the fleet is for {wanted.front}; see `gradwire fleet status`", markup=False)


@app.command()
def status(ray: Address = "auto") -> None:
    """Show each engine with its node."""
    table = Table("engine", "node", "host", "state", box=None)
    for row in _value(_fleet(ray).status.remote()):
        table.add_row(row["engine"] or "-", row["node"][:12], row["host"], row["state"])
    Console(soft_wrap=True).print(table)


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="A node's id, or the beginning of it, as in `gradwire fleet status`.")],
    ray: Address = "auto",
    undo: Annotated[bool, typer.Option("--undo", help="Instead, let it have engines again.")] = False,
    api_key: Annotated[
        str, typer.Option(envvar="GRADWIRE_API_KEY", help="An admin's key, with which the runs are moved first.")
    ] = "",
    ca_cert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file: who signed the server's certificate.")
    ] = None,
) -> None:
    """Move the runs of a node's engines to others, and have its engines elsewhere, if there is room."""
    fleet = _fleet(ray)
    plan = Plan.model_validate_json(_value(fleet.plan.remote()))
    rows = _value(fleet.status.remote())
    full = _node(node, {row["node"] for row in rows if row["node"]})
    if undo:
        _value(fleet.drain.remote(full, True))
        return
    engines = {row["engine"] for row in rows if row["node"] == full and row["engine"]}
    with connected(Access(plan.front.removeprefix("http://"), api_key, ca_cert)) as service:
        numbers = {each.machine: each.number for each in service.server_info().engines if each.machine in engines}
        for engine, number in numbers.items():
            console.print(f"gradwire: {engine}: {service.drain_engine(number)} runs moved", markup=False)
        _value(fleet.drain.remote(full, False))
        for number in numbers.values():  # the next process of this name is on another node
            service.drain_engine(number, undo=True)
    console.print(f"gradwire: {full[:12]} has no engines any more; take it back with --undo", markup=False)


@app.command()
def down(ray: Address = "auto") -> None:
    """End all engines of the fleet. Their runs go on elsewhere, if the server has other engines."""
    from gradwire.fleet.cluster import end_fleet

    end_fleet(_fleet(ray))


def _node(prefix: str, nodes: set[str]) -> str:
    matching = [node for node in nodes if node.startswith(prefix)]
    if len(matching) != 1:
        known = ", ".join(sorted(node[:12] for node in nodes)) or "none"
        raise _refusal(f"{prefix!r} is {'more than one node' if matching else 'no node with engines'}: {known}")
    return matching[0]


def _join(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers otherwise
    import ray

    if ray.is_initialized():
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, namespace="gradwire", log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        raise _refusal(f"no Ray cluster at {address}: {error}; `ray status` at its head says its address") from error


def _fleet(address: str) -> Any:
    from gradwire.fleet.cluster import fleet

    _join(address)
    known = fleet()
    if known is None:
        raise _refusal("there is no fleet in this cluster: start one with `gradwire fleet up`")
    return known


def _value(reference: Any) -> Any:
    import ray

    return ray.get(reference)


def _refusal(sentence: str) -> typer.Exit:
    console.print(f"gradwire: {sentence}", style="red", markup=False, highlight=False)
    return typer.Exit(2)
