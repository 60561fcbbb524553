"""`gradwire serve`: holds models and serves training runs until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from gradwire_server.config import Limits, ServerConfig, parse_model
from gradwire_server.engine_link.vitals import STALE_S
from gradwire_server.observability import logs

if TYPE_CHECKING:
    from gradwire_server.server import Server

console = Console(stderr=True, soft_wrap=True)

PARENT_CHECK_S = 0.5


class Durability(StrEnum):
    """The choices of --durability."""

    JOURNAL = "journal"
    CHECKPOINT = "checkpoint"


class Sampler(StrEnum):
    """The choices of --sampler."""

    LOCAL = "local"
    VLLM = "vllm"


class GroupRuns(StrEnum):
    """The choices of --group-runs."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogLevel(StrEnum):
    """The choices of --log-level."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The choices of --log-format."""

    TEXT = "text"
    JSON = "json"


def serve(
    model: Annotated[list[str], typer.Option(help="Hugging Face name, folder, or NAME=FOLDER; repeat for more.")],
    allow_model: Annotated[
        list[str] | None, typer.Option(help="One that is read when a client first names it; as --model; repeat.")
    ] = None,
    state_dir: Annotated[Path, typer.Option(help="Where runs, checkpoints and the journal live.")] = Path(
        "gradwire-state"
    ),
    address: Annotated[str, typer.Option(help="HOST:PORT; port 0 picks a free one.")] = "127.0.0.1:50051",
    losses: Annotated[
        list[Path] | None, typer.Option(help="A Python file that registers losses; repeat for more.")
    ] = None,
    durability: Annotated[
        Durability, typer.Option(help="journal: replay after a crash. checkpoint: go back to the last one.")
    ] = Durability.JOURNAL,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; the best there is when absent.")] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="float32; bfloat16, trained with float32 masters, as on a GPU when absent; mixed: bfloat16 arithmetic "
            "over float32 weights."
        ),
    ] = "",
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile the models' layers: minutes at first, faster steps then.")
    ] = False,
    sampler: Annotated[
        Sampler, typer.Option(help="What generates: the engine itself, or vLLM for LoRA runs (gradwire[vllm], a GPU).")
    ] = Sampler.LOCAL,
    group_runs: Annotated[
        GroupRuns, typer.Option(help="Small batches of several LoRA runs on one base at once; auto: on a GPU.")
    ] = GroupRuns.AUTO,
    microbatch_tokens: Annotated[int | None, typer.Option(help="Tokens of one micro-batch.")] = None,
    activation_budget_gib: Annotated[float | None, typer.Option(help="Memory for kept graphs.")] = None,
    reference_cache_gib: Annotated[float | None, typer.Option(help="Memory for reference models.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine.")] = None,
    checkpoint_every_steps: Annotated[
        int, typer.Option(help="Optimizer steps after which the server saves a run by itself; 0 for never.")
    ] = 100,
    checkpoint_every_mib: Annotated[
        float, typer.Option(help="And MiB of submitted batches after which it does, whichever comes first.")
    ] = 1024.0,
    keep_results_hours: Annotated[float, typer.Option(help="How long a result waits to be fetched.")] = 168.0,
    grace: Annotated[float, typer.Option(help="Seconds that a shutdown waits for the operation that runs.")] = 20.0,
    limit: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a limit (see `gradwire status`); repeat.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with the certificate; speaks TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file; only clients whose certificate it signed may connect.")
    ] = None,
    insecure_bind: Annotated[bool, typer.Option(help="Listen beyond loopback without keys.")] = False,
    ready_file: Annotated[Path | None, typer.Option(help="Gets the address once the server listens.")] = None,
    die_with_parent: Annotated[bool, typer.Option(help="Stop when the process that started this one ends.")] = False,
    parent_pid: Annotated[int | None, typer.Option(help="Stop when this is no longer the parent process.")] = None,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which the engine is not ready (grpc.health.v1).")
    ] = STALE_S,
    metrics_address: Annotated[
        str, typer.Option(help="HOST:PORT of Prometheus metrics; a PORT alone is on loopback; off when absent.")
    ] = "",
    metrics_runs: Annotated[
        bool, typer.Option("--metrics-runs", help="Label the metrics of training with the run, for 100 runs at most.")
    ] = False,
    traces: Annotated[str, typer.Option(help="OTLP/gRPC endpoint of OpenTelemetry traces; off when absent.")] = "",
    log_level: Annotated[LogLevel, typer.Option(help="info has a line an operation.")] = LogLevel.WARNING,
    log_format: Annotated[LogFormat, typer.Option(help="json: an object a line.")] = LogFormat.TEXT,
) -> None:
    """Holds models and serves training runs."""
    try:
        config = ServerConfig(
            address=address, state_dir=state_dir.expanduser().resolve(), models=dict(map(parse_model, model)),
            allowed_models=dict(map(parse_model, allow_model or ())),
            losses=tuple(path.expanduser().resolve() for path in losses or ()), durability=durability.value,
            device=device, dtype=dtype,  # type: ignore[arg-type]  # checked by the model
            compile=compile, sampler=sampler.value, group_runs=group_runs.value, microbatch_tokens=microbatch_tokens,
            activation_budget_gib=activation_budget_gib, reference_cache_gib=reference_cache_gib, threads=threads,
            grace_s=grace, checkpoint_every_steps=checkpoint_every_steps,
            checkpoint_every_bytes=int(checkpoint_every_mib * (1 << 20)),
            result_retention_s=keep_results_hours * 3600,
            tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca,
            metrics_address=metrics_address, metrics_runs=metrics_runs, traces=traces,
            log_level=log_level.value, log_format=log_format.value, heartbeat_stale_s=heartbeat_timeout,
            insecure_bind=insecure_bind, limits=Limits.model_validate(dict(map(_limit, limit or ()))),
        )  # fmt: skip
    except ValidationError as error:
        for problem in error.errors():
            console.print(
                f"gradwire: {'.'.join(map(str, problem['loc']))}: {problem['msg']}", style="red", markup=False
            )
        raise typer.Exit(2) from None
    os.umask(0o077)  # weights, batches and keys of a state folder are for the server's own user
    logs.configure(log_level.value, log_format.value, "front")
    parent = parent_pid or (os.getppid() if die_with_parent else None)
    raise typer.Exit(asyncio.run(_serve(config, ready_file, parent)))


