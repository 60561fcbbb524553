"""Metrics: what is counted, what is bounded, and that the documentation has all of it."""

from __future__ import annotations

import asyncio
import math
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import ServerConfig
from gradwire_server.engine_link.vitals import Vitals
from gradwire_server.observability.metrics import CATALOGUE, MAX_RUNS, Backlog, Metrics, Present
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from support.front import Start
from support.scripted import until

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
PPO = pb.LossInfo(name="ppo", metrics={"approx_kl": "…", "clip_fraction": "…", "entropy": "…", "reward_mean": "…"})
BEFORE = pb.Operation(forward_backward=pb.LossCall(loss_fn="ppo"))


def evaluated(**metrics: float) -> pb.OperationResult:
    result = pb.OperationResult(seq=1, status=pb.STATUS_SUCCEEDED, timings=pb.Timings(queue_s=0.5, engine_s=2.0))
    result.loss.MergeFrom(
        pb.LossResult(loss=0.25, metrics=metrics, num_tokens=100, num_loss_tokens=60, num_computed_tokens=80)
    )
    return result


def failed(code: pb.ErrorCode.ValueType) -> pb.OperationResult:
    return pb.OperationResult(status=pb.STATUS_FAILED, error=pb.Error(code=code, message="about token 12345"))


def knowing(**settings: bool) -> Metrics:
    metrics = Metrics(**settings)
    metrics.know([PPO])
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_result_moves_counters_times_tokens_and_the_gauges_of_its_loss() -> None:
    metrics = knowing()
    metrics.finished("run-a", BEFORE, evaluated(approx_kl=0.02, clip_fraction=0.1, entropy=1.5, reward_mean=-2.0))
    metrics.finished("run-a", BEFORE, evaluated(approx_kl=0.03))
    assert value(metrics, "gradwire_operations_total", kind="forward_backward", loss="ppo", outcome="succeeded") == 2
    assert value(metrics, "gradwire_operation_engine_seconds_sum", kind="forward_backward") == 4.0
    assert value(metrics, "gradwire_operation_queue_seconds_bucket", kind="forward_backward", le="0.3") == 0
    assert value(metrics, "gradwire_tokens_total", use="trained") == 200
    assert value(metrics, "gradwire_tokens_total", use="loss") == 120
    assert value(metrics, "gradwire_tokens_total", use="computed") == 160
    newest = {"approx_kl": 0.03, "clip_fraction": 0.1, "entropy": 1.5, "reward_mean": -2.0}
    for metric, expected in newest.items():
        assert value(metrics, "gradwire_loss_metric", loss="ppo", metric=metric, run="") == expected
    assert value(metrics, "gradwire_loss", loss="ppo", run="") == 0.25


def test_failures_are_told_apart_by_code_and_move_nothing_else() -> None:
    metrics = knowing()
    metrics.finished("run-a", BEFORE, failed(pb.ERROR_CODE_INVALID_BATCH))
    metrics.finished("run-a", BEFORE, pb.OperationResult(status=pb.STATUS_CANCELLED))
    metrics.refused(pb.Error(code=pb.ERROR_CODE_STALE_EPOCH))
    for outcome in ("invalid_batch", "cancelled"):
        assert value(metrics, "gradwire_operations_total", kind="forward_backward", loss="ppo", outcome=outcome) == 1
    assert value(metrics, "gradwire_submissions_refused_total", code="stale_epoch") == 1
    assert value(metrics, "gradwire_loss", loss="ppo", run="") is None
    assert b"12345" not in generate_latest(metrics.registry)


def test_steps_and_samples() -> None:
    metrics = knowing()
    step = pb.Operation(optim_step=pb.OptimStep())
    for skipped in (False, False, True):
        done = pb.OptimStepResult(grad_norm=3.0, step=2, skipped=skipped)
        metrics.finished("run-a", step, pb.OperationResult(status=pb.STATUS_SUCCEEDED, optim_step=done))
    sampled = pb.SampleResult(num_prompt_tokens=7, num_sampled_tokens=20)
    metrics.finished(
        "run-a",
        pb.Operation(sample=pb.SampleCall()),
        pb.OperationResult(status=pb.STATUS_SUCCEEDED, sample=sampled),
    )
    assert value(metrics, "gradwire_optimizer_steps_total", outcome="taken") == 2
    assert value(metrics, "gradwire_optimizer_steps_total", outcome="skipped") == 1
    assert value(metrics, "gradwire_grad_norm", run="") == 3.0
    assert value(metrics, "gradwire_tokens_total", use="prompt") == 7
    assert value(metrics, "gradwire_tokens_total", use="sampled") == 20


def test_what_clients_name_makes_no_labels() -> None:
    metrics = knowing()
    for number in range(300):
        asked = pb.Operation(forward_backward=pb.LossCall(loss_fn=f"made-up-{number}"))
        metrics.finished(f"run-{number}", asked, evaluated(**{f"invented_{number}": 1.0}))
    page = generate_latest(metrics.registry).decode()
    assert "made-up" not in page and "invented" not in page and "run-" not in page
    assert 'loss="unknown"' in page


