"""Optimizer steps of several runs at once: the bits and the errors of each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire_proto.v1.training_pb2 import OptimStep
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training import optimizer_step
from gradwire_server.engine.training.optimizer import Optimizer, StepOutcome
from gradwire_server.engine.training.optimizer_step import RunStep, take_steps
from support.training import take_step

COMMON: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_grad_norm": 1.0}
SETTINGS = [
    OptimStep(learning_rate=1e-2, **COMMON),
    OptimStep(learning_rate=1e-2, weight_decay=0.1, **COMMON),
    OptimStep(learning_rate=1e-2, head_learning_rate=1e-1, decay_matrices_only=True, weight_decay=0.1, **COMMON),
    OptimStep(learning_rate=1e-2, optimizer="sgd", **COMMON),
    OptimStep(learning_rate=1e-2, optimizer="muon", **COMMON),
    OptimStep(learning_rate=3e-3, **(COMMON | {"max_grad_norm": 0.0})),
]
COUNTS = [7.0, 3.0, 11.0, 2.0, 5.0, 1.0]
"""Of the gradients; the last one's factor is 1."""


def accumulate(run: EngineRun, seed: int, count: float, value: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = {
        name: torch.randn(master.shape, generator=generator) if value is None else torch.full_like(master, value)
        for name, master in run.policy.masters().items()
    }
    run.accumulator.merge({("loss", "tokens"): gradients}, {("loss", "tokens"): count})


def state(run: EngineRun) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.tensors().items()}


@pytest.fixture
def sides(make_run: Any) -> list[list[EngineRun]]:
    """The same runs twice, with heads and adapters of several ranks."""
    return [
        [
            make_run(lora={"rank": 1 + seed % 3}, seed=seed, head="value" if seed == 2 else "")
            for seed in range(len(SETTINGS))
        ]
        for _ in range(2)
    ]


def test_bits_and_outcomes_are_those_of_each_alone(sides: list[list[EngineRun]]) -> None:
    alone, together = sides
    for turn in range(3):
        for runs in sides:
            for seed, (run, count) in enumerate(zip(runs, COUNTS, strict=True)):
                accumulate(run, 100 * turn + seed, count)
        expected = [take_step(run, each) for run, each in zip(alone, SETTINGS, strict=True)]
        found = take_steps(
            [RunStep(run.optimizer, run.accumulator, each) for run, each in zip(together, SETTINGS, strict=True)]
        )
        assert found == expected
        for mine, theirs in zip(together, alone, strict=True):
            assert mine.accumulator.empty
            ours, others = state(mine), state(theirs)
            assert ours.keys() == others.keys()
            assert all(torch.equal(tensor, others[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("clips", [False, True])
def test_runs_with_the_same_hyperparameters_share_a_call_with_the_bits_of_each_alone(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, clips: bool
) -> None:
    """Also where one factor is that of all gradients, as of rows of one length that are not clipped."""
    alone, together = ([make_run(lora={"rank": 1 + seed}, seed=seed) for seed in range(3)] for _ in range(2))
    settings = OptimStep(learning_rate=1e-2, **(COMMON | {"max_grad_norm": 1.0 if clips else 0.0}))
    calls: list[Any] = []
    fused = optimizer_step.fused_adamw
    monkeypatch.setattr(optimizer_step, "fused_adamw", lambda *given: calls.append(given) or fused(*given))
    for turn in range(2):
        for runs in (alone, together):
            for seed, run in enumerate(runs):
                accumulate(run, 10 * turn + seed, 5.0)
        expected = [take_step(run, settings) for run in alone]
        calls.clear()
        found = take_steps([RunStep(run.optimizer, run.accumulator, settings) for run in together])
        assert found == expected
        assert len(calls) == 1
    for mine, theirs in zip(together, alone, strict=True):
        ours, others = state(mine), state(theirs)
        assert all(torch.equal(tensor, others[name]) for name, tensor in ours.items())


def test_moments_are_looked_for_once_in_a_step(sides: list[list[EngineRun]], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Optimizer] = []
    allocate = Optimizer.allocate
    monkeypatch.setattr(Optimizer, "allocate", lambda self, step: calls.append(self) or allocate(self, step))
    runs = sides[0]
    for seed, (run, count) in enumerate(zip(runs, COUNTS, strict=True)):
        accumulate(run, seed, count)
    take_steps([RunStep(run.optimizer, run.accumulator, each) for run, each in zip(runs, SETTINGS, strict=True)])
    assert calls == [run.optimizer for run in runs]


def test_the_trouble_of_one_costs_the_others_nothing(sides: list[list[EngineRun]]) -> None:
    alone, together = sides
    for runs in sides:
        accumulate(runs[0], 0, 7.0)
        accumulate(runs[1], 1, 3.0, value=float("nan"))
        accumulate(runs[2], 2, 3.0, value=float("inf"))
    skips = OptimStep(learning_rate=1e-2, skip_nonfinite=True, **COMMON)
    wrong = OptimStep(learning_rate=-1.0, **COMMON)
    calls = [SETTINGS[0], SETTINGS[1], skips, SETTINGS[0], wrong]
    before = [state(run) for run in together]
    found = take_steps(
        [RunStep(run.optimizer, run.accumulator, call) for run, call in zip(together, calls, strict=False)]
    )
    assert found[0] == take_step(alone[0], calls[0])
    assert all(torch.equal(tensor, state(alone[0])[name]) for name, tensor in state(together[0]).items())
    assert isinstance(found[2], StepOutcome) and found[2].skipped
    for number in (1, 3, 4):
        error = found[number]
        with pytest.raises(OperationError) as alone_error:
            take_step(alone[number], calls[number])
        assert isinstance(error, OperationError)
        assert (error.code, error.message, error.field) == (
            alone_error.value.code, alone_error.value.message, alone_error.value.field
        )  # fmt: skip
    for number in range(1, 5):
        assert together[number].accumulator.empty
        after = state(together[number])
        weights = [name for name in before[number] if name.startswith("weights:")]
        assert all(torch.equal(after[name], before[number][name]) for name in weights)
