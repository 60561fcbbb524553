"""A step ends its accumulation whatever becomes of it: carried out, failed, aborted or cancelled."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import gradwire
import pytest
from support.server import Server

X0 = {"input_ids": [[4, 5, 6, 7, 8], [9, 10, 11]]}
X1 = {"input_ids": [[20, 21, 22, 23], [30, 31, 32, 33, 34]]}
Ending = Callable[[gradwire.TrainingClient], Awaitable[Any]]


def long_sample(run: gradwire.TrainingClient) -> gradwire.Future[Any]:
    """Seconds of work at the least, for those who cancel something meanwhile and then this.

    Few tokens come in, so that what is submitted behind it goes to the engine while it generates.
    """
    return run.sample([[5, 6]] * 64, n=8, max_tokens=240, ignore_eos=True)


async def cancel(*futures: gradwire.Future[Any]) -> None:
    """Cancel each, and wait until it is."""
    for future in futures:
        future.cancel()
        with pytest.raises(gradwire.OperationCancelledError):
            await future


async def failing(run: gradwire.TrainingClient) -> None:
    """A step that the engine refuses."""
    with pytest.raises(gradwire.InvalidArgumentError):
        await run.optim_step(learning_rate=-1.0)


async def failing_whole(run: gradwire.TrainingClient) -> None:
    """A ``train_step`` whose batch the engine refuses."""
    with pytest.raises(gradwire.InvalidBatchError):
        await run.train_step({"input_ids": [[4, 99999]]}, "causal_lm")


async def failing_halfway(run: gradwire.TrainingClient) -> None:
    """A ``train_step`` with gradients, whose step is refused."""
    with pytest.raises(gradwire.InvalidArgumentError, match="learning_rate"):
        await run.train_step(X0, "causal_lm", learning_rate=-1.0)


async def refused_here(run: gradwire.TrainingClient) -> None:
    """A ``train_step`` that never left the client."""
    with pytest.raises(gradwire.InvalidBatchError):
        await run.train_step({"ids": [[4]]}, "causal_lm")


async def cancelled_whole(run: gradwire.TrainingClient) -> None:
    """A ``train_step`` that is cancelled while a longer operation is carried out."""
    sample = long_sample(run)
    await cancel(run.train_step(X0, "causal_lm"), sample)


ENDINGS = "failing failing_whole failing_halfway refused_here aborted aborted_here cancelled cancelled_whole"


async def aborted(run: gradwire.TrainingClient) -> None:
    """A step behind a batch that the server refuses."""
    bad, step = run.forward_backward({"input_ids": [[4, 99999]]}, "causal_lm"), run.optim_step()
    outcomes = await asyncio.gather(bad, step, return_exceptions=True)
    assert [type(each) for each in outcomes] == [gradwire.InvalidBatchError, gradwire.AbortedPredecessorError]


async def aborted_here(run: gradwire.TrainingClient) -> None:
    """A step behind a batch that never left the client."""
    bad, step = run.forward_backward({"ids": [[4]]}, "causal_lm"), run.optim_step()
    outcomes = await asyncio.gather(bad, step, return_exceptions=True)
    assert [type(each) for each in outcomes] == [gradwire.InvalidBatchError, gradwire.AbortedPredecessorError]


async def cancelled(run: gradwire.TrainingClient) -> None:
    """A step that is cancelled while a longer operation is carried out."""
    sample = long_sample(run)
    await cancel(run.optim_step(), sample)


async def alone(service: gradwire.ServiceClient) -> float:
    """The norm of the second batch's gradient."""
    run = await service.create_run("tiny", seed=7)
    run.forward_backward(X1, "causal_lm")
    return (await run.optim_step(learning_rate=0.0)).grad_norm


@pytest.mark.parametrize("name", ENDINGS.split())
async def test_no_gradient_outlives_its_step(service: gradwire.ServiceClient, name: str) -> None:
    ending: Ending = globals()[name]
    run = await service.create_run("tiny", seed=7)
    await run.forward_backward(X0, "causal_lm")
    await ending(run)
    run.forward_backward(X1, "causal_lm")
    step = await run.optim_step(learning_rate=0.0)
    assert step.grad_norm == pytest.approx(await alone(service), rel=1e-5)
    assert step.num_accumulated == 1


@pytest.mark.parametrize("kind", ["optim_step", "train_step"])
async def test_what_was_queued_behind_a_cancelled_step_starts_from_zero(
    service: gradwire.ServiceClient, kind: str
) -> None:
    run = await service.create_run("tiny", seed=7)
    await run.forward_backward(X0, "causal_lm")
    sample = long_sample(run)
    step: gradwire.Future[Any] = run.optim_step() if kind == "optim_step" else run.train_step(X0, "causal_lm")
    run.forward_backward(X1, "causal_lm")
    last = run.optim_step(learning_rate=0.0)
    await cancel(step, sample)
    assert (await last).num_accumulated == 1
    assert (await last).grad_norm == pytest.approx(await alone(service), rel=1e-5)


