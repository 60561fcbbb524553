"""Stopping an operation that is being executed: by its writer, by its deadline, by the deletion of its run.

The run is then as it was before the operation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from support.server import Server

STOPPED_S = 5.0
"""Seconds within which an operation ends that takes many times as long; a second on an idle machine."""
ROWS = {"input_ids": [[4 + (row + place) % 50 for place in range(200)] for row in range(3000)]}
SMALL = {"input_ids": [[4, 5, 6, 7]]}


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tiny_model_path, tmp_path_factory.mktemp("stopping"), "--microbatch-tokens", "1024").start()
    yield running
    assert running.end() == 0


@pytest.fixture
async def service(server: Server) -> AsyncIterator[Any]:
    async with gradwire.connect(server.address) as service:
        yield service


def long_sample(run: gradwire.TrainingClient, **settings: Any) -> gradwire.Future[Any]:
    return run.sample([[4, 5, 6]] * 64, n=8, max_tokens=240, ignore_eos=True, **settings)


def long_loss(run: gradwire.TrainingClient, **settings: Any) -> gradwire.Future[Any]:
    return run.forward_backward(ROWS, "causal_lm", **settings)


LONG = {"sample": long_sample, "forward_backward": long_loss}


async def begun(service: Any) -> None:
    """Waits until the engine's heartbeat tells that it computes."""
    async with asyncio.timeout(60):
        while (await service.server_info()).engine.busy < 0.5:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.1)


async def what_follows(run: gradwire.TrainingClient) -> tuple[Any, ...]:
    """A sample, a loss with dropout and a step: equal for runs in the same state."""
    sampled, loss, step = await gradwire.gather(
        run.sample([[4, 5, 6]], max_tokens=8, ignore_eos=True, seed=5),
        run.forward_backward(SMALL, "causal_lm"),
        run.optim_step(learning_rate=1e-2),
    )
    return list(sampled.samples[0][0].token_ids), loss.loss, step.grad_norm


async def run_of(service: Any) -> gradwire.TrainingClient:
    run = await service.create_run("tiny", lora={"rank": 2, "dropout": 0.1}, seed=3)
    await run.forward_backward(SMALL, "causal_lm")
    return run


@pytest.mark.parametrize("kind", LONG)
async def test_cancelling_a_running_operation_stops_it_and_leaves_the_run_as_it_was(service: Any, kind: str) -> None:
    expected = await what_follows(await run_of(service))
    run = await run_of(service)
    future = LONG[kind](run)
    await begun(service)
    assert not future.done()
    started = time.monotonic()
    future.cancel()
    with pytest.raises(gradwire.OperationCancelledError, match="while it was executed"):
        await future
    assert time.monotonic() - started < STOPPED_S
    assert await what_follows(run) == expected


@pytest.mark.parametrize("kind", LONG)
async def test_a_deadline_ends_a_running_operation_and_those_behind_it_fail_with_it(service: Any, kind: str) -> None:
    expected = await what_follows(await run_of(service))
    run = await run_of(service)
    started = time.monotonic()
    future, behind = LONG[kind](run, timeout=1.5), run.forward_backward(SMALL, "causal_lm")
    with pytest.raises(gradwire.DeadlineExceededError, match="timeout"):
        await future
    assert 1.0 < time.monotonic() - started < 1.5 + STOPPED_S
    with pytest.raises(gradwire.AbortedPredecessorError):
        await behind
    assert await what_follows(run) == expected


async def test_a_deadline_that_passes_in_the_queue_fails_the_operation_at_its_turn(service: Any) -> None:
    run = await run_of(service)
    first, second = long_sample(run), run.forward_backward(SMALL, "causal_lm", timeout=0.2)
    await asyncio.sleep(1.0)
    first.cancel()
    with pytest.raises(gradwire.DeadlineExceededError):
        await second
    with pytest.raises(gradwire.OperationCancelledError):
        await first
    with pytest.raises(gradwire.InvalidArgumentError, match="timeout is -1"):
        await run.forward_backward(SMALL, "causal_lm", timeout=-1)
    assert (await run.optim_step(learning_rate=1e-2, timeout=60)).step == 1


@pytest.mark.parametrize("kind", LONG)
async def test_deleting_a_run_ends_what_it_is_doing(service: Any, kind: str) -> None:
    run, other = await run_of(service), await run_of(service)
    future = LONG[kind](run)
    await begun(service)
    started = time.monotonic()
    await service.delete_run(run.run_id)
    with pytest.raises(gradwire.UnknownRunError):
        await future
    await other.forward_backward(SMALL, "causal_lm")
    assert time.monotonic() - started < STOPPED_S
