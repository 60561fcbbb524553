"""Several clients on one base model: their batches go through it at once, and each gets what it gets alone."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.batches import SEVEN, VOCAB
from support.server import Server, free_port

pytestmark = pytest.mark.long

STEPS = 6
CLIENTS: list[tuple[str, dict[str, Any]]] = [
    ("causal_lm", {"rank": 4}),
    ("dpo", {"rank": 8, "alpha": 4.0}),
    ("grpo", {"rank": 2, "target_modules": ["q_proj", "v_proj", "up_proj"]}),
    ("enhanced_ppo", {"rank": 3}),
]


def grouped(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    return sum(sample.value for family in families for sample in family.samples
               if sample.name == "gradwire_grouped_operations_total")  # fmt: skip


async def train(run: gradwire.TrainingClient, loss_fn: str, seed: int) -> list[tuple[float, float, dict[str, float]]]:
    """Loss, gradient norm and metrics of each step, all steps submitted before the first is done."""
    make, loss_kwargs, _ = SEVEN[loss_fn]
    batch = make(np.random.default_rng(seed), 4, VOCAB)
    asked = [(run.forward_backward(batch, loss_fn, loss_kwargs), run.optim_step(learning_rate=1e-3))
             for _ in range(STEPS)]  # fmt: skip
    found = []
    for forward_backward, optim_step in asked:
        result, step = await forward_backward, await optim_step
        assert result.loss is not None
        found.append((result.loss, step.grad_norm, result.metrics))
    return found


async def clients_of(stack: AsyncExitStack, address: str) -> list[gradwire.TrainingClient]:
    runs = []
    for seed, (loss_fn, lora) in enumerate(CLIENTS):
        service = await stack.enter_async_context(gradwire.connect(address))
        runs.append(await service.create_run("tiny", lora=lora, head=SEVEN[loss_fn][2], seed=seed, lanes=1))
    return runs


async def test_four_clients_together_get_what_each_gets_alone(
    server: Server, tiny_model_path: Path, tmp_path: Path
) -> None:
    """On a CPU a server does not group runs unless it is told to."""
    metrics = f"127.0.0.1:{free_port()}"
    together = Server(
        tiny_model_path, tmp_path / "together", "--group-runs", "on", "--metrics-address", metrics
    ).start()
    try:
        async with AsyncExitStack() as stack:
            expected = [
                await train(run, loss_fn, seed)
                for seed, (run, (loss_fn, _)) in enumerate(
                    zip(await clients_of(stack, server.address), CLIENTS, strict=True)
                )
            ]
            runs = await clients_of(stack, together.address)
            found = await asyncio.gather(
                *(train(run, loss_fn, seed) for seed, (run, (loss_fn, _)) in enumerate(zip(runs, CLIENTS, strict=True)))
            )
        assert await asyncio.to_thread(grouped, metrics) >= STEPS
        for mine, theirs in zip(found, expected, strict=True):
            for (loss, norm, values), (loss_alone, norm_alone, values_alone) in zip(mine, theirs, strict=True):
                assert loss == pytest.approx(loss_alone, rel=1e-3, abs=1e-4)
                assert norm == pytest.approx(norm_alone, rel=1e-2)
                assert values == pytest.approx(values_alone, rel=1e-2, abs=1e-3, nan_ok=True)
    finally:
        code = together.end()
    assert code == 0


@pytest.mark.slow  # a server of its own
async def test_a_group_takes_all_that_wait(tiny_model_path: Path, tmp_path: Path) -> None:
    """More than the few requests that an engine reads ahead otherwise."""
    server = Server(tiny_model_path, tmp_path / "state", "--group-runs", "on").start()
    try:
        async with gradwire.connect(server.address) as service:
            runs = [await service.create_run("tiny", lora=2, seed=seed, lanes=1) for seed in range(12)]
            largest = 0
            for _ in range(5):
                steps = [run.train_step({"input_ids": [[5, 6, 7, 8]]}, "causal_lm") for run in runs]
                largest = max([largest, *[(await step).grouped_runs for step in steps]])
    finally:
        code = server.end()
    assert largest > 5 and code == 0
