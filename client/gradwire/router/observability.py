"""Reporting of a training: a log of events, metrics and traces. Each is off unless the settings enable it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gradwire.extras import require
from gradwire.loop.loggers import MetricLogger, TensorBoardLogger, WandbLogger
from gradwire.router.settings import Logging, Metrics, Observability, Tracing

LOOPBACK = "127.0.0.1"


class EventLog:
    """Writes one JSON object per line: ``time``, ``event`` and its data.

    Args:
        settings: Whether to write, and to which file.
    """

    def __init__(self, settings: Logging) -> None:
        self._path = Path(settings.destination) if settings.enabled else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **facts: Any) -> None:
        if self._path is not None:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": stamp, "event": event, **facts}) + "\n")


class PrometheusLogger:
    """Serves gauges ``gradwire_router_*`` of the last update on a local HTTP port while the training runs.

    HICRA's own gauges and counter are served as well.

    Args:
        port: Port on 127.0.0.1; 0 takes a free one.

    Attributes:
        address: ``http://HOST:PORT/metrics``.
    """

    def __init__(self, port: int) -> None:
        self._client = require("prometheus_client", "prometheus", "observability.metrics.backend: prometheus")
        try:
            self._server, self._thread = self._client.start_http_server(port, addr=LOOPBACK)
        except OSError as error:
            raise ValueError(f"cannot listen on observability.metrics.port {port}: {error.strerror}") from None
        self.address = f"http://{LOOPBACK}:{self._server.server_port}/metrics"
        self._gauges: dict[str, Any] = {}

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("hicra_"):
                continue  # the assigner registers these in the same registry itself
            if name not in self._gauges:
                self._gauges[name] = self._client.Gauge(f"gradwire_router_{name}", f"{name} of the last update")
            self._gauges[name].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for gauge in self._gauges.values():
            self._client.REGISTRY.unregister(gauge)


def metric_logger(settings: Metrics) -> MetricLogger | None:
    """Create the backend that the settings name; None for ``none``.

    Raises:
        ImportError: Its package is missing; names what to install.
    """
    if settings.backend == "wandb":
        return WandbLogger(project=settings.project, entity=settings.entity, tags=settings.tags)
    if settings.backend == "tensorboard":
        return TensorBoardLogger(settings.directory)
    if settings.backend == "prometheus":
        return PrometheusLogger(settings.port)
    return None


class Tracer:
    """Sends spans to an OTLP endpoint through its own provider; the program's tracing is unaffected.

    Args:
        settings: Whether to send, and to which endpoint.
    """

    def __init__(self, settings: Tracing) -> None:
        self._provider: Any = None
        if settings.enabled:
            why = "observability.tracing"
            sdk = require("opentelemetry.sdk.trace", "otel", why)
            export = require("opentelemetry.sdk.trace.export", "otel", why)
            otlp = require("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "otel", why)
            resource = require("opentelemetry.sdk.resources", "otel", why).Resource
            self._provider = sdk.TracerProvider(resource=resource.create({"service.name": "gradwire-router"}))
            exporter = otlp.OTLPSpanExporter(
                endpoint=settings.endpoint, insecure=not settings.endpoint.startswith("https")
            )
            self._provider.add_span_processor(export.BatchSpanProcessor(exporter))

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Open a span around the block; does nothing if tracing is off."""
        if self._provider is None:
            yield
            return
        tracer = self._provider.get_tracer("gradwire.router")
        with tracer.start_as_current_span(f"gradwire.router.{name}", attributes=attributes):
            yield

    def close(self) -> None:
        """Flush and close."""
        if self._provider is not None:
            self._provider.shutdown()


class Telling:
    """Log, metrics and traces of one training.

    Args:
        settings: Enable each of them.

    Attributes:
        events, tracer: Always set; they do nothing if disabled.
        notes: The enabled ones, as sentences for the console.
    """

    def __init__(self, settings: Observability) -> None:
        self._closing = ExitStack()
        self.notes: list[str] = []
        self.events = EventLog(settings.logging)
        if settings.logging.enabled:
            self.notes.append(f"events are logged to {settings.logging.destination}")
        self.tracer = Tracer(settings.tracing)
        self._closing.callback(self.tracer.close)
        if settings.tracing.enabled:
            self.notes.append(f"traces are sent to {settings.tracing.endpoint}")
        self._metrics = metric_logger(settings.metrics)
        if self._metrics is not None:
            self._closing.callback(self._metrics.close)
            address = getattr(self._metrics, "address", None) or {
                "wandb": f"the project {settings.metrics.project}",
                "tensorboard": settings.metrics.directory,
            }.get(settings.metrics.backend)
            self.notes.append(f"metrics go to {settings.metrics.backend}: {address}")

    def figures(self, update: int, figures: Mapping[str, float | None]) -> None:
        """Report the metrics of an update to the log and the metrics backend; missing ones are left out."""
        self.events.write("update", **figures)
        if self._metrics is not None:
            self._metrics.log(update, {name: value for name, value in figures.items() if value is not None})

    def close(self) -> None:
        self._closing.close()
