"""Programs on Tinker's SDK: the cost of a step over the engine's computing, and many clients at once.

The unmodified SDK runs in an environment of its own (``make .venv-tinker/.installed``, or GRADWIRE_TINKER_PYTHON) and
trains through the HTTP door of a server with the journal on, on a model of 0.1 M parameters. ``awaited``: one client,
``forward_backward`` and ``optim_step`` of one row of 32 tokens, each awaited before the next; wall time less what the
engine says that it computed. gradwire's own SDK does the same in turns. ``beside``: what a step of gradwire's own SDK
over gRPC costs while 8 clients of Tinker's train on the same server. ``clients``: 64 clients, each with a session
and a model of its own; every step must be taken once and in order, and the server must have executed what was asked.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from support.server import free_port
from support.tinker import HttpServer

from benchmarks import ROOT
from benchmarks.other_side import OtherSide
from benchmarks.overhead import TOKENS, awaited, overhead
from benchmarks.report import Figure, Size, run_alone
from benchmarks.workload import small_model

TINKER_PYTHON = Path(os.environ.get("GRADWIRE_TINKER_PYTHON", ROOT / ".venv-tinker/bin/python"))
CLIENTS, BESIDE = 64, 8
KINDS = ("forward_backward", "optim_step")


class TinkerSide(OtherSide):
    """A process of Tinker's SDK.

    Args:
        model: Name of the served model.
        server: The server.
        folder: For its log.
    """

    def __init__(self, model: str, server: HttpServer, folder: Path) -> None:
        folder.mkdir()
        own = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any", "TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
        command = [str(TINKER_PYTHON), str(Path(__file__).with_name("tinker_side.py")), model]
        super().__init__("the SDK's process", command, folder, own | {"OMP_NUM_THREADS": "1"})

    def train(self, clients: int, steps: int) -> dict[str, Any]:
        """Let clients take steps; return the answer that ``tinker_side`` describes.

        Raises:
            RuntimeError: As for :meth:`ask`.
        """
        return self.ask(json.dumps({"clients": clients, "steps": steps}))


class Meters:
    """What a server has done so far, by its metrics and its processes.

    Args:
        server: The server.
        port: Of its metrics, on loopback.
    """

    def __init__(self, server: HttpServer, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._front, self._engine = psutil.Process(server.process.pid), psutil.Process(server.engine_pid)

    def read(self) -> dict[str, float]:
        """``operations`` and ``engine_s`` of the kinds that a step has; CPU seconds of ``front`` and ``engine``."""
        counted = {"operations": 0.0, "engine_s": 0.0}
        with urllib.request.urlopen(self._url) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        for family in families:
            if family.name != "gradwire_operation_engine_seconds":
                continue
            for sample in family.samples:
                if sample.labels.get("kind") in KINDS:
                    counted["operations"] += sample.value * sample.name.endswith("_count")
                    counted["engine_s"] += sample.value * sample.name.endswith("_sum")
        for name, process in (("front", self._front), ("engine", self._engine)):
            times = process.cpu_times()
            counted[name] = times.user + times.system
        return counted


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


async def one_client(run: gradwire.TrainingClient, side: TinkerSide, meters: Meters, size: Size) -> Figure:
    """The overhead of an awaited step."""
    batch = {"input_ids": np.random.default_rng(0).integers(3, 90, (1, TOKENS))}
    steps = size.pick(50, 3)
    theirs: dict[str, list[float]] = {"ms": [], "SDK": [], "front": []}
    own: dict[str, list[float]] = {"ms": [], "SDK": [], "front": []}
    for _ in range(size.repeats * size.pick(4, 1) + 1):
        before = meters.read()
        answer = await asyncio.to_thread(side.train, 1, steps)
        used = difference(before, meters.read())
        check_steps(answer, steps, used)
        beyond_s = answer["seconds"] - used["engine_s"]
        for name, seconds in (("ms", beyond_s), ("SDK", answer["cpu_seconds"]), ("front", used["front"])):
            theirs[name].append(seconds / steps * 1e3)
        before, cpu = meters.read(), time.process_time()
        own["ms"].append(await overhead(awaited, run, batch, steps))
        own["SDK"].append((time.process_time() - cpu) / steps * 1e3)
        own["front"].append(difference(before, meters.read())["front"] / steps * 1e3)
    for samples in (*theirs.values(), *own.values()):
        del samples[0]
    ratio = statistics.median(map(operator.truediv, theirs["ms"], own["ms"]))
    their, our = ({name: statistics.median(values) for name, values in side.items()} for side in (theirs, own))
    detail = (
        f"wall less engine compute of forward_backward and optim_step, {TOKENS} tokens, mean of {steps} steps a turn; "
        f"{ratio:.1f} x gradwire's own SDK in turns, {our['ms']:.1f} ms; of CPU {their['SDK']:.1f} ms in the SDK, "
        f"{their['front']:.1f} in the front, against {our['SDK']:.1f} and {our['front']:.1f}"
    )
    return Figure(
        "Tinker's SDK: overhead of a step, awaited", their["ms"], "ms a step", 12.0, at_least=False, detail=detail,
        samples={"Tinker's": theirs["ms"], "gradwire's": own["ms"]},
    )  # fmt: skip


async def many_clients(side: TinkerSide, meters: Meters, size: Size) -> Figure:
    """The rate of 64 clients, of which nothing is lost."""
    clients, steps = size.pick(CLIENTS, 3), size.pick(10, 2)
    await asyncio.to_thread(side.train, clients, 1)
    rates, cpu = [], []
    for _ in range(size.repeats):
        before = meters.read()
        answer = await asyncio.to_thread(side.train, clients, steps)
        used = difference(before, meters.read())
        check_steps(answer, steps, used)
        rates.append(used["operations"] / answer["seconds"])
        seconds = (answer["cpu_seconds"], used["front"], used["engine"])
        cpu.append([each / used["operations"] * 1e3 for each in seconds])
    client, front, engine = (statistics.median(values) for values in zip(*cpu, strict=True))
    detail = (
        f"each a session and a model of its own, awaited steps; every step taken once, in order, and answered; ms of "
        f"CPU an operation: {client:.1f} in the clients' process, {front:.1f} in the front, {engine:.1f} in the engine"
    )
    return Figure(
        f"Tinker's SDK: {clients} clients at once", statistics.median(rates), "operations/s", detail=detail,
        samples={"operations/s": rates},
    )  # fmt: skip


async def beside_clients(run: gradwire.TrainingClient, side: TinkerSide, size: Size) -> Figure:
    """What clients of the HTTP door add to an awaited step over gRPC, beside their turns at the engine."""
    batch = {"input_ids": np.random.default_rng(0).integers(3, 90, (1, TOKENS))}
    clients, steps = size.pick(BESIDE, 2), size.pick(20, 2)
    await asyncio.to_thread(side.train, clients, 1)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(size.repeats):
        alone.append(statistics.median([await own_step(run, batch) for _ in range(size.pick(50, 3))]))
        training = asyncio.create_task(asyncio.to_thread(side.train, clients, steps))
        taken: list[float] = []
        while not training.done() or not taken:
            taken.append(await own_step(run, batch))
        check_steps(await training, steps)
        beside.append(statistics.median(taken))
    detail = (
        f"a step of gradwire's own SDK, less compute and wait for the engine, while {clients} clients of Tinker's SDK "
        f"train: {statistics.median(beside):.1f} ms, {statistics.median(alone):.1f} alone; clients, front and engine "
        "share the cores"
    )
    ratio = statistics.median(map(operator.truediv, beside, alone))
    return Figure("gRPC beside Tinker's SDK", ratio, "x", detail=detail, samples={"alone": alone, "beside": beside})


async def own_step(run: gradwire.TrainingClient, batch: dict[str, Any]) -> float:
    """Milliseconds of an awaited step that are neither the engine's computing nor a wait for it."""
    began = time.perf_counter()
    loss = await run.forward_backward(batch, "causal_lm")
    step = await run.optim_step(learning_rate=1e-5)
    others = sum(result.timings.engine_s + result.timings.queue_s for result in (loss, step))
    return (time.perf_counter() - began - others) * 1e3


