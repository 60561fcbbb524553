"""The comparison with other servers: what needs no environment of its own always, the rest where it is installed."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import ROOT
from benchmarks.report import Size
from benchmarks.rivals import servers
from benchmarks.rivals.__main__ import BEGIN, END
from benchmarks.rivals.compare import EIGHT, MANY, ONE, RIVALS, Rival, check, compare, figure
from benchmarks.rivals.sides import Measured
from benchmarks.rivals.workload import DIFFERENT_BATCHES, WORKS

SMOKE = Size(repeats=1, smoke=True)
BY_NAME = {rival.name: rival for rival in RIVALS}
SERVERS = [pytest.param(rival, id=rival.name) for rival in RIVALS if rival.python is not None]


def falling(scale: float = 1.0) -> Measured:
    losses = [8.0 * scale] + [8.0 - 0.1 * step for step in range(1, 3 * DIFFERENT_BATCHES)]
    return Measured([10.0, 12.0, 11.0], [9.0, 9.0, 9.0], losses)


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds, where nothing else computes
def test_a_bare_loop_computes_the_same_losses_as_the_service() -> None:
    (found,) = asyncio.run(compare(BY_NAME["peft loop"], Size(repeats=1, smoke=True, only=(ONE,))))
    assert found.value > 0
    assert not found.at_least and found.target == 1.5
    assert "loss a token" in found.detail


@pytest.mark.slow
@pytest.mark.timeout(1200)  # seconds, where nothing else computes
@pytest.mark.parametrize("rival", SERVERS)
def test_a_rival_trains_the_same_model(rival: Rival) -> None:
    assert rival.python is not None
    if not (rival.python.exists() and servers.TINKER_PYTHON.exists()):
        pytest.skip(f"{rival.python} and {servers.TINKER_PYTHON} are made by `make rivals`")
    found = asyncio.run(compare(rival, Size(repeats=1, smoke=True, only=(ONE, EIGHT))))
    assert len(found) == 4  # by our own SDK and by Tinker's
    assert all(each.value > 0 for each in found)


def test_no_token_is_the_padding_that_a_rival_takes_it_for() -> None:
    for work in WORKS:
        batches = work.batches()
        assert batches == work.batches()
        assert min(min(row) for step in batches for run in step for row in run) > 0
        assert {len(row) for step in batches for run in step for row in run} == {work.tokens + 1}


def test_sides_that_did_different_work_are_not_compared() -> None:
    check({"ours": falling(), "TuFT": falling()}, "TuFT")
    with pytest.raises(AssertionError, match="step 0"):
        check({"ours": falling(), "TuFT": falling(1.01)}, "TuFT")
    flat = Measured(losses=[8.0] * 3 * DIFFERENT_BATCHES)
    with pytest.raises(AssertionError, match="TuFT has not learned"):
        check({"ours": falling(), "TuFT": flat}, "TuFT")
    other = falling()
    other.losses[-1] += 0.1
    check({"ours": falling(), "TuFT": other}, "TuFT")
    with pytest.raises(AssertionError, match="step 11"):
        check({"ours": falling(), "peft loop": other}, "peft loop")


def test_a_ratio_is_theirs_to_ours_and_a_loops_ours_to_its() -> None:
    slow = falling()
    slow.wall_ms = [30.0, 36.0, 55.0]
    work = WORKS[0]
    against = figure(work, "ours", BY_NAME["TuFT"], {"ours": falling(), "TuFT": slow})
    assert (against.value, against.target, against.reached) == (3.0, 3.0, True)
    over = figure(work, "ours", BY_NAME["peft loop"], {"ours": slow, "peft loop": falling()})
    assert (over.value, over.target, over.reached) == (3.0, 1.5, False)
    assert {ONE, EIGHT, MANY} == set(BY_NAME["TuFT"].targets)


def test_the_page_has_a_place_for_the_rivals() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
