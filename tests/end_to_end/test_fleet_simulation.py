"""The simulated fleet in small, against what was measured and against a real server that loses an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import gradwire
import pytest
from support.server import Server, free_port

from tests.server.observability.test_metrics import scrape

pytest.importorskip("simpy", reason="needs simpy: pip install 'gradwire[dev]'")

from simulate_fleet import Fleet, Simulation, checks

pytestmark = pytest.mark.slow

CHECKPOINT_STEPS = 4
ENGINES, RUNS = 2, 8


def test_small_cases_agree_with_the_benchmarks() -> None:
    for what, simulated, measured in checks():
        assert simulated == pytest.approx(measured, rel=0.2), what


async def test_what_a_lost_engine_costs_is_what_the_simulation_says(tiny_model_path: Path, tmp_path: Path) -> None:
    """In counts: runs that are lost, and steps that are repeated for each. Every distance to the checkpoint occurs."""
    fleet = Fleet(
        runs=500, active=1.0, session_s=0, pause_s=10.0, tokens=1.0, gpus=ENGINES, fronts=1, room=500, lose=1,
        checkpoint_steps=CHECKPOINT_STEPS, run_bytes=1e6, lease_s=1.0,
    )  # fmt: skip
    simulation = await asyncio.to_thread(Simulation(fleet).run)
    metrics = f"127.0.0.1:{free_port()}"
    flags = ("--engines", str(ENGINES), "--threads", "1", "--checkpoint-every-steps", "1000")
    server = Server(tiny_model_path, tmp_path, *flags, "--metrics-address", metrics).start()
    try:
        async with gradwire.connect(server.address) as service:
            runs = [await service.create_run("tiny", lora=2, seed=number) for number in range(RUNS)]
            places = [(await run.info()).engine for run in runs]
            for number, run in enumerate(runs):
                for step in range(1, 1 + CHECKPOINT_STEPS + places[:number].count(places[number])):
                    await take_step(run)
                    if step % CHECKPOINT_STEPS == 0:
                        await run.save_checkpoint(f"step-{step}")
            before = scrape(metrics)["gradwire_replayed_operations_total"]
            os.kill(server.engine_pids[1], signal.SIGKILL)
            for run in runs:
                await take_step(run)
            repeated = (scrape(metrics)["gradwire_replayed_operations_total"] - before) / 2
    finally:
        server.end()
    lost = places.count(1)
    assert len(simulation.lost) / 500 == pytest.approx(lost / RUNS, rel=0.2)
    assert sum(simulation.lost.values()) / len(simulation.lost) == pytest.approx(repeated / lost, rel=0.2)


async def take_step(run: gradwire.TrainingClient) -> None:
    await run.forward_backward([{"input_ids": [5, 6, 7, 8]}], "causal_lm")
    await run.optim_step(learning_rate=1e-3)