def test_runs_are_labels_when_asked_for_and_then_only_so_many() -> None:
    metrics = knowing(per_run=True)
    for number in range(MAX_RUNS + 20):
        metrics.finished(f"run-{number}", BEFORE, evaluated(approx_kl=float(number)))
    assert value(metrics, "gradwire_loss_metric", loss="ppo", metric="approx_kl", run="run-7") == 7.0
    assert value(metrics, "gradwire_loss_metric", loss="ppo", metric="approx_kl", run="other") == MAX_RUNS + 19
    assert generate_latest(metrics.registry).decode().count("gradwire_loss{") == MAX_RUNS + 1
    metrics.forget("run-7")
    assert value(metrics, "gradwire_loss", loss="ppo", run="run-7") is None
    metrics.finished("run-new", BEFORE, evaluated())
    assert value(metrics, "gradwire_loss", loss="ppo", run="run-new") == 0.25


@dataclass
class Engine:
    number: int
    vitals: Vitals
    is_ready: bool = True
    machine: str = ""


def full() -> Metrics:
    """Metrics with a sample of every family."""
    metrics = knowing(per_run=True)
    metrics.accepted(BEFORE)
    metrics.finished("run-a", BEFORE, evaluated(approx_kl=0.1))
    step = pb.OperationResult(status=pb.STATUS_SUCCEEDED, optim_step=pb.OptimStepResult(step=1))
    metrics.finished("run-a", pb.Operation(optim_step=pb.OptimStep()), step)
    metrics.refused(pb.Error(code=pb.ERROR_CODE_SEQ_GAP))
    metrics.committed(3, 0.002, False)
    metrics.restored(5, 0.5)
    metrics.grpc_call("GetServerInfo")
    metrics.http_request("tinker", "/asample", 200, 0.01)
    vitals = Vitals()
    vitals.started()
    device = engine_pb2.DeviceUse(allocated_bytes=1, peak_bytes=2, used_bytes=3, total_bytes=4, utilization=0.5)
    caches = {"references": engine_pb2.CacheUse(hits=3, misses=1), "logprobs": engine_pb2.CacheUse(hits=9, misses=2)}
    runs = {"device": pb.RunsHeld(runs=2, bytes=64), "disk": pb.RunsHeld(runs=5, bytes=320)}
    moves = {"to_disk": engine_pb2.RunMoves(runs=7, bytes=448, seconds=0.5)}
    ranks = vitals.watched()
    for pulse in (
        engine_pb2.EnginePulse(device="cuda:0"),
        engine_pb2.EnginePulse(rank=1, memory_bytes=7, total_bytes=4),
    ):
        ranks.heard(pulse)
    vitals.take(
        engine_pb2.EngineHeartbeat(
            request_s=1.5,
            memory_bytes=10,
            device=device,
            caches=caches,
            runs=runs,
            run_moves=moves,
        )
    )
    metrics.registry.register(
        Present(lambda: Backlog(1, 2, 3, 4, 5.0), lambda: [Engine(0, vitals), Engine(1, Vitals(), is_ready=False)])
    )
    return metrics


def test_the_catalogue_is_what_is_exposed() -> None:
    exposed = {
        family.name: family for family in text_string_to_metric_families(generate_latest(full().registry).decode())
    }
    for spec in CATALOGUE:
        family = exposed.pop(spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name)
        assert (family.type, family.documentation) == (spec.kind, spec.help)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(spec.labels) and family.samples
    assert all(name.endswith("_created") for name in exposed)


def test_what_is_now() -> None:
    metrics = full()
    assert value(metrics, "gradwire_queue_operations") == 2
    assert value(metrics, "gradwire_queue_oldest_seconds") == 5.0
    assert value(metrics, "gradwire_device_memory_bytes", engine="0", state="total") == 4
    assert value(metrics, "gradwire_device_utilization_ratio", engine="0") == 0.5
    assert value(metrics, "gradwire_cache_requests_total", engine="0", cache="logprobs", result="hit") == 9
    assert value(metrics, "gradwire_engine_runs", engine="0", place="disk") == 5
    assert value(metrics, "gradwire_engine_runs_bytes", engine="0", place="device") == 64
    assert value(metrics, "gradwire_run_moves_total", engine="0", move="to_disk") == 7
    assert value(metrics, "gradwire_run_moves_bytes_total", engine="0", move="to_disk") == 448
    assert value(metrics, "gradwire_run_moves_seconds_total", engine="0", move="to_disk") == 0.5
    assert value(metrics, "gradwire_rank_memory_bytes", engine="0", rank="1") == 7
    assert value(metrics, "gradwire_rank_device_memory_bytes", engine="0", rank="1", state="total") == 4
    assert value(metrics, "gradwire_engine_ready", engine="0") == 1
    assert value(metrics, "gradwire_engine_ready", engine="1") == 0
    assert value(metrics, "gradwire_engine_restarts_total", engine="0") == 0