def _limit(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.replace("-", "_"), value


async def _serve(config: ServerConfig, ready_file: Path | None, parent: int | None) -> int:
    from gradwire_server.errors import ServiceError
    from gradwire_server.server import Server, start_failure

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    watcher = loop.create_task(_watch_parent(parent, stop)) if parent else None
    server = Server(config)
    starting, stopped = loop.create_task(server.start()), loop.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _announce(server, ready_file)
            await stopped
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    except ServiceError as error:
        console.print(start_failure(error), style="red", markup=False)
        return 1
    finally:
        await server.stop()
        for task in (watcher, stopped):
            if task is not None:
                task.cancel()
    for run_id, count in server.core.left.items():
        console.print(
            f"gradwire: stopped; {count} acknowledged operations of {run_id} go on at the next start", markup=False
        )
    return 0


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    """PR_SET_PDEATHSIG fires when the parent's *thread* ends, which an SDK's may do early; so the pid is watched."""
    while os.getppid() == parent:  # noqa: ASYNC110  nobody sets an event when a process ends
        await asyncio.sleep(PARENT_CHECK_S)
    stop.set()


def _announce(server: Server, ready_file: Path | None) -> None:
    table = Table(title=f"gradwire on {server.core.engine.hello.device}", title_justify="left")
    for column in ("model", "architecture", "parameters", "context", "dtype", "tokenizer"):
        table.add_column(column)
    for model in server.core.engine.hello.models:
        table.add_row(
            model.name, model.architecture, f"{model.num_parameters:,}", str(model.context_length), model.dtype,
            "yes" if model.has_tokenizer else "no",
        )  # fmt: skip
    console.print(table)
    config = server.config
    console.print(
        f"{len(server.core.engine.hello.losses)} losses, {server.core.runs.count} runs in {config.state_dir}",
        markup=False,
    )
    if server.core.keys.required and not config.loopback and config.tls_cert is None:
        console.print("API keys travel in the clear: give --tls-cert and --tls-key, or put a proxy with TLS before it")
    if not server.core.keys.required:
        console.print("no API keys: " + ("loopback only" if config.loopback else "anyone who reaches it may use it"))
    if server.metrics_address:
        console.print(f"metrics: http://{server.metrics_address}/metrics", markup=False)
    print(f"gradwire: listening on {server.address}", flush=True)
    if ready_file is not None:
        partial = ready_file.with_name(ready_file.name + ".partial")
        partial.write_text(server.address + "\n")
        partial.rename(ready_file)
