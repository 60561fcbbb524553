"""Each rank of an engine killed, stopped, ended and failing at every named point: nothing lost, and in the end the bits
of one process that was left alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gradwire_server.crash_points import POINTS
from support.stage import Stage

from tests.faults.conftest import Calm
from tests.faults.test_kills import die_at

pytestmark = pytest.mark.long

OF_RANK_0 = ("engine.inside_checkpoint", "engine.before_rename", "engine.after_rename")
"""Points that only rank 0 comes to; an error there is an answer, not a fault."""
STRIKES = [
    f"{point} {how} {rank}"
    for point in POINTS
    for how in ("kill", "stop", "exit", "raise")
    for rank in (0, 1)
    if point.startswith("engine.") and not (point in OF_RANK_0 and (rank or how == "raise"))
]


@pytest.fixture(scope="module")
def group(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tiny_model_path, tmp_path_factory.mktemp("group"), "--ranks", "2", "--device", "cpu").start()
    yield stage
    stage.close()


@pytest.mark.slow  # a group starts after each of them
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(3))
def test_whatever_happens_to_a_rank_costs_nothing(
    group: Stage, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm], part: int
) -> None:
    points = STRIKES[part::3]
    rng.shuffle(points)
    die_at(group, tuple(points), left_alone(seed, 60 * len(points)))  # 30 to 60 operations pass between two
