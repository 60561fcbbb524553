"""Prometheus metrics of a server. ``CATALOGUE`` holds all of them; ``docs/operations.md`` lists it.

Labels have bounded values: kinds of operations, error codes, the server's losses and the metrics that they declare.
Runs are a label only if the server is configured so, and then at most ``MAX_RUNS`` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypeVar

from gradwire_proto.v1 import training_pb2 as pb
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradwire_server.engine_link.vitals import Vitals
from gradwire_server.operation_kinds import has_loss, has_step, kind_of, loss_call, loss_result, step_result

MAX_RUNS = 100
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_COMMIT_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_GROUP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Spec:
    """Definition of one metric; ``buckets`` applies to histograms."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


CATALOGUE = (
    # Events, counted when they happen.
    Spec("gradwire_operations_accepted_total", "counter", ("kind",), "Operations made durable."),
    Spec("gradwire_operations_total", "counter", ("kind", "loss", "outcome"),
         "Operations with a result; outcome is succeeded, cancelled or an error code."),
    Spec("gradwire_submissions_refused_total", "counter", ("code",), "Submissions refused without using up a number."),
    Spec("gradwire_operation_queue_seconds", "histogram", ("kind",), "From accepted to started.", _SECONDS),
    Spec("gradwire_operation_engine_seconds", "histogram", ("kind",),
         "Computing; of optim_step, the time of a step.", _SECONDS),
    Spec("gradwire_tokens_total", "counter", ("use",),
         "Tokens: of rows that were trained or scored, loss (of those, scored ones), computed (for all those rows, one "
         "for what they begin with alike), prompt, cached (of those, with keys and values of earlier requests), "
         "sampled; drafted before they were drawn, and accepted, those of them that were."),
    Spec("gradwire_grouped_operations_total", "counter", (),
         "forward_backward that went through the base model at once with those of other runs (--group-runs)."),
    Spec("gradwire_optimizer_steps_total", "counter", ("outcome",),
         "Optimizer steps taken, or skipped for a gradient that was not finite."),
    Spec("gradwire_journal_commit_seconds", "histogram", (), "One commit of the journal, fsync included.",
         _COMMIT_SECONDS),
    Spec("gradwire_journal_commit_writes", "histogram", (), "Writes that shared a commit.", _GROUP),
    Spec("gradwire_journal_failures_total", "counter", (), "Commits that failed, as on a full disk."),
    Spec("gradwire_replay_seconds", "histogram", (), "Bringing one run back into a new engine.", _SECONDS),
    Spec("gradwire_replayed_operations_total", "counter", (), "Operations repeated to bring runs back."),
    Spec("gradwire_grpc_calls_total", "counter", ("method",), "Calls by gRPC that had a valid key; a stream is one."),
    Spec("gradwire_http_requests_total", "counter", ("door", "route", "status"), "HTTP requests answered."),
    Spec("gradwire_http_request_seconds", "histogram", ("door", "route"),
         "From an HTTP request to its last byte; retrieve_future waits for results.", _SECONDS),
    # Training: values of the newest result.
    Spec("gradwire_loss", "gauge", ("loss", "run"), "Newest value of a loss."),
    Spec("gradwire_loss_metric", "gauge", ("loss", "metric", "run"),
         "Newest value of a metric that a loss declares: approx_kl, clip_fraction, entropy, explained_variance,"
         " reward_mean and so on."),
    Spec("gradwire_grad_norm", "gauge", ("run",), "Gradient norm of the newest optimizer step, before clipping."),
    Spec("gradwire_run_step", "gauge", ("run",), "Optimizer steps of a run; only with --metrics-runs."),
    # Gauges sampled at scrape time.
    Spec("gradwire_runs", "gauge", (), "Runs that the server keeps."),
    Spec("gradwire_runs_parked", "gauge", (), "Runs that cannot go on for now; `gradwire status` says why."),
    Spec("gradwire_recovery_seconds", "gauge", (),
         "Bringing all runs back would take this long now: loading checkpoints, repeating what came after."),
    Spec("gradwire_queue_operations", "gauge", (), "Accepted operations without a result."),
    Spec("gradwire_queue_bytes", "gauge", (), "Payloads of operations without a result."),
    Spec("gradwire_queue_oldest_seconds", "gauge", (), "Age of the oldest operation without a result."),
    Spec("gradwire_queue_early_operations", "gauge", (), "Operations that wait for a number before theirs."),
    Spec("gradwire_engine_info", "gauge", ("engine", "machine"),
         "1 for each engine, with the machine that it is on; front is the server's own."),
    Spec("gradwire_engine_ready", "gauge", ("engine",), "1 while the engine's heartbeat is fresh."),
    Spec("gradwire_engine_heartbeat_age_seconds", "gauge", ("engine",), "Since the engine's last sign of life."),
    Spec("gradwire_engine_restarts_total", "counter", ("engine",), "Engine processes started after the first."),
    Spec("gradwire_engine_start_seconds", "gauge", ("engine",), "What the engine took to start and load its models."),
    Spec("gradwire_engine_busy_ratio", "gauge", ("engine",), "Share of the last second in which the engine computed."),
    Spec("gradwire_engine_request_seconds", "gauge", ("engine",),
         "How long the engine has worked on its present request."),
    Spec("gradwire_engine_memory_bytes", "gauge", ("engine",), "Resident memory of the engine's process."),
    Spec("gradwire_device_memory_bytes", "gauge", ("engine", "state"),
         "Memory of the GPU: allocated and peak by this engine, used by everyone, total. Absent on a CPU."),
    Spec("gradwire_device_utilization_ratio", "gauge", ("engine",),
         "How busy the driver says the GPU is. Needs gradwire[gpu]."),
    Spec("gradwire_rank_busy_ratio", "gauge", ("engine", "rank"),
         "Share of the last second in which a rank of an engine of several computed."),
    Spec("gradwire_rank_waits_ratio", "gauge", ("engine", "rank"),
         "Share of the last second in which the rank waited for the others."),
    Spec("gradwire_rank_memory_bytes", "gauge", ("engine", "rank"), "Resident memory of the rank's process."),
    Spec("gradwire_rank_device_memory_bytes", "gauge", ("engine", "rank", "state"),
         "Memory of the rank's GPU: used by everyone, total. Absent on a CPU."),
    Spec("gradwire_rank_heartbeat_age_seconds", "gauge", ("engine", "rank"), "Since the rank's last sign of life."),
    Spec("gradwire_engine_runs", "gauge", ("engine", "place"),
         "Runs that the engine holds on the device, in host memory (host) and on disk."),
    Spec("gradwire_engine_runs_bytes", "gauge", ("engine", "place"),
         "Weights, moments and accumulated gradients of these."),
    Spec("gradwire_run_moves_total", "counter", ("engine", "move"),
         "Runs moved: to_host, to_device, to_disk, from_disk."),
    Spec("gradwire_run_moves_bytes_total", "counter", ("engine", "move"), "Bytes of these moves."),
    Spec("gradwire_run_moves_seconds_total", "counter", ("engine", "move"),
         "Time of these moves; those to and from the disk are made while the engine computes."),
    Spec("gradwire_cache_requests_total", "counter", ("engine", "cache", "result"),
         "Hits and misses of reference models (references), of their kept log-probabilities (logprobs), and of "
         "prompts' tokens, whose keys and values are kept (prompts)."),
)  # fmt: skip

