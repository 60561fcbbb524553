"""Trace spans of operations from the call to the result, if OpenTelemetry is installed and the program configured it.

The trace context is sent with the operation, so that the server's spans join the trace. Install ``gradwire[otel]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    _INSTALLED = False
else:
    _INSTALLED = True
    _TRACER = trace.get_tracer("gradwire")  # asks the provider that the program configures later


class OperationSpan:
    """The span of one operation.

    Attributes:
        traceparent: The W3C trace context; empty if the span is not recorded.
    """

    def __init__(self, span: Span | None = None) -> None:
        self._span = span
        self.traceparent = ""
        if span is not None:
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
            self.traceparent = carrier.get("traceparent", "")

    def end(self, error: BaseException | None = None) -> None:
        """End the span: the operation has its result, or will never have one."""
        if self._span is None:
            return
        if error is not None:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
        self._span.end()
        self._span = None


def start(label: str, run_id: str) -> OperationSpan:
    """Start a span inside the caller's current one."""
    if not _INSTALLED:
        return OperationSpan()
    span = _TRACER.start_span(f"gradwire.client.{label}", attributes={"gradwire.run": run_id})
    return OperationSpan(span if span.is_recording() else None)