async def test_a_step_counts_the_operations_it_took(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", seed=7)
    for _ in range(3):
        run.forward_backward(X0, "causal_lm")
    assert (await run.optim_step()).num_accumulated == 3


@pytest.mark.slow  # a server killed once more
async def test_what_was_dropped_does_not_come_back_with_a_recovery(killable: Server) -> None:
    async with gradwire.connect(killable.address, connect_timeout=120) as service:
        expected = await alone(service)
        run = await service.create_run("tiny", seed=7)
        await run.forward_backward(X0, "causal_lm")
        await aborted(run)
        await run.forward_backward(X1, "causal_lm")
    killable.end(signal.SIGKILL)
    killable.start()
    async with gradwire.connect(killable.address, connect_timeout=120) as service:
        step = await service.get_training_client(run.run_id).optim_step(learning_rate=0.0)
        assert step.grad_norm == pytest.approx(expected, rel=1e-5)
        assert step.num_accumulated == 1


def part(rows: list[list[int]], label: list[float]) -> dict[str, Any]:
    return {"input_ids": rows, "label": label}


PARTS = [
    part([[4, 5, 6, 7, 8], [9, 10, 11]], [1, 0]),
    part([[20, 21, 22, 23]], [1]),
    part([[30, 31, 32], [7, 9]], [0, 0]),
]
WHOLE = {name: [entry for each in PARTS for entry in each[name]] for name in PARTS[0]}
KWARGS = {"reference_model": "base"}


def in_parts(run: gradwire.TrainingClient) -> list[gradwire.Future[Any]]:
    return [
        *(run.forward_backward(each, "bco", KWARGS, accumulate=True) for each in PARTS[:-1]),
        run.train_step(PARTS[-1], "bco", KWARGS, learning_rate=1e-2),
    ]


@pytest.mark.long
async def test_parts_of_a_batch_outlive_the_server(killable: Server) -> None:
    """The parts before a kill come from the journal, and the loss of the last one is that of all of them."""
    async with gradwire.connect(killable.address, connect_timeout=120) as service:
        calm, run = [await service.create_run("tiny", seed=7, lora={"rank": 4}) for _ in range(2)]
        await calm.train_step(WHOLE, "bco", KWARGS, learning_rate=1e-2)
        expected = await calm.train_step(WHOLE, "bco", KWARGS, learning_rate=1e-2)
        await in_parts(run)[-1]
        held = [run.forward_backward(each, "bco", KWARGS, accumulate=True) for each in PARTS[:-1]]
        assert [(await each).loss for each in held] == [None, None]
        killable.end(signal.SIGKILL)
    killable.start()
    async with gradwire.connect(killable.address, connect_timeout=120) as service:
        again = await service.get_training_client(run.run_id)
        last = await again.train_step(PARTS[-1], "bco", KWARGS, learning_rate=1e-2)
        assert (last.loss, last.grad_norm, last.num_accumulated) == (expected.loss, expected.grad_norm, 1)


async def test_a_cancelled_or_failed_part_is_no_part(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", seed=7, lora={"rank": 4})
    alone = await run.forward_backward(PARTS[0], "bco", KWARGS)
    await run.zero_grad()
    with pytest.raises(gradwire.InvalidBatchError, match="99999"):
        await run.forward_backward(part([[4, 99999]], [1]), "bco", KWARGS, accumulate=True)
    sample = long_sample(run)
    await cancel(run.forward_backward(PARTS[1], "bco", KWARGS, accumulate=True), sample)
    assert (await run.forward_backward(PARTS[0], "bco", KWARGS)).loss == alone.loss
    run.forward_backward(PARTS[1], "bco", KWARGS, accumulate=True)
    with pytest.raises(gradwire.NothingToStepError, match="last part"):
        await run.optim_step()
    assert (await run.forward_backward(PARTS[0], "bco", KWARGS)).loss == alone.loss  # the step has ended both
    await service.delete_run(run.run_id)


async def test_a_loss_of_its_batch_says_so_before_and_after(service: gradwire.ServiceClient) -> None:
    losses = {loss.name: loss for loss in await service.list_losses()}
    assert "mean reward" in losses["bco"].whole_batch and not losses["causal_lm"].whole_batch
    run = await service.create_run("tiny", seed=7, lora={"rank": 4})
    first, second = run.forward_backward(PARTS[0], "bco", KWARGS), run.forward_backward(PARTS[1], "bco", KWARGS)
    assert not (await first).warnings and "accumulate=True" in " ".join((await second).warnings)
    await service.delete_run(run.run_id)
