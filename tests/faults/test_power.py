"""The power goes at random moments: what no fsync confirmed is gone, and nothing that was acknowledged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gradwire
import pytest
from support.forgetful_disk import Power, unavailable
from support.stage import Stage, kill, wait_for

from tests.faults.conftest import COUNT, SETTINGS, Calm
from tests.faults.test_kills import disturb

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


@pytest.fixture
def power(tmp_path: Path, rng: random.Random) -> Iterator[Power]:
    power = Power(tmp_path / "power")
    power.on(rng.getrandbits(32))
    yield power
    power.close()


@pytest.fixture
def stage(tiny_model_path: Path, tmp_path: Path, power: Power) -> Iterator[Stage]:
    """A server, its engine included, whose state folder lies on the disk that forgets."""
    stage = Stage(tiny_model_path, tmp_path / "stage", state_dir=power.mount / "state").start()
    yield stage
    stage.close()


def ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def outage(stage: Stage, power: Power, rng: random.Random) -> str:
    """Everything on the machine stops at once; the server starts again on what the disk held. The program that trains
    runs elsewhere."""
    engine = stage.engine_pid
    kill(stage.server.process.pid)
    if engine is not None and kill(engine):
        wait_for("the engine's end", partial(ended, engine))
    stage.server.process.wait()
    forgotten = power.cut()
    power.on(rng.getrandbits(32))
    stage.restart_server()
    return forgotten


def outages(stage: Stage, power: Power, times: int, rng: random.Random, calm: Calm) -> None:
    def cut() -> str:
        print(f"power cut: {outage(stage, power, rng)}")
        return "power cut"

    disturb(stage, times, rng, calm, cut, pause_s=0.5)


@pytest.mark.slow
def test_power_cuts_at_random_moments_cost_nothing(
    stage: Stage, power: Power, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    outages(stage, power, 3, rng, left_alone(seed, COUNT))


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_fifty_power_cuts_at_random_moments_cost_nothing(
    stage: Stage, power: Power, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    outages(stage, power, int(os.environ.get("GRADWIRE_CUTS", "50")), rng, left_alone(seed, 500))


def test_a_fork_and_a_checkpoint_are_there_after_a_power_cut(stage: Stage, power: Power, rng: random.Random) -> None:
    batch = {"input_ids": [[4, 5, 6, 7]]}
    with gradwire.sync.connect(stage.server.address, connect_timeout=300, reconnect_timeout=300) as service:
        run = service.create_run("tiny", **SETTINGS)
        run.forward_backward(batch, "causal_lm").result(300)
        run.optim_step(learning_rate=1e-2).result(300)
        checkpoint = run.save_checkpoint("kept").result(300)
        fork = service.fork_run(checkpoint)
        before = fork.forward(batch, "causal_lm").result(300).loss
        print(outage(stage, power, rng))
        assert fork.forward(batch, "causal_lm").result(300).loss == before
        run.forward_backward(batch, "causal_lm").result(300)
        run.optim_step(learning_rate=1e-2).result(300)
        run.load_checkpoint(checkpoint).result(300)
        assert run.forward(batch, "causal_lm").result(300).loss == before


def test_the_disk_forgets_what_nobody_confirmed(power: Power, rng: random.Random) -> None:
    """The file system itself: without it losing something, the tests above would show nothing."""
    rounds = 12
    lost = kept_some = 0
    for number in range(rounds):
        confirmed, unconfirmed, unnamed = (power.mount / f"{name}-{number}" for name in ("yes", "content", "name"))
        for path in (confirmed, unconfirmed, unnamed):
            with path.open("wb") as file:
                file.write(b"a" * 10_000)
                file.flush()
                if path != unconfirmed:
                    os.fsync(file.fileno())
            if path == unconfirmed:
                descriptor = os.open(power.mount, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        power.cut()
        power.on(rng.getrandbits(32))
        assert confirmed.read_bytes() == b"a" * 10_000
        content = unconfirmed.read_bytes()
        assert len(content) in (0, 10_000) and set(content) <= set(b"a\0")
        lost += not content and not unnamed.exists()
        kept_some += bool(content) or unnamed.exists()
        if unnamed.exists():
            assert unnamed.read_bytes() == b"a" * 10_000
    assert lost + kept_some == rounds and lost and kept_some
