"""Many operations of a run on their way at once, in a real engine: their results are those of one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import gradwire
import numpy as np
import pytest

COUNT = 30
FAILS = (7, 8, 19)
"""Their token ids are past the vocabulary, which only the engine knows."""


def submit(run: gradwire.TrainingClient, number: int) -> gradwire.Future[Any]:
    ids = np.random.default_rng(number).integers(3, 60, (2, 8))
    if number % 3 == 0:
        return run.optim_step(learning_rate=1e-2)
    return run.forward_backward({"input_ids": ids + 100_000 * (number in FAILS)}, "causal_lm")


async def outcomes(service: gradwire.ServiceClient, *, pipelined: bool) -> list[object]:
    """A loss, a gradient's norm or the kind of the error, of each operation; nobody has seen a failure meanwhile."""
    run = await service.create_run("tiny", seed=5)
    futures = []
    for number in range(1, COUNT + 1):
        futures.append(submit(run, number))
        while not pipelined and not futures[-1].done():  # noqa: ASYNC110  to wait for it would be to see how it failed
            await asyncio.sleep(0.002)
    found = []
    for future in futures:
        try:
            result = await future
        except gradwire.GradwireError as error:
            found.append((type(error).__name__, getattr(error, "cause_seq", None)))
        else:
            found.append(result.loss if isinstance(result, gradwire.LossResult) else result.grad_norm)
    return found


async def test_failures_in_the_middle_of_many_are_those_of_one_at_a_time(service: gradwire.ServiceClient) -> None:
    one_by_one = await outcomes(service, pipelined=False)
    assert await outcomes(service, pipelined=True) == one_by_one
    assert [type(outcome) for outcome in one_by_one[6:9]] == [tuple] * 3
    assert one_by_one[6] == ("InvalidBatchError", None) and one_by_one[8] == ("AbortedPredecessorError", 7)


async def test_what_is_in_the_engines_pipe_can_be_cancelled(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", seed=5)
    # Seconds of work at the least: all of the rest is in the engine's pipe while it generates.
    sample = run.sample([[5, 6]] * 64, n=8, max_tokens=240, ignore_eos=True)
    first, last = [run.forward_backward({"input_ids": [list(range(3, 63))]}, "causal_lm") for _ in range(2)]
    for each in (last, sample):
        assert each.cancel()
        with pytest.raises(gradwire.OperationCancelledError):
            await each
    assert (await first).num_tokens == 60
    assert (await run.optim_step()).step == 1
