"""What a training tells, to whom, and that it tells nobody unasked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import types
import urllib.request
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from gradwire.rl import HICRACreditAssigner
from gradwire.router import RouterPPOAdapter
from gradwire.router.observability import PrometheusLogger
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from support.server import free_port

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "configs/policy/rllm.yaml"

WATCHED = """
import sys
seen = []
def watch(event, arguments):
    if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
        seen.append((event, str(arguments)))
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        seen.append((event, str(arguments)))
    if event in ("os.mkdir", "os.rename", "subprocess.Popen"):
        seen.append((event, str(arguments)))
sys.dont_write_bytecode = True
sys.addaudithook(watch)
from gradwire.router.commands import main
main(sys.argv[1:])
assert not seen, seen
"""


def settings(**sections: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "rllm": {"enabled": True},
        "rollout": {"environments": 64, "rollout_length": 4},
        "trainer": {"enabled": True, "updates": 3},
        "hicra": {"enabled": True, "normalize": False},
    }
    return given | sections


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def watched(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WATCHED, *words], capture_output=True, text=True, check=False)


def test_the_shipped_file_trains_nothing_writes_nothing_opens_no_socket_and_says_so() -> None:
    done = watched("train", "--config", str(SHIPPED), "--updates", "8", "--seed", "42")
    assert done.returncode == 0, done.stderr
    assert "nothing was trained or written" in done.stdout
    assert f"set rllm.enabled: true and trainer.enabled: true in {SHIPPED}" in done.stdout
    assert list(Path().iterdir()) == []


@pytest.mark.long
def test_the_watch_sees_a_training_that_writes_and_none_that_does_not() -> None:
    words = ["train", "--config", str(SHIPPED), "--updates", "1", "--set", "rllm.enabled=true"]
    words += ["--set", "trainer.enabled=true"]
    quiet = watched(*words)
    assert quiet.returncode == 0, quiet.stderr
    assert "nothing was written: experiment.enabled is false" in quiet.stdout
    writing = watched(*words, "--set", "experiment.enabled=true")
    assert "AssertionError" in writing.stderr
    assert "policy_state.npz" in writing.stderr


def test_events_are_json_lines() -> None:
    logging = {"logging": {"enabled": True, "destination": "deep/logs/rllm.log"}}
    RouterPPOAdapter(settings(observability=logging)).train(seed=4)
    events = [json.loads(line) for line in Path("deep/logs/rllm.log").read_text().splitlines()]
    assert [each["event"] for each in events] == ["started", "update", "update", "update", "finished"]
    assert events[0]["seed"] == 4
    assert {"mean_reward", "policy_loss", "value_loss", "entropy", "hicra_depth"} <= set(events[1])
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", each["time"]) for each in events)


def test_prometheus_serves_the_figures_while_it_trains() -> None:
    pages: list[str] = []
    said: list[str] = []

    def scrape(figures: Any) -> None:
        address = said[0].split()[-1]
        with urllib.request.urlopen(address) as page:
            pages.append(page.read().decode())

    metrics = {"metrics": {"backend": "prometheus", "port": 0}}
    result = RouterPPOAdapter(settings(observability=metrics)).train(told=scrape, said=said.append)
    last, figures = pages[-1], result.history[-1]
    for name in ("mean_reward", "entropy", "explained_variance"):
        assert f"\ngradwire_router_{name} {figures[name]!r}\n" in last
    for name in ("hicra_planner_reward_ratio", "hicra_depth"):
        assert f"\n{name} {figures[name]!r}\n" in last
    assert "\nhicra_success_total " in last
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(said[0].split()[-1])
    RouterPPOAdapter(settings(observability=metrics)).train()  # the names are free again


def test_a_port_that_is_taken_is_named() -> None:
    first = PrometheusLogger(0)
    taken = int(first.address.split(":")[2].split("/")[0])
    try:
        with pytest.raises(ValueError, match=rf"cannot listen on observability\.metrics\.port {taken}"):
            PrometheusLogger(taken)
    finally:
        first.close()


def test_wandb_is_given_project_entity_tags_and_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **options: calls.append(("init", options))  # type: ignore[attr-defined]
    stand_in.log = lambda figures, step: calls.append(("log", (step, figures)))  # type: ignore[attr-defined]
    stand_in.finish = lambda: calls.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    metrics = {"metrics": {"backend": "wandb", "project": "p", "entity": "e", "tags": ["t"]}}
    result = RouterPPOAdapter(settings(observability=metrics)).train()
    assert calls[0] == ("init", {"project": "p", "entity": "e", "tags": ["t"]})
    assert [call for call, _ in calls] == ["init", "log", "log", "log", "finish"]
    assert calls[-2][1] == (3, result.history[-1])


def test_a_backend_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'gradwire\[tensorboard\]'"):
        RouterPPOAdapter(settings(observability={"metrics": {"backend": "tensorboard"}})).train()


def test_tensorboard_has_the_curves() -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    metrics = {"metrics": {"backend": "tensorboard", "directory": "curves"}}
    result = RouterPPOAdapter(settings(observability=metrics)).train()
    events = reading.EventAccumulator("curves")
    events.Reload()
    values = [event.tensor_proto.float_val[0] for event in events.Tensors("mean_reward")]
    assert values == pytest.approx([each["mean_reward"] for each in result.history], rel=1e-6)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP endpoint that keeps the names of spans and their parents."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self.lock:
            for resource in request.resource_spans:
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_traces_go_to_the_otlp_endpoint() -> None:
    collector, port = Collector(), free_port()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        tracing = {"tracing": {"enabled": True, "endpoint": f"http://127.0.0.1:{port}"}}
        RouterPPOAdapter(settings(observability=tracing)).train()
    finally:
        server.stop(None).wait()
    names = sorted(span.name.removeprefix("gradwire.router.") for span in collector.spans)
    assert names == sorted(["train"] + ["update", "rollout", "optimise"] * 3)
    by_id = {span.span_id: span.name for span in collector.spans}
    parents = {span.name: by_id.get(span.parent_span_id) for span in collector.spans}
    assert parents["gradwire.router.rollout"] == "gradwire.router.update"
    assert parents["gradwire.router.update"] == "gradwire.router.train"
    assert parents["gradwire.router.train"] is None


def test_hicra_records_nothing_while_it_is_off() -> None:
    assigner = HICRACreditAssigner(enabled=False)
    assert not assigner([[1.0, 2.0]]).any()
    assert assigner.metrics == {}
