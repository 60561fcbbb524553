"""OpenTelemetry traces of operations. They are optional and need OpenTelemetry to be installed.

The caller's trace context arrives with the operation (``OperationHeader.traceparent``) and is journaled with it, so an
operation that a restart interrupted continues in the same trace. In the front, an operation has one span with a child
span per phase (journal, queue, engine, result); the engine's spans are children of the phase ``engine``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from gradwire_proto.v1 import training_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

CLOSE_S = 2.0
MAX_TRACEPARENT = 55
"""Length in characters of a W3C ``traceparent``, version 00."""


class Trace:
    """The spans of one operation in the front. This base class records nothing.

    Attributes:
        traceparent: Trace context of the current span, for the engine.
    """

    traceparent = ""

    def phase(self, name: str, **about: str | int) -> None:
        """End the current phase and start the next one."""

    def end(self, result: pb.OperationResult | None) -> None:
        """End the operation's spans; ``result`` is None for an operation that is removed without one."""


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
    def traceparent(self) -> str:  # type: ignore[override]  # a constant in the base class
        return _traceparent(self._phase or self._span)

    def phase(self, name: str, **about: str | int) -> None:
        now = time.time_ns()
        if self._phase is not None:
            self._phase.end(now)
        self._phase = self._tracer.start_span(
            f"gradwire.{name}", self._inside, attributes=_attributes(about), start_time=now
        )

    def end(self, result: pb.OperationResult | None) -> None:
        if self._phase is not None:
            self._phase.end()
        if result is not None and result.status != pb.STATUS_SUCCEEDED:
            _fail(self._span, pb.ErrorCode.Name(result.error.code) if result.HasField("error") else "")
        self._span.end()


class Tracing:
    """Factory of the spans of operations.

    Args:
        provider: Exports the spans; None to record nothing.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("gradwire") if provider is not None else None

    @classmethod
    def to(cls, endpoint: str, service: str) -> Tracing:
        """Tracing that exports spans in batches over OTLP/gRPC.

        The standard ``OTEL_*`` environment variables set samplers and headers.

        Raises:
            RuntimeError: OpenTelemetry is not installed.
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
        """Start the span of an operation that was received at Unix time ``began_s``."""
        return _Recorded(self._tracer, header, began_s) if self._tracer is not None else NO_TRACE

    def span(self, name: str, traceparent: str = "", **about: str | int) -> AbstractContextManager[None]:
        """Record a span around a block, as a child of the span of ``traceparent``, or else of the current span."""
        return self._span(name, traceparent, about) if self._tracer is not None else nullcontext()

    def record(self, name: str, traceparent: str, seconds: float, **about: str | int) -> None:
        """Record a span that ends now after ``seconds``, as a child of the span of ``traceparent``."""
        if self._tracer is not None:
            now = time.time_ns()
            context = _context(traceparent) if traceparent else None
            began = now - int(seconds * 1e9)
            self._tracer.start_span(name, context, attributes=_attributes(about), start_time=began).end(now)

    @contextmanager
    def _span(self, name: str, traceparent: str, about: dict[str, str | int]) -> Iterator[None]:
        assert self._tracer is not None
        context = _context(traceparent) if traceparent else None
        with self._tracer.start_as_current_span(
            name, context, attributes=_attributes(about), record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except BaseException as error:
                _fail(span, type(error).__name__)
                raise

    def close(self) -> None:
        """Export the remaining spans; wait at most ``CLOSE_S`` seconds, as the collector may be unreachable."""
        if self._provider is not None:
            sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            sending.start()
            sending.join(CLOSE_S)


def _attributes(about: Mapping[str, str | int]) -> dict[str, Any]:
    return {f"gradwire.{key}": value for key, value in about.items()}


def _fail(span: Span, what: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, what))


def _context(traceparent: str) -> Context:
    """The context of the caller's span; an empty one if ``traceparent`` is invalid."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent[:MAX_TRACEPARENT]}, Context())


def _traceparent(span: Span) -> str:
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    executor: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(executor, set_span_in_context(span))
    return executor.get("traceparent", "")
