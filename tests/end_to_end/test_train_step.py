"""``train_step``: a forward_backward and an optim_step as one operation, with the same bits."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import sync
from support.server import Server

BATCH = {"input_ids": [[4, 5, 6, 7, 8], [9, 10, 11]]}
OTHER = {"input_ids": [[20, 21, 22, 23], [30, 31, 32, 33, 34]]}
LONG = {"input_ids": np.random.default_rng(1).integers(3, 60, (48, 60))}
LORA: dict[str, Any] = {"rank": 4, "dropout": 0.1}


async def scores(run: gradwire.TrainingClient) -> list[float]:
    return np.concatenate(await run.compute_logprobs(OTHER)).tolist()


@pytest.mark.parametrize("settings", [{}, {"lora": LORA}], ids=["full", "lora"])
async def test_it_gives_the_bits_of_the_pair(service: gradwire.ServiceClient, settings: dict[str, Any]) -> None:
    paired, whole = [await service.create_run("tiny", seed=7, **settings) for _ in range(2)]
    step = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "betas": (0.8, 0.9)}
    for batch in (BATCH, OTHER, BATCH):
        loss, stepped = paired.forward_backward(batch, "causal_lm", outputs=["logprobs"]), paired.optim_step(**step)
        done = await whole.train_step(batch, "causal_lm", outputs=["logprobs"], **step)
        assert (done.loss, done.metrics, done.num_tokens) == (
            (await loss).loss,
            loss.result().metrics,
            loss.result().num_tokens,
        )
        assert (done.grad_norm, done.step, done.num_accumulated) == (
            (await stepped).grad_norm,
            stepped.result().step,
            1,
        )
        assert done.learning_rate == 1e-2 and not done.skipped and done.timings.engine_s > 0
        assert np.array_equal(
            np.concatenate(done.outputs["logprobs"]), np.concatenate(loss.result().outputs["logprobs"])
        )
    assert await scores(paired) == await scores(whole)
    assert (await whole.info()).step == 3


async def test_gradients_accumulated_before_it_are_part_of_the_step(service: gradwire.ServiceClient) -> None:
    paired, whole = [await service.create_run("tiny", seed=7) for _ in range(2)]
    for batch in (BATCH, OTHER):
        paired.forward_backward(batch, "causal_lm")
    expected = await paired.optim_step(learning_rate=1e-2)
    whole.forward_backward(BATCH, "causal_lm")
    done = await whole.train_step(OTHER, "causal_lm", learning_rate=1e-2)
    assert (done.grad_norm, done.num_accumulated) == (expected.grad_norm, 2)


async def test_a_failed_one_changes_nothing_and_aborts_what_follows_to_the_next_step(
    service: gradwire.ServiceClient,
) -> None:
    run = await service.create_run("tiny", seed=7)
    before = await scores(run)
    bad = run.train_step({"input_ids": [[4, 99999]]}, "causal_lm")
    behind, after = run.train_step(BATCH, "causal_lm"), run.train_step(BATCH, "causal_lm", learning_rate=0.0)
    outcomes = await asyncio.gather(bad, behind, after, return_exceptions=True)
    assert [type(each) for each in outcomes] == [
        gradwire.InvalidBatchError, gradwire.AbortedPredecessorError, gradwire.TrainStepResult,
    ]  # fmt: skip
    with pytest.raises(gradwire.InvalidArgumentError, match="learning_rate"):
        await run.train_step(BATCH, "causal_lm", learning_rate=-1.0)
    with pytest.raises(gradwire.InvalidArgumentError, match="betas"):
        await run.train_step(BATCH, "causal_lm", betas=(0.9,))  # type: ignore[arg-type]  # the mistake that is tested
    assert await scores(run) == before
    assert (await run.info()).step == 1


@pytest.mark.long
async def test_one_that_is_cancelled_while_it_computes_leaves_the_run_as_it_was(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    server = Server(tiny_model_path, tmp_path / "state", "--microbatch-tokens", "64").start()
    try:
        async with gradwire.connect(server.address, connect_timeout=120) as service:
            run = await service.create_run("tiny", seed=7, lora=LORA)
            before = await scores(run)
            steps = [run.train_step(LONG, "causal_lm", learning_rate=1e-2) for _ in range(3)]
            steps[0].cancel()
            outcomes = await asyncio.gather(*steps, return_exceptions=True)
            cancelled = isinstance(outcomes[0], gradwire.OperationCancelledError)
            assert cancelled or isinstance(outcomes[0], gradwire.TrainStepResult)  # done before it could be stopped
            last = outcomes[2]
            assert isinstance(last, gradwire.TrainStepResult)
            assert last.step == (2 if cancelled else 3)

            with pytest.raises(gradwire.DeadlineExceededError):
                await run.train_step(LONG, "causal_lm", learning_rate=1e-2, timeout=1e-3)
            assert (await run.info()).step == last.step
            assert before != await scores(run)
    finally:
        server.end()


async def test_the_run_s_history_has_loss_and_step_in_one_point(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", seed=7)
    done = await run.train_step(BATCH, "causal_lm", learning_rate=1e-3)
    history = await run.history()
    assert history.operation.tolist() == ["train_step"] and history.loss_fn.tolist() == ["causal_lm"]
    assert (history.loss[0], history.grad_norm[0]) == (done.loss, done.grad_norm)
    assert (history.learning_rate[0], history.step[0], history.tokens[0]) == (1e-3, 1, done.num_tokens)


@pytest.mark.slow
async def test_a_killed_server_repeats_both_halves_or_none(killable: Server) -> None:
    def step(run: gradwire.TrainingClient) -> gradwire.Future[gradwire.TrainStepResult]:
        return run.train_step(BATCH, "causal_lm", learning_rate=1e-2)

    async with gradwire.connect(killable.address, connect_timeout=120) as service:
        calm, run = [await service.create_run("tiny", seed=7, lora=LORA) for _ in range(2)]
        expected = [await step(calm) for _ in range(6)]
        expected_scores = await scores(calm)
        futures = [step(run) for _ in range(6)]
        await futures[1]
        killable.end(signal.SIGKILL)
    killable.start()
    async with gradwire.connect(killable.address, connect_timeout=120) as service:
        again = await service.get_training_client(run.run_id)
        found = {seq - 1: future for seq, future in (await again.earlier_operations()).items()}
        for number in range((await again.info()).accepted_seq, 6):
            found[number] = step(again)
        for number, future in found.items():
            done = await future
            assert (done.loss, done.grad_norm, done.step) == (
                expected[number].loss, expected[number].grad_norm, number + 1,
            )  # fmt: skip
        assert await scores(again) == expected_scores


def test_a_script_without_an_event_loop(server: Server) -> None:
    with sync.connect(server.address) as service:
        run = service.create_run("tiny", seed=7)
        futures = [run.train_step(BATCH, "causal_lm", learning_rate=1e-3) for _ in range(3)]
        assert [future.result().step for future in futures] == [1, 2, 3]


async def test_a_momentum_that_its_optimizer_lacks_is_refused(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", lora=4)
    batch = {"input_ids": [[1, 2, 3]]}
    for settings in ({}, {"optimizer": "adamw"}, {"optimizer": "adamw8bit"}):
        with pytest.raises(gradwire.InvalidArgumentError, match="and adamw") as caught:
            await run.train_step(batch, "causal_lm", momentum=0.5, **settings)
        assert caught.value.field == "momentum"
    run.forward_backward(batch, "causal_lm")
    with pytest.raises(gradwire.InvalidArgumentError, match='optimizer="sgd"'):
        await run.optim_step(momentum=0.5)
    with pytest.raises(gradwire.NothingToStepError):  # the refused step ended the accumulation
        await run.optim_step()
    assert (await run.train_step(batch, "causal_lm", optimizer="muon", momentum=0.5)).step == 1
    await service.delete_run(run.run_id)
