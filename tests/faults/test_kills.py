"""Client, engine and server killed at every named point and at random moments: nothing lost, nothing twice, and in the
end the same bits as when nobody was killed."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gradwire
import pytest
from gradwire_server.crash_points import POINTS
from support.program import PIPELINED
from support.stage import Stage, kill, wait_for

from tests.faults.conftest import COUNT, SETTINGS, Calm

pytestmark = pytest.mark.long

SHORT = ("operation.before_ack", "engine.after_rename", "result.before_commit")


def compare(stage: Stage, run_id: str, calm: Calm) -> None:
    results = stage.results()
    differ = [number for number, value in results.items() if calm.results[number] != value]
    assert not differ, f"results that differ from those of the run left alone: {differ[:10]}"
    accepted, applied, unfinished = stage.query(
        "SELECT accepted_seq, applied_seq, (SELECT count(*) FROM operations WHERE run_id = runs.run_id AND status = 0)"
        " FROM runs WHERE run_id = ?",
        run_id,
    )[0]
    assert (accepted, applied, unfinished) == (calm.count, calm.count, 0)
    assert stage.state_of(run_id) == calm.state
    print(f"{calm.count} operations: {len(results)} results seen and equal, state equal bit for bit, nothing lost")


def die_at(stage: Stage, points: tuple[str, ...], calm: Calm) -> None:
    """Dies at one point after the other. An operation that kills the engine twice is quarantined, and rightly: between
    two deaths of the engine the run gets past whatever was on its way at the first."""
    run_id = stage.create(**SETTINGS)
    stage.out.unlink(missing_ok=True)
    stage.crash_file.write_text(points[0])
    stage.run_client(run_id, calm.seed, calm.count)
    safe = 0
    for point, following in zip(points, (*points[1:], ""), strict=True):
        wait_for(f"a death at {point}", lambda: stage.finished() or not stage.crash_file.exists())
        assert not stage.crash_file.exists(), f"the loop ended before {point} was reached"
        reached = stage.applied(run_id)
        if point.startswith("engine."):
            safe = reached + PIPELINED + 1
        if following and not following.startswith("engine."):
            stage.crash_file.write_text(following)
        if not point.startswith("engine."):
            wait_for("the server's end", lambda: stage.server_died)
            stage.restart_server()
        if following.startswith("engine."):
            wait_for("the run to get on", partial(stage.got_to, run_id, safe))
            stage.crash_file.write_text(following)
        print(f"died at {point}, {reached} operations applied")
    wait_for("the loop's end", stage.finished)
    compare(stage, run_id, calm)


def test_a_death_at_a_named_point_costs_nothing(
    stage: Stage, seed: int, left_alone: Callable[[int, int], Calm]
) -> None:
    die_at(stage, SHORT, left_alone(seed, COUNT))


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_a_death_at_every_named_point_costs_nothing(
    stage: Stage, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    points = 2 * [point for point in POINTS if not point.startswith("store.")]  # of an object store: test_store
    rng.shuffle(points)
    die_at(stage, tuple(points), left_alone(seed, 40 * len(points)))


def disturb(
    stage: Stage, times: int, rng: random.Random, calm: Calm, strike: Callable[[], str], pause_s: float = 0.3
) -> None:
    """Strike so many times at random moments of trainings, which must end as the calm one did.

    Args:
        strike: Says what it did, or "" where there was nothing to strike.
    """
    struck: Counter[str] = Counter()
    run_id, runs, before = "", 0, 0
    began = time.monotonic()

    def under_way() -> bool:
        return stage.finished() or stage.applied(run_id) > before

    while struck.total() < times:
        if not run_id:
            run_id, before, runs = stage.create(**SETTINGS), 0, runs + 1
            stage.out.unlink(missing_ok=True)
            stage.run_client(run_id, calm.seed, calm.count)
        wait_for("an operation to be applied", under_way)
        time.sleep(rng.uniform(0, pause_s))
        if stage.finished():
            print(f"so far: {dict(struck)}, {time.monotonic() - began:.0f} s")
            compare(stage, run_id, calm)
            run_id = ""
            continue
        before = stage.applied(run_id)
        what = strike()
        if what:
            struck[what] += 1
    if run_id:
        wait_for("the loop's end", stage.finished)
        compare(stage, run_id, calm)
    took = time.monotonic() - began
    print(f"{dict(struck)} in {runs} runs of {calm.count} operations, {took:.0f} s: nothing lost or twice")


def storm(stage: Stage, kills: int, rng: random.Random, calm: Calm) -> None:
    def kill_one() -> str:
        who = rng.choice(("client", "client", "engine", "server"))
        assert stage.client is not None
        pid = {"client": stage.client.pid, "engine": stage.engine_pid, "server": stage.server.process.pid}[who]
        if pid is None or not kill(pid):
            return ""
        if who == "server":
            stage.restart_server()
        elif who == "client":
            stage.restart_client()
        return f"kill -9 of {who}"

    disturb(stage, kills, rng, calm, kill_one)


@pytest.mark.slow
def test_kills_at_random_moments_cost_nothing(
    stage: Stage, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    storm(stage, 3, rng, left_alone(seed, COUNT))


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_two_hundred_kills_at_random_moments_cost_nothing(
    stage: Stage, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    storm(stage, int(os.environ.get("GRADWIRE_KILLS", "200")), rng, left_alone(seed, 500))


DEADLY = """
import os
from gradwire_losses.fields import INPUT_IDS
from gradwire_losses.registry import register_loss

@register_loss("deadly", fields=[INPUT_IDS], metrics={}, reference="none", formula="none")
def deadly(*arguments, **named):
    os._exit(3)
"""


@pytest.mark.faults
def test_a_loss_that_kills_the_engine_is_quarantined(tiny_model_path: Path, tmp_path: Path) -> None:
    losses = tmp_path / "deadly.py"
    losses.write_text(DEADLY)
    stage = Stage(tiny_model_path, tmp_path / "stage", "--losses", str(losses)).start()
    batch = {"input_ids": [[4, 5, 6, 7]]}
    try:
        with gradwire.sync.connect(stage.server.address) as service:
            run = service.create_run("tiny", **SETTINGS)
            before = run.forward_backward(batch, "causal_lm")
            deadly, step = run.forward_backward(batch, "deadly"), run.optim_step()
            assert before.result(300).loss > 0
            with pytest.raises(gradwire.QuarantinedError, match="killed the engine 2 times"):
                deadly.result(300)
            with pytest.raises(gradwire.AbortedPredecessorError):
                step.result(300)
            after = run.train_step(batch, "causal_lm").result(300)
            assert (after.step, after.num_accumulated) == (1, 1)  # the step that was aborted ended its accumulation
    finally:
        stage.close()
