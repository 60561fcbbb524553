"""A plain run becomes PPO's: it is given a value head that lasts, in checkpoints, forks and after a kill."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire_proto import rates
from support.batches import VOCAB, causal_lm, pairs, trajectories
from support.server import Server

PPO = {"use_gae": True, "reference_model": "tiny"}


async def ppo_steps(run: gradwire.TrainingClient, batches: list[dict[str, Any]]) -> list[tuple[float, float]]:
    pairs = [(run.forward_backward(b, "enhanced_ppo", PPO), run.optim_step(learning_rate=1e-2)) for b in batches]
    return [((await fb)["value_loss"], (await step).grad_norm) for fb, step in pairs]


async def values(run: gradwire.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in await run.compute_values([[5, 9, 11, 30, 7], list(range(3, 20))])]


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
async def test_the_three_stages_on_a_plain_run(
    service: gradwire.ServiceClient, rng: np.random.Generator, lora: dict[str, Any] | None
) -> None:
    hidden_size = (await service.list_models())[0].hidden_size
    training_client = await service.create_run("tiny", lora=lora)
    reward_client = await service.create_run("tiny", lora=lora, head="reward")
    for _ in range(2):
        await training_client.forward_backward(causal_lm(rng, 4, VOCAB), "causal_lm")
        taken = await training_client.optim_step()
        assert taken.learning_rate == pytest.approx(rates.learning_rate("answers", hidden_size, adapter=bool(lora)))
    for _ in range(2):
        await reward_client.forward_backward(pairs(rng, 4, VOCAB), "reward_modeling")
        taken = await reward_client.optim_step()
        assert taken.learning_rate == pytest.approx(rates.learning_rate("scores", hidden_size, adapter=bool(lora)))
    learned = await training_client.info()
    results = []
    for _ in range(2):
        results.append(await training_client.forward_backward(trajectories(rng, 4, VOCAB), "enhanced_ppo", PPO))
        taken = await training_client.optim_step()
        assert taken.learning_rate == pytest.approx(rates.learning_rate("policy", hidden_size, adapter=bool(lora)))
    now = await training_client.info()
    assert (learned.head, now.head, now.step) == ("", "value", 4)
    assert now.num_trainable_parameters == learned.num_trainable_parameters + hidden_size + 1
    assert results[0]["value_mean"] == 0.0 != results[1]["value_mean"]
    told = [[warning for warning in result.warnings if "value head" in warning] for result in results]
    assert len(told[0]) == 1 and "starts at zero" in told[0][0] and told[1] == []


async def test_none_is_added_where_the_batch_brings_values_or_advantages(
    service: gradwire.ServiceClient, rng: np.random.Generator
) -> None:
    run = await service.create_run("tiny", lora=2)
    batch = trajectories(rng, 3, VOCAB)
    for field in ("values", "advantages"):
        result = await run.forward_backward(batch | {field: batch["rewards"]}, "enhanced_ppo")
        assert not any("value head" in warning for warning in result.warnings)
    assert (await run.info()).head == ""


async def test_what_adds_none_says_how_to_get_one(service: gradwire.ServiceClient, rng: np.random.Generator) -> None:
    run = await service.create_run("tiny", lora=2)
    batch = trajectories(rng, 3, VOCAB)
    with pytest.raises(gradwire.UnsupportedError, match=r'fork_run\(checkpoint, head="value"\)'):
        await run.forward(batch, "enhanced_ppo")
    with pytest.raises(gradwire.UnsupportedError, match=r'fork_run\(checkpoint, head="value"\)'):
        await run.forward_backward({"input_ids": [[3, 4]], "rewards": [1.0]}, "value_only")
    with pytest.raises(gradwire.InvalidBatchError, match="rewards"):  # and leaves the run as it was
        await run.forward_backward({k: v for k, v in batch.items() if k != "rewards"}, "enhanced_ppo")
    assert (await run.info()).head == ""
    with pytest.raises(gradwire.UnsupportedError, match="values need a value head"):
        await run.compute_values([[5, 6, 7]])
    rewards = await service.create_run("tiny", lora=2, head="reward")
    with pytest.raises(gradwire.UnsupportedError, match=r'fork_run\(checkpoint, head="value"\)'):
        await rewards.forward_backward(batch, "enhanced_ppo")


@pytest.mark.holds_loop("it starts and kills servers")
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.slow  # three starts
async def test_it_survives_a_kill_and_forks_and_checkpoints_have_it(
    killable: Server, rng: np.random.Generator, lora: dict[str, Any] | None
) -> None:
    sft, batches = [causal_lm(rng, 4, VOCAB) for _ in range(2)], [trajectories(rng, 4, VOCAB) for _ in range(6)]

    async def plain(service: gradwire.ServiceClient) -> gradwire.TrainingClient:
        run = await service.create_run("tiny", lora=lora, seed=7)
        for batch in sft:
            run.forward_backward(batch, "causal_lm")
            await run.optim_step(learning_rate=1e-3)
        return run

    async with gradwire.connect(killable.address) as service:
        calm = await plain(service)
        expected = (await ppo_steps(calm, batches), await values(calm))
        run = await plain(service)
        before = await run.save_checkpoint("before")
        seen = await ppo_steps(run, batches[:2])
        killable.end(signal.SIGKILL)
    killable.start()  # from the checkpoint without a head, repeating the operation that adds it
    async with gradwire.connect(killable.address) as service:
        run = service.get_training_client(run.run_id)
        assert (await run.info()).head == "value"
        seen += await ppo_steps(run, batches[2:4])
        with_head = await run.save_checkpoint("with")
        await run.forward_backward(batches[4], "enhanced_ppo", PPO)  # dropped: what follows starts from the checkpoint
        await run.zero_grad()
        killable.end(signal.SIGKILL)
    killable.start()
    async with gradwire.connect(killable.address) as service:
        run = service.get_training_client(run.run_id)
        seen += await ppo_steps(run, batches[4:])
        assert (seen, await values(run)) == expected

        fork, plain_fork, headed = await asyncio.gather(
            service.fork_run(with_head, with_optimizer=True),
            service.fork_run(before, with_optimizer=True),
            service.fork_run(before, head="value"),
        )
        heads = [(await one.info()).head for one in (fork, plain_fork, headed)]
        assert heads == ["value", "", "value"]
        assert (await ppo_steps(fork, batches[4:]), await values(fork)) == (expected[0][4:], expected[1])
        assert (await ppo_steps(plain_fork, batches), await values(plain_fork)) == expected
        assert not np.any(np.concatenate(await headed.compute_values([[5, 6, 7]])))

        await run.load_checkpoint(with_head)
        assert (await ppo_steps(run, batches[4:]), await values(run)) == (expected[0][4:], expected[1])
        await run.load_checkpoint(before)  # the head goes back to zero with the rest
        assert (await ppo_steps(run, batches), await values(run)) == expected
