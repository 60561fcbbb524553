"""Synchronous and asynchronous RL on real engines of one thread each: reward and tokens per second.

    python -m benchmarks.async_engines [--repeats 3] [--smoke] [--only two] [--only one]

Two engines: the run is on one, which trains it in three passes; the other samples from its checkpoints. Environments
take so long that an iteration's rollouts take as long as its training. One engine: it trains and samples, and the
rollouts take twice as long as the step. Durations are those of ``async_rl``: median 1, 99th percentile 20, in a unit
that is measured first. The ways to train take turns; a policy begins with the same weights in each.

A machine needs two idle cores, beside some for the client, for the figures to mean something.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradwire
from _support.small_model import small_model
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm, RolloutManager, RunInference, Task, reward_function
from support.server import Server

from benchmarks.async_rl import BATCH, KINDS, ONE, RECOMMENDED, TWO, WAYS, Curve, Slow, Way, speedup, tasks
from benchmarks.report import Figure, Size, run_alone

LETTERS = "abcdefghijkl"
COMPARED = ("sync", "one iteration ahead", RECOMMENDED)
ITERATIONS, LENGTH, GROUP = 40, 32, 8
PASSES = {TWO: 3, ONE: 1}
"""Over each iteration's rollouts: sampling for one pass would take longer than the pass, without any environment."""
STEPS = {TWO: 1.0, ONE: 2.0}
"""How many times its training an iteration's rollouts take."""


class OtherEngine(RunInference):
    """Samples from checkpoints of a run, which the engine does that has the least to do."""

    def __init__(self, service: gradwire.ServiceClient, inference: RunInference) -> None:
        super().__init__(inference.run, inference.codec)
        self._service, self._newest = service, ""

    def can_update(self, run: Any) -> bool:
        return True

    async def update_weights(self, run: Any, version: int) -> None:
        checkpoint = await run.save_checkpoint(f"policy-{version % 3}", overwrite=True)  # samples may be of the last
        self.run, self.version = self._service.sampling_client(checkpoint), version


@reward_function(sandboxed=False)
def of_its_kind(response: str, prompt: str) -> float:
    """The share of letters that are of the task's kind: each kind has an own quarter of them."""
    size = len(LETTERS) // KINDS
    wanted = LETTERS[int(prompt) * size : (int(prompt) + 1) * size]
    return sum(letter in wanted for letter in response) / LENGTH


async def train(
    service: gradwire.ServiceClient, way: Way, engines: str, given: list[Task], iterations: int, seed: int
) -> tuple[Curve, list[dict[str, float]]]:
    """Train a new run; return its curve, and the metrics of its iterations."""
    run = await service.create_run("m", seed=seed)
    inference = await RunInference.of(service, run)
    if engines == TWO:
        await service.move_run(run.run_id, engine=1)
        inference = OtherEngine(service, inference)
    seconds: list[float] = []
    rewards: list[float] = []
    loop = asyncio.get_running_loop()

    class Timer:
        def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
            seconds.append(loop.time() - began)
            rewards.append(metrics["rewards/reward"])

        def close(self) -> None:
            pass

    config = AlgorithmConfig(
        batch_size=BATCH, group_size=GROUP, max_tokens=LENGTH, seed=seed, num_parallel=1024, learning_rate=1e-3,
        ppo_epochs=PASSES[engines], max_staleness=way.stale if way.mode == "sync" else 0,
    )  # fmt: skip
    manager = RolloutManager(inference, Slow(), deterministic=False, num_parallel=1024, group_size=GROUP)
    algorithm = GRPOAlgorithm(service, run, given, of_its_kind, config, rollout_manager=manager, loggers=[Timer()])
    options: dict[str, Any] = {"max_staleness": way.stale * PASSES[engines]} if way.mode == "async" else {}
    began = loop.time()
    history = await algorithm.train(iterations, progress_bar=False, mode=way.mode, **options)
    dropped = history[-1]["groups/dropped"]
    await service.delete_run(run.run_id)
    return Curve(seconds, rewards, dropped), history


def lasting(given: list[Task], unit_s: float) -> list[Task]:
    return [replace(task, data={"takes": unit_s * task.data["takes"]}) for task in given]


async def compare(folder: Path, engines: str, size: Size) -> Figure:
    """Measure the parts of an iteration without environments, then train in all ways, one after the other."""
    model = small_model(folder / "model", characters=LETTERS + "0123", hidden_size=128, num_layers=4)
    flags = ["--device", "cpu", "--threads", "1", "--engines", "2" if engines == TWO else "1"]
    server = Server(model, folder / "state", *flags, name="m").start()
    iterations = size.pick(ITERATIONS, 2)
    curves: dict[str, list[Curve]] = {way: [] for way in COMPARED}
    try:
        async with gradwire.connect(server.address) as service:
            while not all(engine.ready for engine in (await service.server_info()).engines):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            given = tasks(BATCH * 4, 0)
            _, plain = await train(service, WAYS["sync"], engines, lasting(given, 0.0), 4, 0)
            waited = statistics.median(each["time/waited_for_rollouts_s"] for each in plain[1:])
            step_s = statistics.median(each["time/iteration_s"] for each in plain[1:]) - waited
            slowest = statistics.mean(
                max(task.data["takes"] for task in given[at : at + BATCH]) for at in range(0, len(given), BATCH)
            )
            unit_s = max(0.0, STEPS[engines] * step_s - waited) / slowest
            for seed in range(size.repeats):
                given = lasting(tasks(BATCH * iterations, seed), unit_s)
                for name in COMPARED:
                    curve, _ = await train(service, WAYS[name], engines, given, iterations, seed)
                    curves[name].append(curve)
    finally:
        server.end()
    tokens = BATCH * GROUP * LENGTH
    said = [
        f"{name}: at most {tokens * statistics.median(each.rate for each in of):,.0f} tokens/s, reward 0.5 after "
        f"{statistics.median(each.half for each in of):.0f} s, "
        f"at the end {statistics.mean(statistics.mean(each.rewards[-4:]) for each in of):.3f}, "
        f"{sum(each.dropped for each in of):.0f} tasks lost"
        for name, of in curves.items()
    ]
    setting = f"a step takes {step_s:.2f} s, sampling {waited:.2f} s, a median environment {unit_s:.3f} s"
    detail = f"{'; '.join(said)}; {setting}; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    name, samples = (
        f"{RECOMMENDED} against sync, {engines}, real",
        {way: [c.rate for c in curves[way]] for way in curves},
    )
    value, target = speedup(curves, RECOMMENDED, lambda c: c.rate), 1.7 if engines == TWO else 1.3
    return Figure(name, value, "x", target, detail=detail, samples=samples)


def measure(size: Size) -> list[Figure]:
    logging.getLogger("gradwire.rl").setLevel(logging.ERROR)
    figures = []
    for engines in (TWO, ONE):
        if size.wants(engines.partition(" ")[0]):
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                figures.append(asyncio.run(compare(Path(folder), engines, size)))
    return figures


if __name__ == "__main__":
    run_alone(measure, __doc__)
