"""Traces: one operation, one trace, through every phase; hostile contexts start a trace of their own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import grpc.aio
import pytest
from gradwire import tracing as client_tracing
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import ServerConfig
from gradwire_server.observability.tracing import NO_TRACE, Tracing
from gradwire_server.server import Server
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support.fake_engine import FakeEngine
from support.front import Client

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


class SeeingEngine(FakeEngine):
    """Remembers the trace context that each operation came with."""

    def _carry_out(self, request, payload):  # type: ignore[no-untyped-def]  # as the one it stands in for
        if request.HasField("operation"):
            self.contexts = [*getattr(self, "contexts", []), request.operation.traceparent]
        return super()._carry_out(request, payload)


def by_name(spans: tuple[ReadableSpan, ...]) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans}


async def test_an_operation_is_followed_through_the_front_into_the_engine(
    tmp_path: Path, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    config = ServerConfig(address="127.0.0.1:0", state_dir=tmp_path, models={"tiny": "/models/tiny"})
    engine = SeeingEngine(tmp_path)
    async with Server(config, [engine], tracing) as server, grpc.aio.insecure_channel(server.address) as channel:
        client = await Client(channel).begin()
        frames = client.frames(1, b"abc", forward_backward=pb.LossCall(loss_fn="a"))
        frames[0].header.traceparent = GIVEN
        await client.send(*frames)
        await client.ack()
        await client.results(1)
    spans = by_name(exporter.get_finished_spans())
    whole = spans.pop("gradwire.forward_backward")
    assert whole.context.trace_id == int(TRACE, 16) and whole.parent is not None
    assert whole.parent.span_id == int(SPAN, 16)
    assert dict(whole.attributes or {}) == {
        "gradwire.run": client.run_id, "gradwire.seq": 1, "gradwire.kind": "forward_backward",
    }  # fmt: skip
    # No queue: the engine had nothing else to do, and began while the operation was written.
    assert list(spans) == ["gradwire.journal", "gradwire.engine", "gradwire.result"]
    ends = [span.end_time for span in spans.values()]
    for span, before in zip(spans.values(), [None, *ends], strict=False):
        assert span.parent is not None and span.parent.span_id == whole.context.span_id
        assert before is None or span.start_time == before, "each phase begins where the one before it ends"
    at_engine = spans["gradwire.engine"].context
    assert engine.contexts == [f"00-{TRACE}-{at_engine.span_id:016x}-01"]


async def test_an_operation_that_a_restart_interrupted_goes_on_in_its_trace(
    tmp_path: Path, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    config = ServerConfig(address="127.0.0.1:0", state_dir=tmp_path, models={"tiny": "/models/tiny"}, grace=0)
    stuck = FakeEngine(tmp_path)
    async with Server(config, [stuck]) as server, grpc.aio.insecure_channel(server.address) as channel:
        client = await Client(channel).begin()
        stuck.gate.clear()
        frames = client.frames(1, forward_backward=pb.LossCall(loss_fn="a"))
        frames[0].header.traceparent = GIVEN
        await client.send(*frames)
        await client.ack()
    await stuck.close()
    assert not exporter.get_finished_spans()
    engine = FakeEngine(tmp_path)
    async with Server(config, [engine], tracing) as server, grpc.aio.insecure_channel(server.address) as channel:
        again = Client(channel)
        again.run_id = client.run_id
        await again.results(1)
    assert by_name(exporter.get_finished_spans())["gradwire.forward_backward"].context.trace_id == int(TRACE, 16)


def test_a_failed_operation_is_a_failed_span_without_its_words(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    header = pb.OperationHeader(run_id="run-a", seq=3, operation=pb.Operation(zero_grad=pb.ZeroGrad()))
    trace = tracing.operation(header, 1000.0)
    trace.phase("queue")
    error = pb.Error(code=pb.ERROR_CODE_INVALID_BATCH, message="the prompt was secret")
    trace.end(pb.OperationResult(status=pb.STATUS_FAILED, error=error))
    whole = by_name(exporter.get_finished_spans())["gradwire.zero_grad"]
    assert whole.status.status_code == StatusCode.ERROR and whole.status.description == "ERROR_CODE_INVALID_BATCH"
    assert whole.start_time == 1000 * 10**9 and "secret" not in whole.to_json()


@pytest.mark.parametrize("given", ["", "nonsense", "00-0-0-0", "\x00" * 100, GIVEN.replace("00-", "ff-", 1)])
def test_a_context_that_is_none_begins_a_trace(tracing: Tracing, exporter: InMemorySpanExporter, given: str) -> None:
    header = pb.OperationHeader(operation=pb.Operation(zero_grad=pb.ZeroGrad()), traceparent=given)
    tracing.operation(header, 1.0).end(None)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.context.trace_id


def test_spans_of_the_engine_nest_and_say_the_kind_of_an_error(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(ValueError), tracing.span("outer", GIVEN, run="run-a", seq=2), tracing.span("inner"):
        raise ValueError("the prompt was secret")
    inner, outer = exporter.get_finished_spans()
    assert outer.parent is not None and outer.parent.span_id == int(SPAN, 16)
    assert inner.parent is not None and inner.parent.span_id == outer.context.span_id
    assert inner.status.description == "ValueError" and not inner.events


def test_without_a_provider_nothing_is_made() -> None:
    off = Tracing()
    assert off.operation(pb.OperationHeader(), 0.0) is NO_TRACE and NO_TRACE.traceparent == ""
    with off.span("nothing"):
        NO_TRACE.phase("queue")


def test_without_opentelemetry_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(RuntimeError, match=r"gradwire\[otel\]"):
        Tracing.to("http://localhost:1", "gradwire-front")


def test_a_collector_that_is_away_does_not_hold_a_shutdown_up() -> None:
    away = Tracing.to("http://127.0.0.1:1", "gradwire-front")
    with away.span("lost"):
        pass
    began = time.monotonic()
    away.close()
    assert time.monotonic() - began < 20


def test_the_client_without_opentelemetry_sends_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_tracing.start("optim_step", "run-a").traceparent == "", "nobody records here"
    monkeypatch.setattr(client_tracing, "_INSTALLED", False)
    span = client_tracing.start("optim_step", "run-a")
    span.end(ValueError())
    assert span.traceparent == ""
