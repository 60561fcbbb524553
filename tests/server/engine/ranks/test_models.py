"""Mixtures of experts, and runs that are paged to the disk, on two ranks and in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import Driver, EngineProcess, LocalEngine
from support.mixtures import mixture
from support.ranks import CAUSAL, ROWS, STEP, Engines

pytestmark = pytest.mark.slow  # a group of its own


@pytest.fixture(scope="module")
def paging(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines with room for no second run on the device or in the memory of the host."""
    folder = tmp_path_factory.mktemp("paging")
    settings: dict[str, Any] = {"microbatch_tokens": 16, "threads": 1, "run_memory": 1, "run_host_memory": 1}
    models = {"tiny": tiny_model_path, "experts": mixture(folder / "experts", "Qwen3-MoE")}
    group = EngineProcess(models, folder / "group", ranks=2, **settings)
    yield Engines(LocalEngine(models, folder / "one", **settings), group, folder)
    group.kill()


def by_turns(engine: Driver, prefix: str, **config: Any) -> list[object]:
    """What an engine says of two runs that are trained by turns, so that each leaves the device for the other."""
    runs = [f"{prefix}-{number}" for number in range(2)]
    for number, run_id in enumerate(runs):
        engine.create(run_id, seed=number, lora={"rank": 4}, lanes=2, **config)
    found: list[object] = []
    for _ in range(2):
        for run_id in runs:
            loss = engine.do(run_id, ROWS, forward_backward=CAUSAL).proto.loss
            found += [loss.loss, sorted(loss.metrics.items())]
        found += [engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm for run_id in runs]
    for run_id in runs:
        engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now"))
    return found


@pytest.mark.parametrize("config", [{}, {"base_model": "experts"}], ids=["paged", "experts"])
def test_runs_that_leave_the_device_have_the_bits_of_one_process(
    paging: Engines, config: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prefix = request.node.callspec.id
    assert by_turns(paging.one, prefix, **config) == by_turns(paging.group, prefix, **config)
    for number in range(2):
        assert paging.weights("one", f"{prefix}-{number}") == paging.weights("group", f"{prefix}-{number}")
