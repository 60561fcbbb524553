"""4,096 runs of mixed rank, targets and alpha on one base, 64 of them active at a time, within small budgets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_proto.v1.training_pb2 import LoraSettings, OptimStep, RunConfig
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.packed import PackedLayout
from gradwire_server.engine.state.residency import Residency
from gradwire_server.engine.state.snapshot import capture
from support.training import take_step

TARGETS: tuple[list[str], ...] = ([], ["q_proj", "v_proj"], ["down_proj"], ["o_proj", "up_proj", "k_proj"])
STEP = OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, max_grad_norm=1.0)
ACTIVE = 64


def new_run(pool: ModelPool, number: int, name: str) -> EngineRun:
    lora: dict[str, Any] = {"rank": 1 + number % 7, "alpha": 1.0 + number % 5, "target_modules": TARGETS[number % 4]}
    return EngineRun(pool, name, RunConfig(base_model="tiny", seed=number, lora=LoraSettings(**lora)))


def train(run: EngineRun, number: int) -> None:
    with run.rng():
        states = run.policy.hidden((torch.arange(9) * (number + 3)) % 64, torch.tensor([5, 4]), training=True)
        parameters = run.policy.trainable_parameters()
        found = torch.autograd.grad(states.sin().sum(), list(parameters.values()))
    gradients = {name: each.contiguous() for name, each in zip(parameters, found, strict=True)}
    run.accumulator.merge({("loss", "tokens"): gradients}, {("loss", "tokens"): 9.0})
    if number % 2:
        take_step(run, STEP)


def many(model_path: Path, folder: Path, count: int) -> None:
    pool = ModelPool({"tiny": str(model_path)})
    runs = [new_run(pool, number, f"run-{number}") for number in range(count)]
    budget = 16 * max(PackedLayout.of(run.tensors()).nbytes for run in runs[:28])
    moving = Residency(folder, budget, budget)
    for run in runs:
        moving.add(run)
    most = 0
    order = list(range(count))
    random.Random(7).shuffle(order)
    for first in range(0, count, ACTIVE):
        active = order[first : first + ACTIVE]
        for turn in range(3):
            for place, number in enumerate(active):
                moving.prefetch(runs[active[(place + 1) % len(active)]].run_id)
                with moving.executing([runs[number].run_id]):
                    moving.use(runs[number])
                    train(runs[number], turn)
                held = moving.held()
                most = max(most, held["device"].nbytes + held["host"].nbytes)
    assert most <= 3 * budget  # two budgets, and the runs that are being written, read and used
    assert moving.held()["disk"].runs > count - 3 * ACTIVE
    alone = ModelPool({"tiny": str(model_path)})
    for number in order[::37]:
        moving.use(runs[number])
        only = new_run(alone, number, "only")
        for turn in range(3):
            train(only, turn)
        found, expected = capture(runs[number]), capture(only)
        for file, tensors in expected.items():
            assert found[file].keys() == tensors.keys()
            assert all(torch.equal(found[file][name], each) for name, each in tensors.items()), (number, file)
        only.close()
    for run in runs:
        moving.remove(run.run_id)
        run.close()
    moving.close()
    assert pool.get("tiny").adapters is None and not folder.exists()


@pytest.mark.long
def test_many_runs(model_path: Path, tmp_path: Path) -> None:
    many(model_path, tmp_path / "spilled", 96)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_4096_runs(model_path: Path, tmp_path: Path) -> None:
    many(model_path, tmp_path / "spilled", 4096)
