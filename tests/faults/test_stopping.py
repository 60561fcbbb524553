"""Stopping an operation that is being executed: by its writer, by its deadline, by the deletion of its run.

The run is then as it was before the operation.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from support.server import Server

pytestmark = pytest.mark.long

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
    """Waits until an engine has computed between two heartbeats from now; what ended before counts in the first."""
    beats, ages_s, computes = Counter[int](), dict[int, float](), False
    async with asyncio.timeout(60):
        while not computes:
            await asyncio.sleep(0.1)
            for engine in (await service.server_info()).engines:
                beats[engine.number] += engine.heartbeat_age_s < ages_s.get(engine.number, math.inf)
                ages_s[engine.number] = engine.heartbeat_age_s
                computes = computes or (beats[engine.number] > 2 and engine.busy >= 0.5)


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
    print(f"a running {kind} was cancelled in {time.monotonic() - started:.2f} s")
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
    print(f"a running {kind} with a timeout of 1.5 s failed after {time.monotonic() - started:.2f} s")
    with pytest.raises(gradwire.AbortedPredecessorError):
        await behind
    assert await what_follows(run) == expected


async def test_a_deadline_that_passes_in_the_queue_fails_the_operation_then(service: Any) -> None:
    """Its turn has not come: those behind it that were submitted before are aborted at theirs, later ones are not."""
    run = await run_of(service)
    first = long_sample(run)
    second, behind = run.forward_backward(SMALL, "causal_lm", timeout=1.0), run.forward(SMALL)
    await run  # opened, and all three sent
    started = time.monotonic()
    with pytest.raises(gradwire.DeadlineExceededError, match="not begun") as expired:
        await second
    assert time.monotonic() - started < 1.0 + STOPPED_S
    assert not first.done() and not behind.done()
    print(f"a queued operation with a timeout of 1 s failed after {time.monotonic() - started:.2f} s")
    after = run.forward_backward(SMALL, "causal_lm")
    first.cancel()
    assert (await after).num_loss_tokens == 3
    with pytest.raises(gradwire.AbortedPredecessorError) as aborted:
        await behind
    assert aborted.value.cause_seq == expired.value.seq
    assert (await run.optim_step(learning_rate=1e-2, timeout=60)).step == 1
    with pytest.raises(gradwire.InvalidArgumentError, match="timeout is -1"):
        await run.forward_backward(SMALL, "causal_lm", timeout=-1)


async def test_a_deadline_that_is_told_early_hides_no_failure_before_it(service: Any) -> None:
    run = await run_of(service)
    first = long_sample(run)
    bad = run.forward_backward({"input_ids": [[4, 10**6]]}, "causal_lm")
    with pytest.raises(gradwire.DeadlineExceededError):
        await run.forward_backward(SMALL, "causal_lm", timeout=0.5)
    after, step = run.forward_backward(SMALL, "causal_lm"), run.optim_step(learning_rate=1e-2)
    assert not bad.done()
    first.cancel()
    with pytest.raises(gradwire.InvalidBatchError) as failed:
        await bad
    for future in (after, step):
        with pytest.raises(gradwire.AbortedPredecessorError) as aborted:
            await future
        assert aborted.value.cause_seq == failed.value.seq


async def test_a_queued_operation_is_cancelled_without_waiting_for_those_before_it(service: Any) -> None:
    expected = await what_follows(await run_of(service))
    run = await run_of(service)
    first, second = long_sample(run), run.forward_backward(SMALL, "causal_lm")
    await begun(service)
    started = time.monotonic()
    second.cancel()
    with pytest.raises(gradwire.OperationCancelledError):
        await second
    assert time.monotonic() - started < STOPPED_S and not first.done()
    print(f"a queued operation was cancelled in {time.monotonic() - started:.2f} s")
    first.cancel()
    assert await what_follows(run) == expected


async def test_every_operation_takes_a_timeout(service: Any, tmp_path: Path) -> None:
    run = await service.create_run("tiny", lora=2, head="value")
    before = [long_sample(run) for _ in range(4)]  # none of the others begins while these take their time

    def never(batch: Any, scores: Any) -> Any:
        raise AssertionError("its scores were not computed in time")

    # Each time is over before those of the operations in front of it, whose failure would abort it.
    left = [0.5 + 0.1 * place for place in range(12)]
    futures = [
        run.forward(SMALL, timeout=left.pop()),
        run.forward_backward_custom(SMALL, never, timeout=left.pop()),
        run.compute_logprobs(SMALL, timeout=left.pop()),
        run.compute_values(SMALL, timeout=left.pop()),
        run.compute_rewards(SMALL, timeout=left.pop()),
        run.update_reference(timeout=left.pop()),
        run.save_checkpoint("mine", timeout=left.pop()),
        run.load_checkpoint("mine", timeout=left.pop()),
        run.export(tmp_path / "exported", timeout=left.pop()),
        run.zero_grad(timeout=left.pop()),
        run.sample([[4, 5]], timeout=left.pop()),
        run.optim_step(timeout=left.pop()),
    ]
    for future in futures:
        with pytest.raises(gradwire.DeadlineExceededError):
            await future
    assert not before[-1].done()
    for sample in reversed(before):
        sample.cancel()
    await run.forward_backward(SMALL, "causal_lm")
    assert await run.list_checkpoints() == [] and not (tmp_path / "exported").exists()


async def test_a_custom_loss_that_takes_too_long_leaves_the_run_as_it_was(service: Any) -> None:
    expected = await what_follows(await run_of(service))
    run, computing, enough = await run_of(service), threading.Event(), threading.Event()

    def slow(batch: Any, scores: Any) -> Any:
        computing.set()
        enough.wait(60)
        return 0.0, {"logprobs": [np.zeros_like(row) for row in scores["logprobs"]]}

    for stop in ("timeout", "cancel"):
        future = run.forward_backward_custom(SMALL, slow, framework="numpy", timeout=1.0 if stop == "timeout" else None)
        started = time.monotonic()
        computing.clear()
        if stop == "cancel":
            await asyncio.to_thread(computing.wait)
            future.cancel()
        with pytest.raises((gradwire.DeadlineExceededError, gradwire.OperationCancelledError)):
            await future
        assert time.monotonic() - started < 1.0 + STOPPED_S
    enough.set()
    assert await what_follows(run) == expected


async def test_sampling_outside_a_run_ends_with_its_timeout(service: Any) -> None:
    sampling = service.sampling_client("tiny")
    started = time.monotonic()
    with pytest.raises(gradwire.DeadlineExceededError, match=r"timeout of 1\.0 s"):
        await sampling.sample([[4, 5, 6]] * 64, n=8, max_tokens=240, ignore_eos=True, timeout=1.0)
    assert time.monotonic() - started < 1.0 + STOPPED_S
    async with asyncio.timeout(STOPPED_S + 3):
        while (await service.server_info()).engines[0].busy > 0.2:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", ["sample", pytest.param("forward_backward", marks=pytest.mark.slow)])
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
    print(f"a run was deleted during a {kind}, and another one's turn was over, in {time.monotonic() - started:.2f} s")
