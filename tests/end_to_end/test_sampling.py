"""Samples outside a run's queue: token by token, from a run's weights of the moment, with scores of prompts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import gradwire
import gradwire.sync
import numpy as np
import pytest
from support.server import Server

OPTIONS: dict[str, Any] = {
    "max_tokens": 30,
    "seed": 7,
    "temperature": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {40: 2.0, 2: -100.0},
    "top_logprobs": 4,
    "stop": "zq",
}


async def test_a_stream_gives_the_sample_token_by_token(service: gradwire.ServiceClient) -> None:
    client = service.sampling_client("tiny")
    ((whole,),) = (await client.sample("hello", **OPTIONS)).samples
    tokens = [token async for token in client.stream("hello", **OPTIONS)]
    assert [token.token_id for token in tokens] == whole.token_ids.tolist()
    assert np.allclose([token.logprob for token in tokens], whole.logprobs, atol=1e-5)
    assert "".join(token.text for token in tokens) == whole.text
    assert [token.stop_reason for token in tokens] == [""] * (len(tokens) - 1) + [whole.stop_reason]
    assert whole.top_token_ids is not None and whole.top_token_ids.shape == (len(tokens), 4)
    assert np.array_equal(np.stack([token.top_token_ids for token in tokens]), whole.top_token_ids)  # type: ignore[arg-type]


def test_a_script_without_a_loop_streams_too(server: Server) -> None:
    with gradwire.sync.connect(server.address, connect_timeout=120) as service:
        client = service.sampling_client("tiny")
        tokens = list(client.stream([1, 40, 41], max_tokens=6, seed=1, ignore_eos=True))
        (sample,) = client.sample([1, 40, 41], max_tokens=6, seed=1, ignore_eos=True).result().samples[0]
        assert [token.token_id for token in tokens] == sample.token_ids.tolist()
        stream = client.stream([1, 40, 41], max_tokens=200, seed=1, ignore_eos=True)
        assert next(stream).token_id == tokens[0].token_id
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)


async def test_errors_of_a_stream_are_raised_where_it_is_read(service: gradwire.ServiceClient) -> None:
    with pytest.raises(gradwire.UnknownModelError, match="elsewhere"):
        await anext(service.sampling_client("elsewhere").stream("a"))
    with pytest.raises(gradwire.InvalidArgumentError, match="logit_bias") as caught:
        await anext(service.sampling_client("tiny").stream("a", logit_bias={100: 1.0}))
    assert caught.value.field == "logit_bias"
    with pytest.raises(gradwire.UnsupportedError, match="tokenizer"):
        await service.sampling_client("tiny").sample("a", json_schema={"type": "object"})
    with pytest.raises(gradwire.InvalidArgumentError, match="maps token ids"):
        await service.sampling_client("tiny").sample("a", logit_bias=[1])  # type: ignore[arg-type]
    with pytest.raises(gradwire.LimitExceededError, match="max_top_logprobs"):
        await service.sampling_client("tiny").sample("a", top_logprobs=129)


async def test_a_ruined_run_has_no_samples_until_it_goes_back(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", lora=4, seed=0)
    rows = {"input_ids": [[1, 40, 41, 42]]}
    kept = await run.save_checkpoint("kept")
    before = (await run.sample("ab", max_tokens=4, seed=1)).samples[0][0]
    await run.train_step(rows, "causal_lm", learning_rate=1e30)
    for options in ({}, {"temperature": 0}, {"top_k": 5, "top_logprobs": 2, "stop": "x"}):
        with pytest.raises(gradwire.NonFiniteError, match=r"after prompt 0 are not finite.* a checkpoint") as caught:
            await run.sample("ab", max_tokens=200, **options)
        assert caught.value.row == 0
    seen = []
    with pytest.raises(gradwire.NonFiniteError, match="not finite"):
        async for token in service.sampling_client(run.run_id).stream("ab", max_tokens=200):
            seen.append(token)
    assert seen == []
    await run.load_checkpoint(kept)
    after = (await run.sample("ab", max_tokens=4, seed=1)).samples[0][0]
    assert (after.token_ids.tolist(), after.logprobs.tolist()) == (before.token_ids.tolist(), before.logprobs.tolist())


async def test_a_text_that_is_no_list_is_named(service: gradwire.ServiceClient) -> None:
    with pytest.raises(gradwire.InvalidArgumentError, match="texts must be a list of strings, not an int"):
        await service.encode("tiny", 3)  # type: ignore[arg-type]


async def test_a_reader_who_leaves_ends_the_generation(service: gradwire.ServiceClient) -> None:
    """A sample of the run's weights holds up its next operation until it ends."""
    run = await service.create_run("tiny", lora=2)
    stream = service.sampling_client(run.run_id).stream([1], max_tokens=250, ignore_eos=True)
    await anext(stream)
    await stream.aclose()
    await run.compute_logprobs([[1, 2, 3]])
    tasks = [
        asyncio.ensure_future(_first(service.sampling_client(run.run_id).stream([1], max_tokens=250, ignore_eos=True)))
        for _ in range(3)
    ]
    await asyncio.gather(*tasks)
    await run.compute_logprobs([[1, 2, 3]])


async def _first(stream: gradwire.TokenStream) -> gradwire.SampledToken:
    async for token in stream:
        return token
    raise AssertionError("no token")