_SPECS = {spec.name: spec for spec in CATALOGUE}
M = TypeVar("M", Counter, Gauge, Histogram)


@dataclass(frozen=True)
class Backlog:
    """Runs and queued operations of a server at one moment.

    Attributes:
        operations: Number of accepted operations without a result.
        bytes: Bytes of the payloads of operations without a result.
        early: Number of operations that wait for a missing number.
        oldest_s: Age in seconds of the oldest accepted operation without a result.
        parked: Number of parked runs.
        recovery_s: Seconds that bringing all runs back into a new engine would take.
    """

    runs: int = 0
    operations: int = 0
    bytes: int = 0
    early: int = 0
    oldest_s: float = 0.0
    parked: int = 0
    recovery_s: float = 0.0


class Watched(Protocol):
    """The source of an engine's metrics."""

    @property
    def number(self) -> int:
        """Its number among the engines of the server, from 0."""

    @property
    def machine(self) -> str:
        """Name of the machine that it is on; empty for the server's own."""

    @property
    def vitals(self) -> Vitals:
        """Its heartbeats."""

    @property
    def is_ready(self) -> bool:
        """Whether it gives signs of life."""


class Metrics:
    """The counters, histograms and training gauges of a server.

    Args:
        per_run: Whether the training gauges have the run as a label.
    """

    def __init__(self, *, per_run: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._per_run = per_run
        self._runs: dict[str, None] = {}
        self._losses: dict[str, frozenset[str]] = {}
        # What every operation counts has few labels, and looking a child up by them takes longer than counting.
        self._accepted = cache(self._make(Counter, "gradwire_operations_accepted_total").labels)
        self._finished = cache(self._make(Counter, "gradwire_operations_total").labels)
        self._refused = self._make(Counter, "gradwire_submissions_refused_total")
        self._queue_s = cache(self._make(Histogram, "gradwire_operation_queue_seconds").labels)
        self._engine_s = cache(self._make(Histogram, "gradwire_operation_engine_seconds").labels)
        self._tokens = cache(self._make(Counter, "gradwire_tokens_total").labels)
        self._grouped = self._make(Counter, "gradwire_grouped_operations_total")
        self._steps = cache(self._make(Counter, "gradwire_optimizer_steps_total").labels)
        self._commit_s = self._make(Histogram, "gradwire_journal_commit_seconds")
        self._commit_writes = self._make(Histogram, "gradwire_journal_commit_writes")
        self._journal_failures = self._make(Counter, "gradwire_journal_failures_total")
        self._replay_s = self._make(Histogram, "gradwire_replay_seconds")
        self._replayed = self._make(Counter, "gradwire_replayed_operations_total")
        self._grpc = cache(self._make(Counter, "gradwire_grpc_calls_total").labels)
        self._http = self._make(Counter, "gradwire_http_requests_total")
        self._http_s = self._make(Histogram, "gradwire_http_request_seconds")
        self._of_runs = [
            self._make(Gauge, f"gradwire_{name}") for name in ("loss", "loss_metric", "grad_norm", "run_step")
        ]
        self._loss, self._loss_metric, self._grad_norm, self._run_step = (cache(each.labels) for each in self._of_runs)

    def _make(self, kind: type[M], name: str) -> M:
        spec = _SPECS[name]
        buckets: Any = {"buckets": spec.buckets} if spec.buckets else {}
        return kind(name, spec.help, spec.labels, registry=self.registry, **buckets)

    def know(self, losses: Iterable[pb.LossInfo]) -> None:
        """Set the losses that may be labels, with the metrics that they declare."""
        self._losses = {loss.name: frozenset(loss.metrics) for loss in losses}

    # ---- operations ----

    def accepted(self, operation: pb.Operation) -> None:
        """Count an operation that has become durable."""
        self._accepted(_kind(operation)).inc()

    def refused(self, error: pb.Error) -> None:
        """Count a submission that was not accepted."""
        self._refused.labels(_code(error.code)).inc()

    def finished(self, run_id: str, operation: pb.Operation, result: pb.OperationResult) -> None:
        """Count an operation that has its result."""
        kind, loss = _kind(operation), self._loss_name(operation)
        self._finished(kind, loss, _outcome(result)).inc()
        if result.HasField("timings"):
            self._queue_s(kind).observe(result.timings.queue_s)
            self._engine_s(kind).observe(result.timings.engine_s)
        if result.HasField("sample"):  # also of one whose caller has left
            self._tokens("prompt").inc(result.sample.num_prompt_tokens)
            self._tokens("cached").inc(result.sample.num_cached_tokens)
            self._tokens("sampled").inc(result.sample.num_sampled_tokens)
            self._tokens("drafted").inc(result.sample.num_drafted_tokens)
            self._tokens("accepted").inc(result.sample.num_accepted_tokens)
        if result.status != pb.STATUS_SUCCEEDED:
            return
        if has_loss(result):
            trained = kind_of(operation).changes_state
            self._evaluated(run_id, trained, loss, loss_result(result))
        if has_step(result):
            run, step = self._run(run_id), step_result(result)
            self._steps("skipped" if step.skipped else "taken").inc()
            self._grad_norm(run).set(step.grad_norm)
            if run:
                self._run_step(run).set(step.step)

    def _evaluated(self, run_id: str, trained: bool, loss: str, result: pb.LossResult) -> None:
        self._tokens("trained" if trained else "scored").inc(result.num_tokens)
        self._tokens("loss").inc(result.num_loss_tokens)
        self._tokens("computed").inc(result.num_computed_tokens)
        if result.grouped_runs > 1:
            self._grouped.inc()
        if not loss:
            return
        run = self._run(run_id)
        if result.HasField("loss"):
            self._loss(loss, run).set(result.loss)
        for name in self._losses.get(loss, frozenset()) & result.metrics.keys():
            self._loss_metric(loss, name, run).set(result.metrics[name])

    def forget(self, run_id: str) -> None:
        """Remove the series of a deleted run."""
        if self._runs.pop(run_id, 0) is None:
            for gauge in self._of_runs:
                gauge.remove_by_labels({"run": run_id})
            for known in (self._loss, self._loss_metric, self._grad_norm, self._run_step):
                known.cache_clear()

    def _run(self, run_id: str) -> str:
        if not self._per_run:
            return ""
        if run_id not in self._runs and len(self._runs) >= MAX_RUNS:
            return "other"
        self._runs[run_id] = None
        return run_id

    def _loss_name(self, operation: pb.Operation) -> str:
        call = loss_call(operation)
        name = call.loss_fn if call is not None else ""
        return name if not name or name in self._losses else "unknown"

    # ---- doors ----

    def grpc_call(self, method: str) -> None:
        """Count a call of a method of the API."""
        self._grpc(method).inc()

    def http_request(self, door: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP request. ``route`` is the pattern of the path, never the path itself."""
        self._http.labels(door, route, str(status)).inc()
        self._http_s.labels(door, route).observe(seconds)

    # ---- journal and recovery ----

    def committed(self, writes: int, seconds: float, ok: bool) -> None:
        """Count a group commit of the journal; called in the journal's writer thread."""
        self._commit_s.observe(seconds)
        self._commit_writes.observe(writes)
        if not ok:
            self._journal_failures.inc()

    def restored(self, operations: int, seconds: float) -> None:
        """Count a run that was restored in an engine by replaying ``operations`` operations."""
        self._replay_s.observe(seconds)
        self._replayed.inc(operations)


class Present(Collector):
    """Gauges sampled at scrape time.

    Args:
        backlog: Returns the present backlog; called in the thread that serves the scrape.
        engines: Returns the engines, whose number is the label ``engine``.
    """

    def __init__(self, backlog: Callable[[], Backlog], engines: Callable[[], Sequence[Watched]]) -> None:
        self._backlog, self._engines = backlog, engines

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, and the counters that the engines' heartbeats carry."""
        backlog = self._backlog()
        yield _one("gradwire_runs", backlog.runs)
        yield _one("gradwire_runs_parked", backlog.parked)
        yield _one("gradwire_recovery_seconds", backlog.recovery_s)
        yield _one("gradwire_queue_operations", backlog.operations)
        yield _one("gradwire_queue_bytes", backlog.bytes)
        yield _one("gradwire_queue_oldest_seconds", backlog.oldest_s)
        yield _one("gradwire_queue_early_operations", backlog.early)
        families = {spec.name: _family(spec.name) for spec in CATALOGUE if "engine" in spec.labels}
        for engine in self._engines():
            families["gradwire_engine_info"].add_metric([str(engine.number), engine.machine or "front"], 1)
            for name, labels, value in _of_engine(engine.vitals, engine.is_ready):
                families[name].add_metric([str(engine.number), *labels], value)
        yield from families.values()


def _of_engine(vitals: Vitals, ready: bool) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Metrics of one engine, by name and further labels."""
    beat = vitals.beat
    yield "gradwire_engine_ready", (), ready
    yield "gradwire_engine_heartbeat_age_seconds", (), vitals.age_s
    yield "gradwire_engine_restarts_total", (), vitals.restarts
    yield "gradwire_engine_start_seconds", (), vitals.start_s
    yield "gradwire_engine_busy_ratio", (), vitals.busy
    yield "gradwire_engine_request_seconds", (), beat.request_s
    yield "gradwire_engine_memory_bytes", (), beat.memory_bytes
    if beat.HasField("device"):
        for state in ("allocated", "peak", "used", "total"):
            yield "gradwire_device_memory_bytes", (state,), getattr(beat.device, f"{state}_bytes")
        if beat.device.HasField("utilization"):
            yield "gradwire_device_utilization_ratio", (), beat.device.utilization
    for number, rank in enumerate(vitals.to_proto().ranks):
        yield "gradwire_rank_busy_ratio", (str(number),), rank.busy
        yield "gradwire_rank_waits_ratio", (str(number),), rank.waits
        yield "gradwire_rank_memory_bytes", (str(number),), rank.memory_bytes
        if rank.device_memory_total_bytes:
            yield "gradwire_rank_device_memory_bytes", (str(number), "used"), rank.device_memory_used_bytes
            yield "gradwire_rank_device_memory_bytes", (str(number), "total"), rank.device_memory_total_bytes
        yield "gradwire_rank_heartbeat_age_seconds", (str(number),), rank.heartbeat_age_s
    for place, held in beat.runs.items():
        yield "gradwire_engine_runs", (place,), held.runs
        yield "gradwire_engine_runs_bytes", (place,), held.bytes
    for move, moved in beat.run_moves.items():
        yield "gradwire_run_moves_total", (move,), moved.runs
        yield "gradwire_run_moves_bytes_total", (move,), moved.bytes
        yield "gradwire_run_moves_seconds_total", (move,), moved.seconds
    for name, use in beat.caches.items():
        yield "gradwire_cache_requests_total", (name, "hit"), use.hits
        yield "gradwire_cache_requests_total", (name, "miss"), use.misses


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    spec = _SPECS[name]
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(name, spec.help, labels=spec.labels)


def _one(name: str, value: float) -> Metric:
    family = _family(name)
    family.add_metric([], value)
    return family


def _kind(operation: pb.Operation) -> str:
    return operation.WhichOneof("kind") or "unknown"


def _outcome(result: pb.OperationResult) -> str:
    if result.status == pb.STATUS_SUCCEEDED:
        return "succeeded"
    return "cancelled" if result.status == pb.STATUS_CANCELLED else _code(result.error.code)


def _code(code: pb.ErrorCode.ValueType) -> str:
    return pb.ErrorCode.Name(code).removeprefix("ERROR_CODE_").lower()
