"""A real server with everything switched on: one scrape, one trace over three processes, health, logs, terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradwire
import grpc
import pytest
from gradwire import tracing
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families
from support.child import children
from support.collector import Collector
from support.server import free_port

from tests.server.observability.test_metrics import scrape

pytestmark = pytest.mark.long

READY = "gradwire.v1.TrainingService"
CANARY = "4x9=36"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Running:
    """The server's addresses, its collector, an API key, and the file with its standard error."""

    address: str
    metrics: str
    key: str
    collector: Collector
    state_dir: Path
    words: Path
    process: subprocess.Popen[str] = field(repr=False)

    def engine_pid(self) -> int:
        pids = children(self.process.pid)
        return next(pid for pid in pids if b"gradwire_server.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())


def gradwire_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "gradwire_server.cli", *words]


@pytest.fixture(scope="module")
def running(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("observed")
    state_dir, words, collector = folder / "state", folder / "stderr", Collector()
    made = subprocess.run(
        gradwire_command("keys", "create", "ada", "--state-dir", str(state_dir)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    metrics = f"127.0.0.1:{free_port()}"
    command = gradwire_command(
        "serve", "--address", "127.0.0.1:0", "--model", f"tiny={tiny_model_path}", "--state-dir", str(state_dir),
        "--threads", "1", "--device", "cpu", "--metrics-address", metrics, "--metrics-runs",
        "--traces", f"http://{collector.address}", "--log-level", "info", "--log-format", "json",
        "--heartbeat-timeout", "10",
    )  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with words.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("gradwire: listening on "), words.read_text()
        yield Running(line.split()[-1], metrics, made.stdout.strip(), collector, state_dir, words, process)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        collector.close()


def wait_for(found: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.1)


@dataclass(frozen=True)
class Trained:
    """What went through the server before any of the tests: the run, and the spans of this program's OpenTelemetry."""

    run_id: str
    client_spans: tuple[ReadableSpan, ...]


@pytest.fixture(scope="module")
async def trained(running: Running) -> Trained:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_TRACER", provider.get_tracer("gradwire"))
        async with gradwire.connect(running.address, api_key=running.key, connect_timeout=120) as service:
            run = await service.create_run("tiny", lora={"rank": 2}, name="[red]loud[/]\x1b[31m")
            batch = {"input_ids": [[5, 6, 7, 8], [9, 10, 11]]}
            run.forward_backward(batch, "causal_lm")
            await run.optim_step(learning_rate=1e-3)
            preferences = {"chosen_input_ids": [[5, 6, 7]], "rejected_input_ids": [[5, 6, 8]]}
            for _ in range(2):  # the second epoch finds the reference's log-probabilities
                await run.forward(preferences, "dpo", {"reference_model": "base"})
            await run.sample([CANARY], max_tokens=3)
            with pytest.raises(gradwire.InvalidBatchError):
                await run.forward_backward({"input_ids": [[10**6, 5]]}, "causal_lm")
    return Trained(run.run_id, exporter.get_finished_spans())


def test_a_step_is_one_trace_from_the_client_to_the_optimizer(running: Running, trained: Trained) -> None:
    (step,) = [span for span in trained.client_spans if span.name == "gradwire.client.optim_step"]
    (lost,) = [span for span in trained.client_spans if span.status.status_code == StatusCode.ERROR]
    assert (lost.name, lost.status.description) == ("gradwire.client.forward_backward", "InvalidBatchError")

    def chain() -> dict[str, tuple[str, Any]]:
        trace_id = step.context.trace_id.to_bytes(16)
        return {span.name: (service, span) for service, span in running.collector.spans if span.trace_id == trace_id}

    expected = {
        "gradwire.optim_step": ("gradwire-front", None),
        "gradwire.journal": ("gradwire-front", "gradwire.optim_step"),
        "gradwire.engine": ("gradwire-front", "gradwire.optim_step"),
        "gradwire.result": ("gradwire-front", "gradwire.optim_step"),
        "gradwire.engine.optim_step": ("gradwire-engine", "gradwire.engine"),
        "gradwire.optimizer.step": ("gradwire-engine", "gradwire.engine.optim_step"),
    }
    wait_for(lambda: set(chain()) >= set(expected))
    spans = chain()
    assert set(spans) - {"gradwire.queue"} == set(expected)  # it may have waited behind the gradients, or not
    for name, (process, parent) in expected.items():
        service_name, span = spans[name]
        above = step.context.span_id.to_bytes(8) if parent is None else spans[parent][1].span_id
        assert (service_name, span.parent_span_id) == (process, above), name


def test_operations_are_counted(running: Running, trained: Trained) -> None:
    one = 'gradwire_operations_total{kind="%s",loss="%s",outcome="%s"}'
    last = one % ("forward_backward", "causal_lm", "invalid_batch")
    wait_for(
        lambda: (
            scrape(running.metrics).get('gradwire_cache_requests_total{cache="logprobs",engine="0",result="hit"}') == 2
        )
    )
    wait_for(lambda: scrape(running.metrics).get(last) == 1)
    page = scrape(running.metrics)
    assert page[one % ("optim_step", "", "succeeded")] == 1
    assert page[one % ("forward", "dpo", "succeeded")] == 2
    assert page['gradwire_cache_requests_total{cache="logprobs",engine="0",result="miss"}'] == 2
    assert page['gradwire_tokens_total{use="trained"}'] == 7 and page['gradwire_tokens_total{use="sampled"}'] >= 1
    assert page[f'gradwire_loss_metric{{loss="dpo",metric="reward_margin",run="{trained.run_id}"}}'] is not None
    assert page[f'gradwire_run_step{{run="{trained.run_id}"}}'] == 1
    assert page['gradwire_operation_engine_seconds_sum{kind="optim_step"}'] > 0
    assert page['gradwire_engine_memory_bytes{engine="0"}'] > 1e7
    wait_for(lambda: scrape(running.metrics)['gradwire_engine_ready{engine="0"}'] == 1)
    assert page["gradwire_journal_commit_seconds_count"] > 0


def test_the_terminal_shows_it_with_a_key_and_nothing_without(running: Running, trained: Trained) -> None:
    def run(*words: str, key: str = running.key) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"COLUMNS": "200", "GRADWIRE_API_KEY": key}
        command = [sys.executable, "-m", "gradwire.cli", *words, "--address", running.address]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    pages = [run("status"), run("top", "--once", "--interval", "0.3"), run("top", "--interval", "0.3")]
    assert not any(page.returncode for page in pages), [page.stderr for page in pages]
    for page in (page.stdout for page in pages):
        assert "on cpu, engine ready" in page and "tiny" in page and "1 runs" in page and "0 restarts" in page
        assert "[red]loud[/]" in page and "\x1b[31m" not in page, "a run's name is text, whatever is in it"
    assert "max_payload_bytes=" in pages[0].stdout
    refused = run("status", key="wrong")
    assert refused.returncode == 1 and "API key" in refused.stderr and not refused.stdout


def test_a_terminal_shows_it_until_ctrl_c(running: Running, trained: Trained) -> None:
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    words = ["env", "--default-signal=INT", sys.executable, "-m", "gradwire.cli", "top"]  # a shell's job may ignore it
    words += ["--interval", "0.2", "--address", running.address]
    environment = os.environ | {"GRADWIRE_API_KEY": running.key, "TERM": "xterm"}
    with subprocess.Popen(words, stdout=inside, stderr=inside, env=environment) as top:
        os.close(inside)
        shown = b""
        while shown.count(b"on cpu, engine") < 3:  # the picture is drawn again and again
            shown += os.read(outside, 1 << 16)
        top.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while more := os.read(outside, 1 << 16):
                shown += more
        assert top.wait(60) == 0
    os.close(outside)
    assert b"[red]loud[/]" in shown and b"\x1b[31mloud" not in shown and b"Traceback" not in shown


def test_lines_of_the_log_are_objects_and_hold_no_key_no_prompt_no_token(running: Running, trained: Trained) -> None:
    wait_for(lambda: "forward_backward: invalid_batch" in running.words.read_text())
    text = running.words.read_text()
    objects = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    done = {(line.get("kind"), line["message"]): line for line in objects if "seq" in line}
    assert done["optim_step", "optim_step: done"]["run_id"].startswith("run-")
    assert ("forward_backward", "forward_backward: invalid_batch") in done
    assert {"time", "level", "process", "logger", "message"} <= set(objects[0])
    assert running.key not in text and CANARY not in text and str(10**6) not in text


def test_a_stopped_engine_is_live_and_not_ready_until_it_goes_on(running: Running) -> None:
    with grpc.insecure_channel(running.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check

        def status(service: str) -> int:
            found: int = check(health_pb2.HealthCheckRequest(service=service), timeout=60).status
            return found

        wait_for(lambda: (status(""), status(READY)) == (SERVING, SERVING))
        pid = running.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: status(READY) == NOT_SERVING)
            assert status("") == SERVING
            page = scrape(running.metrics)
            assert (
                page['gradwire_engine_ready{engine="0"}'] == 0
                and page['gradwire_engine_heartbeat_age_seconds{engine="0"}'] > 3
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: status(READY) == SERVING)


def test_the_page_is_one_that_prometheus_reads(running: Running) -> None:
    with urllib.request.urlopen(f"http://{running.metrics}/metrics", timeout=60) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    assert len({family.name for family in families}) == len(families) > 25
