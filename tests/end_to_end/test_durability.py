"""What survives: checkpoints, exports, a server that stops, one that is killed, a client that comes back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from support.batches import VOCAB, causal_lm
from support.plain_peft import with_adapter
from support.server import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("full", {"seed": 7}),
    ("lora", {"seed": 7, "lora": {"rank": 4, "dropout": 0.1}, "head": "value"}),
]


async def steps(run: gradwire.TrainingClient, batches: list[dict[str, Any]]) -> list[tuple[float, float]]:
    pairs = [(run.forward_backward(b, "causal_lm"), run.optim_step(learning_rate=1e-3)) for b in batches]
    return [((await fb).metrics["loss"], (await step).grad_norm) for fb, step in pairs]


async def logprobs(run: gradwire.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in await run.compute_logprobs([[5, 9, 11, 30, 7], list(range(3, 40))])]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [pytest.param(*each, id=each[0]) for each in SETTINGS],
)
@pytest.mark.slow  # a server started twice more
async def test_a_loaded_checkpoint_goes_on_bit_for_bit_after_a_restart(
    killable: Server, rng: np.random.Generator, kind: str, settings: dict[str, Any]
) -> None:
    batches = [causal_lm(rng, 4, VOCAB) for _ in range(6)]
    async with gradwire.connect(killable.address) as service:
        run = await service.create_run("tiny", **settings)
        await steps(run, batches[:3])
        checkpoint = await run.save_checkpoint("three")
        expected = (await steps(run, batches[3:]), await logprobs(run))
        run_id = run.run_id
    assert killable.end() == 0
    killable.start()
    async with gradwire.connect(killable.address) as service:
        run = service.get_training_client(run_id)
        assert [c.name for c in await run.list_checkpoints()] == ["three"]
        await run.load_checkpoint(checkpoint.path)
        assert (await steps(run, batches[3:]), await logprobs(run)) == expected


@pytest.mark.long
async def test_a_killed_server_continues_every_run_from_the_same_state(
    killable: Server, rng: np.random.Generator
) -> None:
    batches = [causal_lm(rng, 4, VOCAB) for _ in range(6)]
    async with gradwire.connect(killable.address) as service:
        calm = await service.create_run("tiny", seed=7, lora={"rank": 4, "dropout": 0.1})
        expected = (await steps(calm, batches), await logprobs(calm))
        run = await service.create_run("tiny", seed=7, lora={"rank": 4, "dropout": 0.1})
        seen = await steps(run, batches[:2])
        await run.save_checkpoint("two")
        seen += await steps(run, batches[2:4])
        killable.end(signal.SIGKILL)
    killable.start()
    async with gradwire.connect(killable.address) as service:
        run = service.get_training_client(run.run_id)
        seen += await steps(run, batches[4:])
        assert (seen, await logprobs(run)) == expected


async def test_a_client_that_comes_back_sees_what_was_pending_and_awaits_it(server: Server) -> None:
    batch = {"input_ids": [[4, 5, 6, 7]]}
    async with gradwire.connect(server.address) as gone:
        run = await gone.create_run("tiny", lora=2)
        await run.forward_backward(batch, "causal_lm")
        run.optim_step()
        run.optim_step()  # with nothing to step: fails
        run.forward_backward(batch, "causal_lm")  # and takes this with it
    async with gradwire.connect(server.address) as service:
        run = service.get_training_client(run.run_id)
        earlier = await run.earlier_operations()
        assert {3, 4} <= set(earlier) <= {1, 2, 3, 4} and (await run.info()).accepted_seq == 4
        if 2 in earlier:
            assert (await earlier[2]).step == 1
        with pytest.raises(gradwire.GradwireError, match="no gradient"):
            await earlier[3]
        with pytest.raises(gradwire.AbortedPredecessorError):
            await earlier[4]
        assert (await run.forward_backward(batch, "causal_lm")).num_loss_tokens == 3
        with pytest.raises(gradwire.InvalidArgumentError, match="before the first"):
            await run.earlier_operations()


@pytest.mark.parametrize("format", ["hf", "peft", "merged"])
async def test_an_export_loads_with_plain_libraries_and_scores_the_same(
    service: gradwire.ServiceClient, tiny_model_path: Path, tmp_path: Path, format: str
) -> None:
    def theirs() -> np.ndarray:
        if format == "peft":
            model = with_adapter(tiny_model_path, folder)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
            assert AutoTokenizer.from_pretrained(folder).vocab_size > 0
        with torch.no_grad():
            logprobs = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()

    run = await service.create_run("tiny", lora=None if format == "hf" else {"rank": 4}, seed=9)
    row = [5, 9, 11, 30, 7, 22]
    run.forward_backward({"input_ids": [row]}, "causal_lm")
    run.optim_step(learning_rate=1e-2)
    [ours] = await run.compute_logprobs([row])
    folder = await run.export(tmp_path / format, format=format)
    np.testing.assert_allclose(ours, await asyncio.to_thread(theirs), atol=1e-5)


async def test_another_client_takes_a_run_over_and_the_first_is_told(server: Server) -> None:
    batch = {"input_ids": [[4, 5, 6, 7]]}
    async with gradwire.connect(server.address) as one, gradwire.connect(server.address) as two:
        first = await one.create_run("tiny", lora=2)
        await first.forward_backward(batch, "causal_lm")
        second = two.get_training_client(first.run_id)
        step = await second.optim_step()
        assert step.step == 1
        with pytest.raises(gradwire.StaleEpochError, match="another"):
            await first.forward_backward(batch, "causal_lm")


async def test_a_fork_starts_from_the_checkpoint_and_leaves_it_alone(service: gradwire.ServiceClient) -> None:
    batch = {"input_ids": [[4, 5, 6, 7, 8, 9]]}
    run = await service.create_run("tiny", lora=2)
    run.forward_backward(batch, "causal_lm")
    run.optim_step(learning_rate=1e-2)
    checkpoint = await run.save_checkpoint()
    before = await logprobs(run)
    fork = await service.fork_run(checkpoint.path, head="value")
    assert await logprobs(fork) == before
    values = await fork.compute_values(batch)
    assert [len(row) for row in values] == [5]
    fork.forward_backward(batch, "causal_lm")
    await fork.optim_step(learning_rate=1e-2)
    assert await logprobs(fork) != before and await logprobs(run) == before


def test_a_script_without_an_event_loop(server: Server) -> None:
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2)
        fb = run.forward_backward({"input_ids": [[4, 5, 6]]}, "causal_lm")
        step = run.optim_step()
        assert fb.result(120).loss > 0 and step.result(120).step == 1
        assert service.list_models()[0].name == "tiny"
