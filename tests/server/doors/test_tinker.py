"""The Tinker door on a real server: training, numbering, faults and sampling, by requests as the SDK sends them."""

from __future__ import annotations

import asyncio
import gzip
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from gradwire_proto.v1 import tinker_pb2 as pb
from gradwire_server.limits import Limits
from support.server import free_port
from support.tinker import HttpServer, TinkerClient, datum, forward_backward, outputs, sparse
from support.tiny import tiny_model

pytestmark = pytest.mark.timeout(300)


async def test_a_model_is_trained_saved_and_sampled(tinker: TinkerClient) -> None:
    model = await tinker.model()
    info = await tinker.post("get_info", {"model_id": model})
    assert (info["model_name"], info["lora_rank"]) == ("tiny", 4)
    data = [datum(seed, length) for seed, length in enumerate((8, 5, 1))]
    losses = []
    for step in range(3):
        promise = await tinker.post("forward_backward", forward_backward(model, 2 * step + 1, data))
        stepped = await tinker.step(model, 2 * step + 2, learning_rate=1e-2)
        metrics, logprobs = outputs(await tinker.wait(promise))
        assert [len(row) for row in logprobs] == [8, 5, 1]
        assert metrics["loss:sum"] == pytest.approx(-sum(row.sum(dtype=float) for row in logprobs), rel=1e-6)
        assert all(name.count(":") == 1 for name in metrics)
        losses.append(metrics["loss:sum"])
        assert (await tinker.wait(stepped))["metrics"]["grad_norm:mean"] > 0
    assert losses[2] < losses[1] < losses[0]

    saved = await tinker.done("save_weights", {"model_id": model, "seq_id": 7, "path": "final"})
    assert saved["path"] == f"tinker://{model}/weights/final"
    sampler = await tinker.done(
        "save_weights_for_sampler", {"model_id": model, "seq_id": 8, "sampling_session_seq_id": 0}
    )
    named = await tinker.done("save_weights_for_sampler", {"model_id": model, "seq_id": 9, "path": "final"})
    assert named["path"] == f"tinker://{model}/sampler_weights/final"
    opened = await tinker.post(
        "create_sampling_session",
        {"session_id": tinker.session_id, "sampling_session_seq_id": 1, "model_path": named["path"]},
    )
    asked = {
        "seq_id": 0, "num_samples": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "seed": 3},
    }  # fmt: skip
    found = []
    for each in (sampler, opened):
        asked["sampling_session_id"] = each["sampling_session_id"]
        promise = await tinker.post("asample", asked)
        assert len(promise["sample_sequence_ids"]) == 2
        assert (await tinker.post("asample", asked))["request_id"] == promise["request_id"]
        found.append(pb.SampleResponse.FromString(await tinker.wait(promise)))
    assert found[0] == found[1] and len(found[0].sequences) == 2
    prompt = {"chunks": [{"tokens": data[0]["tokens"].tolist()}, {"tokens": [7]}]}
    asked |= {"seq_id": 1, "prompt": prompt, "prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
    scored = np.frombuffer(
        pb.SampleResponse.FromString(await tinker.done("asample", asked)).prompt_logprobs, np.float32
    )
    shifted = {"tokens": data[0]["tokens"], "target_tokens": [*data[0]["tokens"][1:], 7], "weights": np.ones(8)}
    _, (same,) = outputs(await tinker.done("forward_backward", forward_backward(model, 10, [shifted], forward=True)))
    assert np.isnan(scored[0])
    np.testing.assert_allclose(scored[1:], same, rtol=0, atol=1e-5)
    assert all(len(sequence.tokens) == 4 * len(np.frombuffer(sequence.logprobs, np.float32)) for sequence in
               found[0].sequences)  # fmt: skip

    again = {"session_id": tinker.session_id, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    loaded = await tinker.done("load_weights", again)
    for number, (name, seq) in enumerate(((loaded["model_id"], 1), (model, 11))):
        metrics, _ = outputs(await tinker.done("forward_backward", forward_backward(name, seq, data, forward=True)))
        losses.append(metrics["loss:sum"])
        assert name.endswith(f":train:{1 - number}")
    assert losses[-1] == losses[-2] < losses[2]


async def test_releases_of_the_sdk_that_cannot_train_are_refused_before_they_begin(tinker: TinkerClient) -> None:
    flags = await tinker.post("client/config", {"sdk_version": "0.23.0"})
    assert flags["proto_write_fwdbwd"] and flags["fwd_via_fwdbwd"]
    for version, status in (("0.7.0", 400), ("0.22.7", 400), ("0.23.0", 200), ("0.38.0", 200), ("1.0", 200), ("", 200)):
        answer = await tinker.post("create_session", {"tags": [], "sdk_version": version}, status)
        assert status == 200 or f"0.23 to 0.38; yours is {version}" in answer["detail"]


async def test_the_parts_of_the_model_that_are_trained(tinker: TinkerClient) -> None:
    losses = []
    for number, parts in enumerate(({}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False})):
        model = await tinker.model(number, **parts)
        for seq in (1, 3):
            metrics, _ = outputs(await tinker.done("forward_backward", forward_backward(model, seq, [datum()])))
            await tinker.wait(await tinker.step(model, seq + 1, learning_rate=1e-2))
        losses.append(metrics["loss:sum"])
        path = (await tinker.done("save_weights", {"model_id": model, "seq_id": 5, "path": "a"}))["path"]
        info = await tinker.post("weights_info", {"tinker_path": path})
        expected = {"train_unembed": True, "train_attn": True, "train_mlp": True} | parts
        assert {name: info[name] for name in expected} == expected
    assert len(set(losses)) == 3
    nothing = {"rank": 4, "train_unembed": False, "train_attn": False, "train_mlp": False}
    asked = {"session_id": tinker.session_id, "model_seq_id": 9, "base_model": "tiny", "lora_config": nothing}
    assert "nothing is left" in (await tinker.post("create_model", asked, 400))["detail"]


async def test_promises_do_not_wait_for_a_number_that_the_client_holds_back(tinker: TinkerClient) -> None:
    model = await tinker.model()
    later = [forward_backward(model, seq, [datum(seq)]) for seq in (3, 2)]
    promises = [await tinker.post("forward_backward", body) for body in later]  # the SDK awaits these, then sends 1
    assert await tinker.post("forward_backward", later[0]) == promises[0]
    promises.append(await tinker.post("forward_backward", forward_backward(model, 1, [datum(1)])))
    for promise, seq in zip(promises, (3, 2, 1), strict=True):
        alone = await tinker.model(seq)
        metrics, _ = outputs(await tinker.wait(promise))
        assert metrics == outputs(await tinker.done("forward_backward", forward_backward(alone, 1, [datum(seq)])))[0]
    other = await tinker.post("forward_backward", forward_backward(model, 2, [datum(9)]), status=422)
    assert "2" in other["detail"]


async def test_a_failure_is_a_result_and_costs_its_own_batch_only(tinker: TinkerClient) -> None:
    model = await tinker.model()
    wrong = [datum(0, target_tokens=np.full(8, 10**6))]
    promises = [
        await tinker.post("forward_backward", forward_backward(model, 1, wrong)),
        await tinker.step(model, 2),
        await tinker.post("forward_backward", forward_backward(model, 3, [datum()], "stable_reinforce")),
    ]
    failures = [await tinker.wait(promise) for promise in promises]
    failures.append(await tinker.done("forward_backward", forward_backward(model, 4, [datum(weights=np.ones(7))])))
    assert all(failure["category"] == "user" for failure in failures)
    said = [failure["error"] for failure in failures]
    assert "target_tokens" in said[0] and "operation 1 before it failed" in said[1]
    assert "importance_sampling" in said[2] and "weights" in said[3]
    metrics, _ = outputs(await tinker.done("forward_backward", forward_backward(model, 5, [datum()])))
    assert metrics["loss:sum"] > 0 and "metrics" in await tinker.wait(await tinker.step(model, 6))


@pytest.mark.parametrize(
    ("route", "wrong", "words"),
    [
        ("optim_step", {"adam_params": {"learning_rate": None}}, "adam_params.learning_rate"),
        ("save_weights", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights_for_sampler", {"path": "a", "ttl_seconds": -1}, "ttl_seconds"),
        ("save_weights_external", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ("load_weights", {"path": "tinker://a", "optimizer": None}, "optimizer"),
        ("load_weights", {"path": "tinker://a", "optimizer": True, "weights_access_token": "x"}, "access tokens"),
    ],
)
async def test_an_operation_that_cannot_be_read_leaves_no_gap(
    tinker: TinkerClient, route: str, wrong: dict[str, Any], words: str
) -> None:
    model = await tinker.model()
    failure = await tinker.done(route, {"model_id": model, "seq_id": 1} | wrong)
    assert words in failure["error"] and failure["category"] == "user"
    metrics, _ = outputs(await tinker.done("forward_backward", forward_backward(model, 2, [datum()])))
    assert metrics["loss:sum"] > 0 and "metrics" in await tinker.wait(await tinker.step(model, 3))
    unnumbered = await tinker.post(route, {"model_id": model, "seq_id": 0} | wrong, 422)
    assert "seq_id" in unnumbered["detail"] or words in unnumbered["detail"]


@pytest.mark.parametrize("encoding", ["identity", "gzip", "zstd"])
async def test_a_batch_above_the_limit_leaves_no_gap(tinker: TinkerClient, encoding: str) -> None:
    model = await tinker.model()
    noise = np.random.default_rng(0).bytes(1 << 20)  # a first block that zstd cannot make smaller
    body = forward_backward(model, 1, [datum()]) + noise + bytes(Limits().max_http_body_bytes)
    if encoding != "identity":
        compress = zstandard.compress if encoding == "zstd" else gzip.compress
        body = await asyncio.to_thread(compress, body, 1)
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": encoding}
    promise = await tinker.send("POST", "forward_backward", content=body, headers=headers)
    failure = await tinker.wait(promise)
    assert "--limit max_http_body_bytes=N" in failure["error"] and failure["category"] == "user"
    metrics, _ = outputs(await tinker.done("forward_backward", forward_backward(model, 2, [datum()])))
    assert metrics["loss:sum"] > 0 and "metrics" in await tinker.wait(await tinker.step(model, 3))


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", "importance_sampling", "dro"])
async def test_losses_of_policies_with_bounds_for_each_token(tinker: TinkerClient, loss: str) -> None:
    model, rng = await tinker.model(), np.random.default_rng(2)
    plain = {name: value for name, value in datum().items() if name != "weights"}
    given = rng.normal(-4.5, 0.3, 8).astype(np.float32)
    row = plain | {"logprobs": given, "advantages": rng.normal(size=8).astype(np.float32)}
    config: dict[str, float] = {"beta": 0.1} if loss == "dro" else {}
    clips = loss in ("ppo", "cispo", "gspo")
    if clips:
        config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    body = forward_backward(model, 1, [row], loss, **config)
    metrics, (logprobs,) = outputs(await tinker.done("forward_backward", body))
    ratio = np.exp(logprobs.astype(float) - given)
    if loss == "importance_sampling":
        assert metrics["loss:sum"] == pytest.approx(-(ratio * row["advantages"]).sum(), rel=1e-5)
    if clips:
        bounds = {"clip_low_threshold": np.full(8, 0.9), "clip_high_threshold": np.full(8, 1.1)}
        each = outputs(await tinker.done("forward_backward", forward_backward(model, 2, [row | bounds], loss)))[0]
        assert each["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-6)
    if loss == "ppo":
        bounds["clip_high_threshold"][4:] = 1e9
        bounds["clip_low_threshold"][4:] = 0.0
        body = forward_backward(model, 3, [row | bounds], loss)
        half = outputs(await tinker.done("forward_backward", body))[0]
        clipped = np.where(np.arange(8) < 4, ratio.clip(0.9, 1.1), ratio)
        want = -np.minimum(ratio * row["advantages"], clipped * row["advantages"]).sum()
        assert half["loss:sum"] == pytest.approx(want, rel=1e-4)


async def test_several_targets_at_each_position_dense_and_sparse(tinker: TinkerClient) -> None:
    model, rng = await tinker.model(), np.random.default_rng(1)
    targets, weights = rng.integers(1, 99, (8, 3)), rng.random((8, 3)).astype(np.float32)
    weights[weights < 0.4], targets[0] = 0, 0
    wide = datum(target_tokens=targets, weights=weights)
    thin = datum(target_tokens=sparse(targets), weights=sparse(weights))
    for seq, data in ((1, [wide, wide]), (2, [thin, wide]), (3, [wide, datum(5, 4)])):
        body = forward_backward(model, seq, data, forward=True)
        metrics, rows = outputs(await tinker.done("forward_backward", body))
        if seq == 1:
            first = rows
            assert metrics["loss:sum"] == pytest.approx(-2 * (weights * rows[0]).sum(dtype=float), rel=1e-5)
        np.testing.assert_allclose(rows[0], first[0], rtol=0, atol=2e-6)
    assert rows[0].shape == (8, 3) and rows[1].shape == (4,)


@pytest.mark.slow  # two starts
async def test_a_killed_server_keeps_every_promise_but_samples(tmp_path: Path) -> None:
    server = HttpServer(
        await asyncio.to_thread(tiny_model, tmp_path / "model"), tmp_path / "state", free_port(), "--threads", "1"
    )
    await asyncio.to_thread(server.start)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            tinker = await TinkerClient(http).begin()
            model = await tinker.model()
            done = await tinker.post("forward_backward", forward_backward(model, 1, [datum()]))
            before = await tinker.wait(done)
            early = await tinker.step(model, 3, learning_rate=1e-2)
            sampler = await tinker.post(
                "create_sampling_session",
                {"session_id": tinker.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"},
            )
            asked = sampler | {"seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, "num_samples": 1}
            sample = await tinker.post("asample", asked)
            await asyncio.to_thread(server.end, signal.SIGKILL)
            await asyncio.to_thread(server.start)
            assert await tinker.wait(done) == before
            second = await tinker.post("forward_backward", forward_backward(model, 2, [datum()]))
            assert outputs(await tinker.wait(second))[0] == outputs(before)[0]
            assert (await tinker.wait(early))["metrics"]["step:max"] == 1
            await tinker.post("retrieve_future", {"request_id": sample["request_id"]}, status=410)
            assert await tinker.wait(await tinker.post("asample", asked))
    finally:
        await asyncio.to_thread(server.end)
