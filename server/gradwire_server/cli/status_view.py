"""Snapshots of a server, taken through its public RPCs, and their tables for a terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

SECURE = ("https://", "grpcs://")
CALL_S = 15.0
PAGE = 500


@dataclass(frozen=True)
class Snapshot:
    """State of a server at one moment.

    Attributes:
        at: Monotonic time in seconds.
        info: Version, status and limits.
        models: Its models.
        runs: The runs that the key may read, by run id.
    """

    at: float
    info: pb.ServerInfo
    models: list[pb.ModelInfo]
    runs: dict[str, pb.Run]

    @property
    def working(self) -> bool:
        """Whether a run has operations without a result."""
        return any(run.accepted_seq > run.applied_seq for run in self.runs.values())


class Watcher:
    """A connection to a server that takes snapshots; a context manager.

    Args:
        address: ``HOST:PORT``; ``https://HOST:PORT`` for TLS with gRPC's default root certificates.
        api_key: API key; empty for a server without keys.
        ca_cert, client_cert, client_key: PEM files; any of them enables TLS.
    """

    def __init__(
        self,
        address: str,
        api_key: str = "",
        *,
        ca_cert: Path | None = None,
        client_cert: Path | None = None,
        client_key: Path | None = None,
    ) -> None:
        self._metadata: Any = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        target = address
        for scheme in SECURE:
            target = target.removeprefix(scheme)
        files = [path.read_bytes() if path else None for path in (ca_cert, client_key, client_cert)]
        if target != address or any(files):
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*files))
        else:
            self._channel = grpc.insecure_channel(target)
        self._stub = TrainingServiceStub(self._channel)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def look(self) -> Snapshot:
        """Take a snapshot.

        Raises:
            grpc.RpcError: The server cannot be reached, or refuses the key.
        """
        info = self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=CALL_S, metadata=self._metadata)
        models = self._stub.ListModels(pb.ListModelsRequest(), timeout=CALL_S, metadata=self._metadata).models
        runs, token = dict[str, pb.Run](), ""
        while True:
            request = pb.ListRunsRequest(page_size=PAGE, page_token=token)
            page = self._stub.ListRuns(request, timeout=CALL_S, metadata=self._metadata)
            runs |= {run.run_id: run for run in page.runs}
            token = page.next_page_token
            if not token:
                return Snapshot(time.monotonic(), info, list(models), runs)


def draw(now: Snapshot, before: Snapshot | None = None, *, most: int = 0) -> RenderableType:
    """Render the server, its engine, its models and its runs, those with the most queued operations first.

    Args:
        before: An earlier snapshot, for the rates.
        most: Maximum number of runs shown; 0 for all.
    """
    info, engine = now.info, now.info.engine
    state = Text("ready", "green") if info.engine_ready else Text("not ready", "bold red")
    head = Text.assemble(
        f"gradwire {plain(info.version)} on {plain(info.device)}, engine ", state,
        f", up {duration(info.uptime_s)}, durability {plain(info.durability)}",
    )  # fmt: skip
    parts = [f"busy {engine.busy:.0%}", f"memory {size(engine.memory_bytes)}"]
    if engine.device_memory_total_bytes:
        used, total = engine.device_memory_used_bytes, engine.device_memory_total_bytes
        parts.append(f"device memory {size(used)} of {size(total)}")
    if engine.HasField("device_utilization"):
        parts.append(f"device {engine.device_utilization:.0%}")
    parts += [f"heartbeat {engine.heartbeat_age_s:.1f} s ago", f"{engine.restarts} restarts"]
    queued = sum(waiting(run) for run in now.runs.values())
    parts += [f"{len(now.runs)} runs", f"{queued} operations queued"]
    return Group(head, Text(", ".join(parts)), _models(now.models), _runs(now, before, most))


def _models(models: list[pb.ModelInfo]) -> Table:
    table = Table()
    for column in ("model", "architecture", "parameters", "context", "dtype", "tokenizer"):
        table.add_column(column, overflow="fold")
    for model in models:
        table.add_row(
            Text(plain(model.name)), Text(plain(model.architecture)), f"{model.num_parameters:,}",
            str(model.context_length), plain(model.dtype), "yes" if model.has_tokenizer else "no",
        )  # fmt: skip
    return table


def _runs(now: Snapshot, before: Snapshot | None, most: int) -> Table:
    runs = sorted(now.runs.values(), key=lambda run: (-waiting(run), -run.created_at))
    hidden = len(runs) - most if most else 0
    table = Table(caption=f"and {hidden} more" if hidden > 0 else None)
    for column in ("run", "name", "model"):
        table.add_column(column, overflow="fold")
    for column in ("step", "queue", "done", "ops/s", "steps/s", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("checkpoint", overflow="fold")
    for run in runs[: most or None]:
        earlier = before.runs.get(run.run_id) if before is not None else None
        seconds = now.at - before.at if before is not None else 0.0
        table.add_row(
            Text(plain(run.run_id)), Text(plain(run.config.name)), Text(plain(run.config.base_model)), str(run.step),
            str(waiting(run)), str(run.applied_seq),
            rate(run.applied_seq, earlier and earlier.applied_seq, seconds),
            rate(run.step, earlier and earlier.step, seconds),
            rate(run.num_tokens, earlier and earlier.num_tokens, seconds),
            Text(plain(run.latest_checkpoint.partition("/")[2])),
        )  # fmt: skip
    return table


def waiting(run: pb.Run) -> int:
    """Number of operations of a run without a result."""
    return max(run.accepted_seq - run.applied_seq, 0)


def rate(now: int, before: int | None, seconds: float) -> str:
    """Format the rate per second between two snapshots: "-" without an earlier one, 0 for a count that fell."""
    if before is None or seconds <= 0:
        return "-"
    per_second = max(now - before, 0) / seconds
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def size(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def duration(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def plain(text: str) -> str:
    """Replace the characters of a foreign text that are not printable, such as terminal escapes, with "·"."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)