async def test_a_runs_name_is_its_weights_of_the_moment(service: gradwire.ServiceClient, server: Server) -> None:
    run = await service.create_run("tiny", lora=4, seed=3)
    now = service.sampling_client(run.run_id)
    rows = [[1, 40, 41, 42], [1, 5, 6]]
    seen = []
    for _ in range(2):
        await run.forward_backward({"input_ids": rows}, "causal_lm")
        await run.optim_step(learning_rate=1e-2)
        mine, outside = await run.compute_logprobs(rows), await now.compute_logprobs(rows)
        for own, other in zip(mine, outside, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-6)  # other rows beside them on several ranks
        seen.append(outside)
    assert not np.allclose(seen[0][0], seen[1][0])
    saved = await run.save_checkpoint("two")
    await run.forward_backward({"input_ids": rows}, "causal_lm")
    await run.optim_step(learning_rate=1e-2)
    then = await service.sampling_client(saved).compute_logprobs(rows)
    assert all(np.array_equal(a, b) for a, b in zip(seen[1], then, strict=True))
    before = await now.compute_logprobs(rows)
    os.kill(server.engine_pid, signal.SIGKILL)
    after = await now.compute_logprobs(rows)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(gradwire.UnknownRunError):
        await service.sampling_client("run-that-is-none").sample("a")


async def test_in_a_runs_queue_the_options_are_the_same(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", lora=4, seed=3)
    ((first,),) = (await run.sample("hello", **OPTIONS)).samples
    ((again,),) = (await run.sample("hello", **OPTIONS)).samples
    ((outside,),) = (await service.sampling_client(run.run_id).sample("hello", **OPTIONS)).samples
    assert np.array_equal(first.token_ids, again.token_ids) and np.array_equal(first.logprobs, again.logprobs)
    assert np.array_equal(first.token_ids, outside.token_ids)
    assert first.top_logprobs is not None and first.top_logprobs.shape == (len(first.token_ids), 4)


async def test_a_deterministic_sample_has_the_same_bits_beside_others(service: gradwire.ServiceClient) -> None:
    client = service.sampling_client("tiny")
    options: dict[str, Any] = {"max_tokens": 40, "seed": 7, "ignore_eos": True, "deterministic": True}
    ((alone,),) = (await client.sample("hello", **options)).samples
    others = [
        client.sample(["hello you", "b" * 30], n=3, max_tokens=20 + number, seed=number, ignore_eos=True)
        for number in range(4)
    ]
    ((beside,),) = (await client.sample("hello", **options)).samples
    streamed = [token.logprob async for token in client.stream("hello", **options)]
    await asyncio.gather(*others)
    assert np.array_equal(alone.token_ids, beside.token_ids)
    assert np.array_equal(alone.logprobs, beside.logprobs) and alone.logprobs.tolist() == streamed


async def test_the_most_probable_tokens_feed_top_k_distillation(
    service: gradwire.ServiceClient, tiny_model_path: Path
) -> None:
    """A student that starts from its teacher has no divergence but that of the tokens beyond the k."""
    rows = [[1, 40, 41, 42, 43], [1, 9, 8]]
    run = await service.create_run("tiny", lora=2)
    teacher = await service.sampling_client("tiny").compute_top_logprobs(rows, k=8)
    for ids, (token_ids, logprobs) in zip(rows, teacher, strict=True):
        assert token_ids.shape == logprobs.shape == (len(ids) - 1, 8)
    first = np.zeros((1, 8))
    batch = {
        "input_ids": rows,
        "teacher_token_ids": [np.concatenate([first.astype(np.int64), ids]) for ids, _ in teacher],
        "teacher_log_probs": [np.concatenate([first - 10, logprobs]) for _, logprobs in teacher],
    }
    result = await run.forward(batch, "top_k_distillation", {"tail": "bucket"})
    assert result["divergence"] == pytest.approx(0, abs=1e-5)
    ((sample,),) = (await run.sample([1, 40], max_tokens=5, top_logprobs=8, seed=1, ignore_eos=True)).samples
    (whole,) = await service.sampling_client("tiny").compute_top_logprobs([[1, 40, *sample.token_ids.tolist()]], k=8)
    assert np.array_equal(whole[0][1:], sample.top_token_ids)  # type: ignore[arg-type]


async def test_a_stop_token_that_no_sample_can_have_is_refused(service: gradwire.ServiceClient) -> None:
    info = {model.name: model for model in await service.list_models()}["tiny"]
    run, client = await service.create_run("tiny", lora=4), service.sampling_client("tiny")
    for wrong in (-1, info.vocab_size):
        for sample in (run.sample, client.sample):
            with pytest.raises(gradwire.InvalidArgumentError) as caught:
                await sample("hello", max_tokens=4, stop_token_ids=[5, wrong])
            assert f"stop_token_ids[1] is {wrong}" in str(caught.value)
            assert (caught.value.field, caught.value.rule) == ("stop_token_ids", f"0 <= id < {info.vocab_size}")
    await run.sample("hello", max_tokens=4, stop_token_ids=[0, info.vocab_size - 1])
    await service.delete_run(run.run_id)


@pytest.mark.parametrize("lora", [{"rank": 4}, None], ids=["lora", "full"])
async def test_a_step_leaves_nothing_of_the_former_weights_to_the_next_samples(
    service: gradwire.ServiceClient, lora: dict[str, int] | None
) -> None:
    """Keys and values of prompts are kept between requests, and belong to the weights that they were computed with."""
    prompts = [[(5 + number + place) % 90 + 3 for place in range(70)] for number in range(4)]
    run = await service.create_run("tiny", lora=lora, seed=1)
    current = service.sampling_client(run.run_id)
    for _ in range(2):
        fresh, kept = [
            await current.sample(prompts, max_tokens=8, seed=11, deterministic=alone) for alone in (True, False)
        ]
        assert [each[0].token_ids.tolist() for each in kept.samples] == [
            each[0].token_ids.tolist() for each in fresh.samples
        ]
        await run.train_step([{"input_ids": prompts[0]}], "causal_lm", learning_rate=1e-2)
    await service.delete_run(run.run_id)
