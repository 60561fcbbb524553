"""The Tinker door on a real server: training, numbering, faults and sampling, by requests as the SDK sends them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from gradwire_proto.v1 import tinker_pb2 as pb
from support.server import free_port
from support.tinker import HttpServer, TinkerClient, forward_backward, outputs, sparse
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(300)


def _row(seed: int = 0, length: int = 8, **fields: Any) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(1, 99, length + 1)
    return {"tokens": ids[:-1], "target_tokens": ids[1:], "weights": np.ones(length)} | fields


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("tinker")
    served = HttpServer(tiny_model(folder / "model"), folder / "state", free_port(), "--threads", "1")
    served.start()
    yield served
    served.end()


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[TinkerClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        yield await TinkerClient(http).begin()


async def test_a_model_is_trained_saved_and_sampled(client: TinkerClient) -> None:
    model = await client.model()
    info = await client.post("get_info", {"model_id": model})
    assert (info["model_name"], info["lora_rank"]) == ("tiny", 4)
    data = [_row(seed, length) for seed, length in enumerate((8, 5, 1))]
    losses = []
    for step in range(3):
        promise = await client.post("forward_backward", forward_backward(model, 2 * step + 1, data))
        stepped = await client.step(model, 2 * step + 2, learning_rate=1e-2)
        metrics, logprobs = outputs(await client.wait(promise))
        assert [len(row) for row in logprobs] == [8, 5, 1]
        assert metrics["loss:sum"] == pytest.approx(-sum(row.sum(dtype=float) for row in logprobs), rel=1e-6)
        assert all(name.count(":") == 1 for name in metrics)
        losses.append(metrics["loss:sum"])
        assert (await client.wait(stepped))["metrics"]["grad_norm:mean"] > 0
    assert losses[2] < losses[1] < losses[0]

    saved = await client.done("save_weights", {"model_id": model, "seq_id": 7, "path": "final"})
    assert saved["path"] == f"tinker://{model}/weights/final"
    sampler = await client.done(
        "save_weights_for_sampler", {"model_id": model, "seq_id": 8, "sampling_session_seq_id": 0}
    )
    named = await client.done("save_weights_for_sampler", {"model_id": model, "seq_id": 9, "path": "final"})
    assert named["path"] == f"tinker://{model}/sampler_weights/final"
    opened = await client.post(
        "create_sampling_session",
        {"session_id": client.session_id, "sampling_session_seq_id": 1, "model_path": named["path"]},
    )
    asked = {
        "seq_id": 0, "num_samples": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "seed": 3},
    }  # fmt: skip
    found = []
    for each in (sampler, opened):
        asked["sampling_session_id"] = each["sampling_session_id"]
        promise = await client.post("asample", asked)
        assert len(promise["sample_sequence_ids"]) == 2
        assert (await client.post("asample", asked))["request_id"] == promise["request_id"]
        found.append(pb.SampleResponse.FromString(await client.wait(promise)))
    assert found[0] == found[1] and len(found[0].sequences) == 2
    prompt = {"chunks": [{"tokens": data[0]["tokens"].tolist()}, {"tokens": [7]}]}
    asked |= {"seq_id": 1, "prompt": prompt, "prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
    scored = np.frombuffer(
        pb.SampleResponse.FromString(await client.done("asample", asked)).prompt_logprobs, np.float32
    )
    shifted = {"tokens": data[0]["tokens"], "target_tokens": [*data[0]["tokens"][1:], 7], "weights": np.ones(8)}
    _, (same,) = outputs(await client.done("forward_backward", forward_backward(model, 10, [shifted], forward=True)))
    assert np.isnan(scored[0])
    np.testing.assert_allclose(scored[1:], same, rtol=0, atol=1e-5)
    assert all(len(sequence.tokens) == 4 * len(np.frombuffer(sequence.logprobs, np.float32)) for sequence in
               found[0].sequences)  # fmt: skip

    again = {"session_id": client.session_id, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    loaded = await client.done("load_weights", again)
    for number, (name, seq) in enumerate(((loaded["model_id"], 1), (model, 11))):
        metrics, _ = outputs(await client.done("forward_backward", forward_backward(name, seq, data, forward=True)))
        losses.append(metrics["loss:sum"])
        assert name.endswith(f":train:{1 - number}")
    assert losses[-1] == losses[-2] < losses[2]


async def test_what_else_is_told_of_a_prompt_and_of_samples(client: TinkerClient, server: HttpServer) -> None:
    opened = await client.post(
        "create_sampling_session", {"session_id": client.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )
    ids = [5, 17, 40, 8]
    plain = AutoModelForCausalLM.from_pretrained(server.model)
    with torch.no_grad():
        log_p = plain(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1).numpy()
    targets = np.array([[1, 2, -1], [3, 99, 4], [-1, -1, 0]])
    asked = {
        "sampling_session_id": opened["sampling_session_id"], "seq_id": 0, "prompt": {"chunks": [{"tokens": ids}]},
        "sampling_params": {"max_tokens": 3, "seed": 1, "stop": []}, "num_samples": 2, "topk_sample_logprobs": 2,
        "topk_prompt_logprobs": 3,
        "target_prompt_logprobs": {"dtype": "int64", "shape": [3, 3], "data": targets.ravel().tolist()},
    }  # fmt: skip
    found = pb.SampleResponse.FromString(await client.done("asample", asked))
    assert not found.HasField("prompt_logprobs")
    top = found.top_prompt_logprobs
    assert (top.length, top.k) == (4, 3)
    top_ids = np.frombuffer(top.token_ids, np.int32).reshape(4, 3)
    top_logprobs = np.frombuffer(top.logprobs, np.float32).reshape(4, 3)
    assert not top_ids[0].any() and (top_logprobs[0] == -99999.0).all()
    np.testing.assert_array_equal(top_ids[1:], np.argsort(-log_p, axis=-1)[:, :3])
    np.testing.assert_allclose(top_logprobs[1:], -np.sort(-log_p, axis=-1)[:, :3], atol=1e-5)
    expected = np.where(targets < 0, 0.0, np.take_along_axis(log_p, targets.clip(0), 1))
    answer = found.target_prompt_logprobs
    dense = np.frombuffer(answer.dense, np.float32).reshape(list(answer.shape))
    np.testing.assert_allclose(dense, expected, atol=1e-5)
    for sequence in found.sequences:
        assert (sequence.top_logprobs.length, sequence.top_logprobs.k) == (3, 2)
        first = np.frombuffer(sequence.top_logprobs.logprobs, np.float32)[:2]
        np.testing.assert_allclose(first, -np.sort(-_after(plain, ids))[:2], atol=1e-5)

    wanted = {"dtype": "int64", "shape": [3, 3], "data": [99, 0], "sparse_crow_indices": [0, 0, 1, 2]}
    some = asked | {"seq_id": 1, "target_prompt_logprobs": wanted | {"sparse_col_indices": [1, 2]}}
    some |= {"prompt_logprobs": True, "prompt_logprobs_last_n": 1}
    found = pb.SampleResponse.FromString(await client.done("asample", some))
    sparse_answer = found.target_prompt_logprobs.sparse
    np.testing.assert_allclose(np.frombuffer(sparse_answer.values, np.float32), expected[[1, 2], [1, 2]], atol=1e-5)
    assert np.frombuffer(sparse_answer.row_starts, np.int64).tolist() == [0, 0, 1, 2]
    assert np.isnan(np.frombuffer(found.prompt_logprobs, np.float32)).tolist() == [True, True, True, False]
    assert np.frombuffer(found.top_prompt_logprobs.logprobs, np.float32)[6] == -99999.0

    for field, wrong in (
        ("target_prompt_logprobs", asked["target_prompt_logprobs"] | {"shape": [4, 3]}),
        ("target_prompt_logprobs", wanted | {"sparse_col_indices": [1, 3]}),
        ("topk_prompt_logprobs", 1000),
        ("topk_sample_logprobs", 1000),
        ("prompt_alt_tokens_k", 2),
    ):
        answer = await client.post("asample", asked | {"seq_id": 9, field: wrong}, 400)
        assert field in answer["detail"]


def _after(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1))


async def test_checkpoints_are_listed_expire_and_go(client: TinkerClient, server: HttpServer) -> None:
    model = await client.model()
    await client.done("forward_backward", forward_backward(model, 1, [_row()]))
    await client.wait(await client.step(model, 2))
    for seq, (route, name) in enumerate((("save_weights", "a"), ("save_weights_for_sampler", "a")), 3):
        asked = {"model_id": model, "seq_id": seq, "path": name, "ttl_seconds": 3600, "user_metadata": {"loss": "1"}}
        await client.done(route, asked)
    snapshot = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}
    sampler = (await client.done("save_weights_for_sampler", snapshot))["sampling_session_id"]
    runs = f"training_runs/{model}"
    listed = (await client.send("GET", f"{runs}/checkpoints"))["checkpoints"]
    assert {each["checkpoint_id"] for each in listed} == {"weights/a", "sampler_weights/a"}
    sizes = {each["checkpoint_type"]: each["size_bytes"] for each in listed}
    assert 2.5 * sizes["sampler"] < sizes["training"]  # weights alone, without both moments
    assert all(each["user_metadata"] == {"loss": "1"} and each["expires_at"] > each["time"] for each in listed)
    run = await client.send("GET", runs)
    assert run["lora_rank"] == 4 and run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/a"
    everything = await client.send("GET", "training_runs?limit=1")
    assert everything["cursor"]["limit"] == 1 and everything["training_runs"][0]["training_run_id"] == model

    await client.send("PUT", f"{runs}/checkpoints/weights/a/ttl", json={"ttl_seconds": None})
    (kept,) = [each for each in (await client.send("GET", "checkpoints"))["checkpoints"]
               if each["tinker_path"] == f"tinker://{model}/weights/a"]  # fmt: skip
    assert "expires_at" not in kept
    await client.send("POST", f"{runs}/checkpoints/weights/a/publish")
    info = await client.post("weights_info", {"tinker_path": f"tinker://{model}/weights/a"})
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("tiny", 4, True)
    await client.send("DELETE", f"{runs}/checkpoints/sampler_weights/a")
    await client.send("DELETE", f"{runs}/checkpoints/sampler_weights/a", 404)
    gone = {"session_id": client.session_id, "sampling_session_seq_id": 9}
    await client.post("create_sampling_session", gone | {"model_path": f"tinker://{model}/sampler_weights/a"}, 404)
    session = await client.send("GET", f"sessions/{client.session_id}")
    assert session["training_run_ids"] == [model] and session["sampler_ids"] == [sampler]
    assert client.session_id in (await client.send("GET", "sessions"))["sessions"]


async def test_the_parts_of_the_model_that_are_trained(client: TinkerClient) -> None:
    losses = []
    for number, parts in enumerate(({}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False})):
        model = await client.model(number, **parts)
        for seq in (1, 3):
            metrics, _ = outputs(await client.done("forward_backward", forward_backward(model, seq, [_row()])))
            await client.wait(await client.step(model, seq + 1, learning_rate=1e-2))
        losses.append(metrics["loss:sum"])
        path = (await client.done("save_weights", {"model_id": model, "seq_id": 5, "path": "a"}))["path"]
        info = await client.post("weights_info", {"tinker_path": path})
        expected = {"train_unembed": True, "train_attn": True, "train_mlp": True} | parts
        assert {name: info[name] for name in expected} == expected
    assert len(set(losses)) == 3
    nothing = {"rank": 4, "train_unembed": False, "train_attn": False, "train_mlp": False}
    asked = {"session_id": client.session_id, "model_seq_id": 9, "base_model": "tiny", "lora_config": nothing}
    assert "nothing is left" in (await client.post("create_model", asked, 400))["detail"]


async def test_promises_do_not_wait_for_a_number_that_the_client_holds_back(client: TinkerClient) -> None:
    model = await client.model()
    later = [forward_backward(model, seq, [_row(seq)]) for seq in (3, 2)]
    promises = [await client.post("forward_backward", body) for body in later]  # the SDK awaits these, then sends 1
    assert await client.post("forward_backward", later[0]) == promises[0]
    promises.append(await client.post("forward_backward", forward_backward(model, 1, [_row(1)])))
    for promise, seq in zip(promises, (3, 2, 1), strict=True):
        alone = await client.model(seq)
        metrics, _ = outputs(await client.wait(promise))
        assert metrics == outputs(await client.done("forward_backward", forward_backward(alone, 1, [_row(seq)])))[0]
    other = await client.post("forward_backward", forward_backward(model, 2, [_row(9)]), status=422)
    assert "2" in other["detail"]


async def test_a_failure_is_a_result_and_costs_its_own_batch_only(client: TinkerClient) -> None:
    model = await client.model()
    wrong = [_row(0, target_tokens=np.full(8, 10**6))]
    promises = [
        await client.post("forward_backward", forward_backward(model, 1, wrong)),
        await client.step(model, 2),
        await client.post("forward_backward", forward_backward(model, 3, [_row()], "stable_reinforce")),
    ]
    failures = [await client.wait(promise) for promise in promises]
    failures.append(await client.done("forward_backward", forward_backward(model, 4, [_row(weights=np.ones(7))])))
    assert all(failure["category"] == "user" for failure in failures)
    said = [failure["error"] for failure in failures]
    assert "target_tokens" in said[0] and "operation 1 before it failed" in said[1]
    assert "importance_sampling" in said[2] and "weights" in said[3]
    metrics, _ = outputs(await client.done("forward_backward", forward_backward(model, 5, [_row()])))
    assert metrics["loss:sum"] > 0 and "metrics" in await client.wait(await client.step(model, 6))


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", "importance_sampling", "dro"])
async def test_losses_of_policies_with_bounds_for_each_token(client: TinkerClient, loss: str) -> None:
    model, rng = await client.model(), np.random.default_rng(2)
    plain = {name: value for name, value in _row().items() if name != "weights"}
    given = rng.normal(-4.5, 0.3, 8).astype(np.float32)
    row = plain | {"logprobs": given, "advantages": rng.normal(size=8).astype(np.float32)}
    config: dict[str, float] = {"beta": 0.1} if loss == "dro" else {}
    clips = loss in ("ppo", "cispo", "gspo")
    if clips:
        config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    body = forward_backward(model, 1, [row], loss, **config)
    metrics, (logprobs,) = outputs(await client.done("forward_backward", body))
    ratio = np.exp(logprobs.astype(float) - given)
    if loss == "importance_sampling":
        assert metrics["loss:sum"] == pytest.approx(-(ratio * row["advantages"]).sum(), rel=1e-5)
    if clips:
        bounds = {"clip_low_threshold": np.full(8, 0.9), "clip_high_threshold": np.full(8, 1.1)}
        each = outputs(await client.done("forward_backward", forward_backward(model, 2, [row | bounds], loss)))[0]
        assert each["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-6)
    if loss == "ppo":
        bounds["clip_high_threshold"][4:] = 1e9
        bounds["clip_low_threshold"][4:] = 0.0
        body = forward_backward(model, 3, [row | bounds], loss)
        half = outputs(await client.done("forward_backward", body))[0]
        clipped = np.where(np.arange(8) < 4, ratio.clip(0.9, 1.1), ratio)
        want = -np.minimum(ratio * row["advantages"], clipped * row["advantages"]).sum()
        assert half["loss:sum"] == pytest.approx(want, rel=1e-4)


async def test_several_targets_at_each_position_dense_and_sparse(client: TinkerClient) -> None:
    model, rng = await client.model(), np.random.default_rng(1)
    targets, weights = rng.integers(1, 99, (8, 3)), rng.random((8, 3)).astype(np.float32)
    weights[weights < 0.4], targets[0] = 0, 0
    wide = _row(target_tokens=targets, weights=weights)
    thin = _row(target_tokens=sparse(targets), weights=sparse(weights))
    for seq, data in ((1, [wide, wide]), (2, [thin, wide]), (3, [wide, _row(5, 4)])):
        body = forward_backward(model, seq, data, forward=True)
        metrics, rows = outputs(await client.done("forward_backward", body))
        if seq == 1:
            first = rows
            assert metrics["loss:sum"] == pytest.approx(-2 * (weights * rows[0]).sum(dtype=float), rel=1e-5)
        np.testing.assert_allclose(rows[0], first[0], rtol=0, atol=2e-6)
    assert rows[0].shape == (8, 3) and rows[1].shape == (4,)


async def test_a_killed_server_keeps_every_promise_but_samples(tmp_path: Path) -> None:
    server = HttpServer(
        await asyncio.to_thread(tiny_model, tmp_path / "model"), tmp_path / "state", free_port(), "--threads", "1"
    )
    await asyncio.to_thread(server.start)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            client = await TinkerClient(http).begin()
            model = await client.model()
            done = await client.post("forward_backward", forward_backward(model, 1, [_row()]))
            before = await client.wait(done)
            early = await client.step(model, 3, learning_rate=1e-2)
            sampler = await client.post(
                "create_sampling_session",
                {"session_id": client.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"},
            )
            asked = sampler | {"seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, "num_samples": 1}
            sample = await client.post("asample", asked)
            await asyncio.to_thread(server.end, signal.SIGKILL)
            await asyncio.to_thread(server.start)
            assert await client.wait(done) == before
            second = await client.post("forward_backward", forward_backward(model, 2, [_row()]))
            assert outputs(await client.wait(second))[0] == outputs(before)[0]
            assert (await client.wait(early))["metrics"]["step:max"] == 1
            await client.post("retrieve_future", {"request_id": sample["request_id"]}, status=410)
            assert await client.wait(await client.post("asample", asked))
    finally:
        await asyncio.to_thread(server.end)
