"""Metric loggers: JSONL, TensorBoard, Weights & Biases, Trackio and Prometheus."""

from __future__ import annotations

import json
import math
import re
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gradwire.extras import require
from gradwire.whole_files import whole_file


class MetricLogger(Protocol):
    """Records the metrics of each iteration."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class CheckpointLogger(Protocol):
    """A logger that is told of checkpoints as well."""

    def saved(self, iteration: int, path: str) -> None: ...


@runtime_checkable
class RewindingLogger(Protocol):
    """A logger that forgets this iteration and those behind it, which a resumed training logs again."""

    def forget(self, iteration: int) -> None: ...


@runtime_checkable
class StoppingLogger(Protocol):
    """A logger that ends the training once ``stop_wanted`` is true."""

    stop_wanted: bool


class JsonlLogger:
    """Writes one JSON object per line: ``iteration``, ``time`` (Unix) and the metrics; non-finite numbers become null.

    Args:
        path: The file; created with its folder at the first line, and appended to.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, "time": time.time(), **finite}) + "\n")

    def forget(self, iteration: int) -> None:
        """Remove the lines from this iteration on, which a resumed training writes again, and an incomplete line."""
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["iteration"] < iteration]
            with whole_file(self.path) as whole:
                whole.write("".join(kept).encode())

    def close(self) -> None:
        """Do nothing: each line is already written."""


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file; an incomplete last line is skipped."""
    lines = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


class TensorBoardLogger:
    """Logs scalars to TensorBoard; needs ``tensorboard``, not torch."""

    def __init__(self, folder: Path | str) -> None:
        self._writer = require("tensorboard.summary", "tensorboard", "TensorBoardLogger").Writer(str(folder))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _RunLogger:
    """Base of the loggers with wandb's interface: wandb and trackio."""

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        self._module = module
        module.init(**options)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._module.finish()


class WandbLogger(_RunLogger):
    """Logs to Weights & Biases; the options are those of ``wandb.init``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(require("wandb", "wandb", "WandbLogger"), options)


class TrackioLogger(_RunLogger):
    """Logs to Trackio; the options are those of ``trackio.init``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(require("trackio", "trackio", "TrackioLogger"), options)


class MlflowLogger:
    """Logs to MLflow; the options are those of ``mlflow.start_run``. Characters that it does not allow become ``_``."""

    def __init__(self, **options: Any) -> None:
        self._mlflow = require("mlflow", "mlflow", "MlflowLogger")
        self._mlflow.start_run(**options)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(allowed, step=iteration)

    def close(self) -> None:
        self._mlflow.end_run()


class PrometheusLogger:
    """Exposes the last iteration's metrics, and ``iteration`` itself, as gauges of ``prometheus_client``.

    Characters that Prometheus does not allow in names become ``_``. Names that another part of the program has
    registered are skipped.

    Args:
        port: Serve ``/metrics`` on this port until :meth:`close`; None serves nothing (a server already runs).
        address: Address to listen on, with ``port``.
        registry: Registry of the gauges; by default prometheus_client's default registry.
    """

    def __init__(self, port: int | None = None, *, address: str = "127.0.0.1", registry: Any = None) -> None:
        self._client = require("prometheus_client", "prometheus", "PrometheusLogger")
        self._registry = self._client.REGISTRY if registry is None else registry
        self._gauges: dict[str, Any] = _GAUGES.setdefault(self._registry, {})
        self._server: tuple[Any, Any] | None = None
        if port is not None:
            self._server = self._client.start_http_server(port, addr=address, registry=self._registry)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"iteration": float(iteration), **metrics}.items():
            gauge = self._gauge(re.sub(r"[^a-zA-Z0-9_:]|^(?=\d)", "_", name), name)
            if gauge is not None:
                gauge.set(value)

    def _gauge(self, name: str, metric: str) -> Any:
        if name not in self._gauges:
            try:
                self._gauges[name] = self._client.Gauge(name, f"{metric} of the training", registry=self._registry)
            except ValueError:  # name already registered elsewhere
                self._gauges[name] = None
        return self._gauges[name]

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None


_GAUGES: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()  # one set of gauges per registry
