"""OpenTelemetry traces of operations, for those who ask for them; without OpenTelemetry installed, nothing.

The caller's trace context comes with the operation (``OperationHeader.traceparent``) and is journaled with it, so
that an operation that a restart interrupted goes on in the trace it began in. In the front an operation has one
span, with a child for each phase (journal, queue, engine, result); the engine's own spans are children of the
phase ``engine``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from gradwire_proto.v1 import training_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

CLOSE_S = 2.0
MAX_TRACEPARENT = 55
"""Characters of a W3C trace context, version 00."""


class Trace:
    """The spans of one operation in the front. This one records nothing."""

    traceparent = ""

    def phase(self, name: str) -> None:
        """Ends the phase that was going on, and begins this one."""

    def end(self, result: pb.OperationResult | None) -> None:
        """Ends the operation; None when it has no result and shall have none here."""


NO_TRACE = Trace()


class _Recorded(Trace):
    def __init__(self, tracer: Tracer, header: pb.OperationHeader, began_s: float) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        kind = header.operation.WhichOneof("kind") or "unknown"
        attributes: Any = {"gradwire.run": header.run_id, "gradwire.seq": header.seq, "gradwire.kind": kind}
        self._span = tracer.start_span(
            f"gradwire.{kind}", _context(header.traceparent), attributes=attributes, start_time=int(began_s * 1e9)
        )
        self._inside = set_span_in_context(self._span)
        self._phase: Span | None = None

    @property
    def traceparent(self) -> str:  # type: ignore[override]  # a constant of the one that records nothing
        return _traceparent(self._phase or self._span)

    def phase(self, name: str) -> None:
        now = time.time_ns()
        if self._phase is not None:
            self._phase.end(now)
        self._phase = self._tracer.start_span(f"gradwire.{name}", self._inside, start_time=now)

    def end(self, result: pb.OperationResult | None) -> None:
        if self._phase is not None:
            self._phase.end()
        if result is not None and result.status != pb.STATUS_SUCCEEDED:
            _fail(self._span, pb.ErrorCode.Name(result.error.code) if result.HasField("error") else "")
        self._span.end()


class Tracing:
    """Makes spans.

    Args:
        provider: where they go; None makes none.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("gradwire") if provider is not None else None

    @classmethod
    def to(cls, endpoint: str, service: str) -> Tracing:
        """Sends spans in batches over OTLP/gRPC. The standard ``OTEL_*`` variables set samplers and headers.

        Raises:
            RuntimeError: when OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise RuntimeError(f"traces need OpenTelemetry ({error.name} is missing): gradwire[otel]") from error
        provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def operation(self, header: pb.OperationHeader, began_s: float) -> Trace:
        """The spans of an operation that was received at this Unix time."""
        return _Recorded(self._tracer, header, began_s) if self._tracer is not None else NO_TRACE

    def span(self, name: str, traceparent: str = "", **about: str | int) -> AbstractContextManager[None]:
        """A span around a block, inside the one that ``traceparent`` names, or else the block around this one."""
        return self._span(name, traceparent, about) if self._tracer is not None else nullcontext()

    def record(self, name: str, traceparent: str, seconds: float, **about: str | int) -> None:
        """A span that ends now and began so long ago, inside the one that ``traceparent`` names."""
        if self._tracer is not None:
            now = time.time_ns()
            attributes: Any = {f"gradwire.{key}": value for key, value in about.items()}
            context = _context(traceparent) if traceparent else None
            began = now - int(seconds * 1e9)
            self._tracer.start_span(name, context, attributes=attributes, start_time=began).end(now)

    @contextmanager
    def _span(self, name: str, traceparent: str, about: dict[str, str | int]) -> Iterator[None]:
        assert self._tracer is not None
        attributes: Any = {f"gradwire.{key}": value for key, value in about.items()}
        context = _context(traceparent) if traceparent else None
        with self._tracer.start_as_current_span(
            name, context, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except BaseException as error:
                _fail(span, type(error).__name__)
                raise

    def close(self) -> None:
        """Sends what is left, for a moment at most: a collector that is away does not keep a process from ending."""
        if self._provider is not None:
            sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            sending.start()
            sending.join(CLOSE_S)


def _fail(span: Span, what: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, what))


def _context(traceparent: str) -> Context:
    """Of the caller's span; of none when what came is not one."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent[:MAX_TRACEPARENT]}, Context())


def _traceparent(span: Span) -> str:
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    executor: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(executor, set_span_in_context(span))
    return executor.get("traceparent", "")
