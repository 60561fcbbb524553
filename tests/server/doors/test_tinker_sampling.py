"""Sampling through the Tinker door: what is told of prompts and samples, cancelling, samplers whose weights move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import tinker_pb2 as pb
from support.tinker import HttpServer, TinkerClient, datum, forward_backward
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(300)


async def test_what_else_is_told_of_a_prompt_and_of_samples(tinker: TinkerClient, tinker_server: HttpServer) -> None:
    opened = await tinker.post(
        "create_sampling_session", {"session_id": tinker.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )
    ids = [5, 17, 40, 8]
    plain = AutoModelForCausalLM.from_pretrained(tinker_server.model)
    with torch.no_grad():
        log_p = plain(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1).numpy()
    targets = np.array([[1, 2, -1], [3, 99, 4], [-1, -1, 0]])
    asked = {
        "sampling_session_id": opened["sampling_session_id"], "seq_id": 0, "prompt": {"chunks": [{"tokens": ids}]},
        "sampling_params": {"max_tokens": 3, "seed": 1, "stop": []}, "num_samples": 2, "topk_sample_logprobs": 2,
        "topk_prompt_logprobs": 3,
        "target_prompt_logprobs": {"dtype": "int64", "shape": [3, 3], "data": targets.ravel().tolist()},
    }  # fmt: skip
    found = pb.SampleResponse.FromString(await tinker.done("asample", asked))
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
    found = pb.SampleResponse.FromString(await tinker.done("asample", some))
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
        ("prompt_alt_tokens_k", 1000),
        ("record_stability_info", True),
    ):
        answer = await tinker.post("asample", asked | {"seq_id": 9, field: wrong}, 400)
        assert field in answer["detail"]


async def test_tokens_are_drawn_in_the_places_of_a_prompt(tinker: TinkerClient, tinker_server: HttpServer) -> None:
    opened = await tinker.post(
        "create_sampling_session", {"session_id": tinker.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )
    ids, count, temperature = [5, 17, 40, 8], 128, 0.2
    plain = AutoModelForCausalLM.from_pretrained(tinker_server.model)
    with torch.no_grad():
        log_p = plain(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    p = (log_p / temperature).softmax(-1).numpy()
    asked = {
        "sampling_session_id": opened["sampling_session_id"], "seq_id": 0, "prompt": {"chunks": [{"tokens": ids}]},
        "sampling_params": {"max_tokens": 1, "seed": 1, "temperature": temperature}, "prompt_alt_tokens_k": count,
    }  # fmt: skip
    drawn, logprobs = _drawn(await tinker.done("asample", asked))
    assert drawn.shape == (len(ids) - 1, count)
    np.testing.assert_allclose(logprobs, np.take_along_axis(log_p.numpy(), drawn, 1), atol=1e-5)
    for place, tokens in enumerate(drawn):
        few = p[place] < np.median(p[place])  # the less probable half of the tokens
        for share, found in (
            (p[place][few].sum(), few[tokens].mean()),
            (p[place].max(), _mode_share(p[place], tokens)),
        ):
            assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / count) + 1 / count
    again, _ = _drawn(await tinker.done("asample", asked | {"seq_id": 1}))
    np.testing.assert_array_equal(drawn, again)
    other = asked | {"seq_id": 2, "sampling_params": {"max_tokens": 1, "seed": 2, "temperature": temperature}}
    assert (_drawn(await tinker.done("asample", other))[0] != drawn).any()
    greedy = asked | {"seq_id": 3, "sampling_params": {"max_tokens": 1, "temperature": 0}}
    expected = np.repeat(log_p.numpy().argmax(-1)[:, None], count, 1)
    np.testing.assert_array_equal(_drawn(await tinker.done("asample", greedy))[0], expected)
    short = asked | {"seq_id": 4, "prompt": {"chunks": [{"tokens": [5]}]}}
    assert _drawn(await tinker.done("asample", short))[0].shape == (0, count)


def _drawn(body: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    found = pb.SampleResponse.FromString(body).prompt_draws
    tokens = np.frombuffer(found.tokens.dense, np.int64).reshape(list(found.tokens.shape))
    return tokens, np.frombuffer(found.logprobs.dense, np.float32).reshape(list(found.logprobs.shape))


def _mode_share(p: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> float:
    return float((tokens == p.argmax()).mean())


def _after(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1))


async def test_a_sample_is_cancelled(tinker: TinkerClient) -> None:
    opened = await tinker.post(
        "create_sampling_session", {"session_id": tinker.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )
    asked = {
        "sampling_session_id": opened["sampling_session_id"], "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 250, "stop": []}, "num_samples": 2000,
    }  # fmt: skip
    promise = await tinker.post("asample", asked)
    await tinker.post("cancel_future", promise)
    assert "cancelled" in (await tinker.wait(promise))["error"]
    short = asked | {"seq_id": 1, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
    done = await tinker.post("asample", short)
    before = await tinker.wait(done)
    await tinker.post("cancel_future", done)  # too late: it keeps its result
    assert await tinker.wait(done) == before
    unknown = {"request_id": done["request_id"].replace(":1:", ":99:")}
    await tinker.post("cancel_future", unknown)
    model = await tinker.model()
    promise = await tinker.post("forward_backward", forward_backward(model, 1, [datum()]))
    assert "samples can" in (await tinker.post("cancel_future", promise, 400))["detail"]


async def test_inflight_samplers_follow_the_newest_of_their_model(tinker: TinkerClient) -> None:
    model = await tinker.model()
    samplers = []
    for number, kind in enumerate(("inflight", "snapshot", "inflight")):
        seq = 3 * number + 1
        await tinker.post("forward_backward", forward_backward(model, seq, [datum()]))
        await tinker.step(model, seq + 1, learning_rate=3e-2)
        asked = {"model_id": model, "seq_id": seq + 2, "sampling_session_seq_id": number, "kind": kind}
        samplers.append((await tinker.done("save_weights_for_sampler", asked))["sampling_session_id"])
    found = []
    for sampler in samplers:
        asked = {
            "sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True,
        }  # fmt: skip
        found.append(pb.SampleResponse.FromString(await tinker.done("asample", asked)).prompt_logprobs)
    assert found[0] == found[2] != found[1]