def check_steps(answer: dict[str, Any], steps: int, used: dict[str, float] | None = None) -> None:
    """Check that every step was taken once, in order, and came back.

    Raises:
        AssertionError: Something was lost, or done twice.
    """
    for client, numbers in enumerate(answer["numbers"]):
        if np.diff(numbers).tolist() != [1.0] * (steps - 1):
            raise AssertionError(f"client {client} saw steps {numbers}")
    if not np.isfinite(answer["losses"]).all():
        raise AssertionError(f"losses are {answer['losses']}")
    asked = len(KINDS) * steps * len(answer["numbers"])
    if used is not None and used["operations"] != asked:
        raise AssertionError(f"{asked} operations were asked, {used['operations']:g} executed")


async def all_three(size: Size) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "model", hidden_size=64, num_layers=2)
        port = free_port()
        metrics = ("--metrics-address", f"127.0.0.1:{port}")
        server = HttpServer(model, Path(folder) / "state", free_port(), "--threads", "1", *metrics).start()
        try:
            meters = Meters(server, port)
            with TinkerSide("tiny", server, Path(folder) / "side") as side:
                async with gradwire.connect(server.address) as service:
                    run = await service.create_run("tiny", lora={"rank": 8, "alpha": 32})
                    if size.wants("awaited"):
                        figures.append(await one_client(run, side, meters, size))
                    if size.wants("beside"):
                        figures.append(await beside_clients(run, side, size))
                if size.wants("clients"):
                    figures.append(await many_clients(side, meters, size))
        finally:
            server.end()
    return figures


def measure(size: Size) -> list[Figure]:
    """Measure the figures; ``only``: ``awaited``, ``beside``, ``clients``.

    Raises:
        FileNotFoundError: The SDK's environment does not exist.
    """
    if not TINKER_PYTHON.exists():
        message = f"{TINKER_PYTHON} is not there: make .venv-tinker/.installed, or set GRADWIRE_TINKER_PYTHON"
        raise FileNotFoundError(message)
    return asyncio.run(all_three(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
