"""What the faults are compared with: the same training loop, left alone."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.front import start as start  # the server over an engine without a model
from support.stage import Stage, wait_for

COUNT = 100
"""Operations of the short forms, which are compared with one and the same calm run."""
SETTINGS: dict[str, Any] = {"seed": 7, "lora": {"rank": 4, "dropout": 0.1}, "lanes": 2}
"""Dropout draws from the run's generators, which must survive as well; with two lanes two ranks have the same bits."""


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@dataclass(frozen=True)
class Calm:
    """What a training loop gives that nobody disturbs."""

    seed: int
    count: int
    results: dict[int, Any]
    state: dict[str, Any]


@pytest.fixture(scope="session")
def left_alone(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Calm]:
    """(seed, operations) -> what comes out; one of the processes that run tests finds it out for all."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @functools.cache
    def known(seed: int, count: int) -> Calm:
        file = folder / f"calm-{seed}-{count}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(asdict(run(seed, count))))
            found = json.loads(file.read_text())
        results = {int(number): result for number, result in found["results"].items()}
        return Calm(seed, count, results, found["state"])

    def run(seed: int, count: int) -> Calm:
        stage = Stage(tiny_model_path, tmp_path_factory.mktemp("calm")).start()
        try:
            run_id = stage.create(**SETTINGS)
            stage.run_client(run_id, seed, count)
            wait_for("the loop that is left alone", stage.finished, 600)
            results = stage.results()
            assert sorted(results) == list(range(1, count + 1))
            return Calm(seed, count, results, stage.state_of(run_id))
        finally:
            stage.close()

    return known


@pytest.fixture(scope="module")
def stage(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tiny_model_path, tmp_path_factory.mktemp("stage")).start()
    yield stage
    stage.close()