def test_every_metric_is_in_the_manual_with_its_labels_and_meaning() -> None:
    page = " ".join(OPERATIONS.read_text().split())  # its lines are wrapped
    for spec in CATALOGUE:
        about = ["histogram"] * (spec.kind == "histogram") + [f"`{label}`" for label in spec.labels]
        line = f"- `{spec.name}`{' (' + ', '.join(about) + ')' if about else ''}: {spec.help}"
        assert " ".join(line.split()) in page, f"run `make docs` for {spec.name}"
    assert page.count("- `gradwire_") == len(CATALOGUE)


def test_a_port_alone_is_on_loopback(tmp_path: Path) -> None:
    def address(text: str) -> str:
        return ServerConfig(state_dir=tmp_path, models={"m": "m"}, metrics_address=text).metrics_address

    assert [address(text) for text in ("", "9464", ":9464", "0.0.0.0:9464")] == [
        "", "127.0.0.1:9464", "127.0.0.1:9464", "0.0.0.0:9464",
    ]  # fmt: skip
    for wrong in ("here", "1.2.3.4:99999"):
        with pytest.raises(ValidationError, match="HOST:PORT"):
            address(wrong)


def test_vitals_tell_a_silent_engine_and_how_busy_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("gradwire_server.engine_link.vitals.time", SimpleNamespace(monotonic=lambda: now))
    vitals = Vitals(stale_s=5.0)
    assert not vitals.fresh and vitals.age_s == -1 and vitals.restarts == 0
    vitals.started()
    assert vitals.fresh
    now += 6.0
    assert not vitals.fresh
    ranks = vitals.watched()
    ranks.heard(engine_pb2.EnginePulse(rank=0, busy_s=1.5, waited_s=3.0))
    ranks.heard(engine_pb2.EnginePulse(rank=1, device="cuda:1"))
    ranks.waited(0.5)
    vitals.take(engine_pb2.EngineHeartbeat(busy_s=3.0, memory_bytes=5))
    assert vitals.fresh and vitals.busy == 0.5 and vitals.to_proto().memory_bytes == 5
    now += 1.0
    first, second = vitals.to_proto().ranks
    assert (first.busy, first.waits, first.heartbeat_age_s) == (0.25, 0.5, 0.5) and second.device == "cuda:1"
    vitals.watched()
    vitals.started()
    assert vitals.restarts == 1 and vitals.to_proto().memory_bytes == 0 and not vitals.to_proto().ranks


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines if line[:1] != "#")}


async def test_a_server_shows_what_waits_and_what_was_done(start: Start) -> None:
    async with start(metrics_address="0") as door:
        client = await (await door.client()).begin()
        door.engine.gate.clear()
        await client.fb(1, payload=b"abc")
        await client.step(2)
        await client.send(*client.frames(4, zero_grad=pb.ZeroGrad()))  # 3 is missing: it waits unacknowledged
        backlog = door.server.core.scheduler.backlog
        await until(lambda: backlog().early == 1 and backlog().oldest_s > 0.05)
        held = await asyncio.to_thread(scrape, door.server.metrics_address)
        assert held["gradwire_queue_operations"] == 2 and held["gradwire_queue_bytes"] == 3
        assert held["gradwire_queue_early_operations"] == 1 and held["gradwire_runs"] == 1
        assert 0.05 < held["gradwire_queue_oldest_seconds"] < 60
        assert held['gradwire_operations_accepted_total{kind="optim_step"}'] == 1
        door.engine.gate.set()
        await client.results(2)
        await client.fb(3, "fail")
        await client.results(2, 3)
        await client.send(*client.frames(1, zero_grad=pb.ZeroGrad()))  # another content for a number that is taken
        while (await client.ack()).error.code != pb.ERROR_CODE_SEQ_REUSED:
            pass
        done = await asyncio.to_thread(scrape, door.server.metrics_address)
    assert done["gradwire_queue_operations"] == 0 and done["gradwire_queue_oldest_seconds"] == 0
    one = 'gradwire_operations_total{kind="%s",loss="%s",outcome="%s"}'
    assert done[one % ("forward_backward", "unknown", "succeeded")] == 1
    assert done[one % ("forward_backward", "unknown", "invalid_batch")] == 1
    assert done[one % ("zero_grad", "", "aborted_predecessor")] == 1
    assert done['gradwire_submissions_refused_total{code="seq_reused"}'] == 1
    assert done["gradwire_journal_commit_seconds_count"] >= 4
    assert done['gradwire_operation_queue_seconds_count{kind="optim_step"}'] == 1
    assert not math.isnan(done['gradwire_engine_heartbeat_age_seconds{engine="0"}'])


async def test_a_recovery_is_timed_and_counted(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        for seq in (1, 2, 3):
            await client.fb(seq)
        await client.results(3)
        door.engine.die()
        await client.fb(4)
        await client.results(1, 4)
        found = door.server.core.metrics.registry.get_sample_value
        assert found("gradwire_replayed_operations_total") == 3
        assert found("gradwire_replay_seconds_count") == 1
        assert door.server.metrics_address == ""
