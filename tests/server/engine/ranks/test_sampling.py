"""Samples are divided among the ranks, and are the ones of one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gradwire_losses.registry import get_loss
from gradwire_proto.codec import Column, encode
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import Driver, EngineProcess, loss_call, token_rows
from support.ranks import ROWS, STEP, Engines

pytestmark = pytest.mark.long

PROMPTS = [[1, 20, 30], [1, 5], [1, 40, 41, 42, 43], [1, 7, 8], [1, 60]]
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
CALLS: dict[str, tuple[dict[str, Any], Sequence[Sequence[int]]]] = {
    "prompts": ({"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}, PROMPTS),
    "groups": ({"max_tokens": 9, "n": 3, "temperature": 0.7, "top_k": 9, "seed": 6, "top_logprobs": 2}, PROMPTS),
    "one-prompt": ({"max_tokens": 8, "n": 6, "temperature": 1.3, "seed": 7, "min_p": 0.01}, PROMPTS[:1]),
    "one-sample": ({"max_tokens": 8, "seed": 8}, PROMPTS[2:3]),
    "schema": ({"max_tokens": 24, "n": 2, "temperature": 1.0, "seed": 9, "json_schema": SCHEMA}, PROMPTS[:2]),
    "stops": ({"max_tokens": 30, "n": 2, "temperature": 1.0, "seed": 3, "stop": ["e", "a"]}, PROMPTS),
    "prompt-scores": ({"max_tokens": 0, "prompt_logprobs": True, "top_prompt_logprobs": 3}, PROMPTS),
    "one-prompt-score": ({"max_tokens": 2, "prompt_logprobs": True, "seed": 2}, PROMPTS[2:3]),
    "same-prompt-scores": ({"max_tokens": 0, "prompt_logprobs": True, "deterministic": True}, PROMPTS),
    "deterministic": ({"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 4, "deterministic": True}, PROMPTS),
    "deterministic-run": ({"max_tokens": 12, "n": 3, "temperature": 1.0, "seed": 4, "prompt_logprobs": True}, PROMPTS),
}


def sampled(engine: Driver, run_id: str, call: dict[str, Any], prompts: Sequence[Sequence[int]]) -> Any:
    return engine.do(run_id, token_rows(prompts, "prompt_ids"), sample=pb.SampleCall(**call))


@pytest.mark.parametrize("name", CALLS)
def test_samples_are_those_of_one_process(engines: Engines, name: str) -> None:
    run_id, (call, prompts) = f"samples-{name}", CALLS[name]
    for engine in (engines.one, engines.group):
        model, exact = "chats" if name == "schema" else "tiny", name == "deterministic-run"
        engine.create(run_id, seed=3, lora={"rank": 4}, base_model=model, deterministic=exact)
        engine.train(run_id, token_rows(PROMPTS))
    one, group = (sampled(engine, run_id, call, prompts) for engine in (engines.one, engines.group))
    assert one.proto.sample == group.proto.sample
    assert one.columns.keys() == group.columns.keys()
    for column, found in one.columns.items():
        theirs = group.columns[column]
        assert [level.tolist() for level in found.levels] == [level.tolist() for level in theirs.levels]
        if found.values.dtype.kind in "iu" or "deterministic" in name:
            assert found.values.tolist() == theirs.values.tolist()
        else:
            np.testing.assert_allclose(found.values, theirs.values, atol=1e-4)


def outside(call: dict[str, Any], prompts: Sequence[Sequence[int]], **request: Any) -> engine_pb2.EngineRequest:
    """A request for samples of the model itself."""
    asked = pb.SampleRequest(model="tiny", call=pb.SampleCall(**call), prompt_ids=[pb.TokenIds(ids=p) for p in prompts])
    return engine_pb2.EngineRequest(sample=asked, **request)


def test_new_tokens_are_streamed_from_all_ranks(engines: Engines) -> None:
    engine, call = engines.group, {"max_tokens": 10, "n": 2, "temperature": 1.0, "seed": 5}
    engine.link.send(outside(call, PROMPTS, id=9001, streams=True), b"")
    tokens: dict[int, list[int]] = {}
    reasons, texts, frames = {}, dict.fromkeys(range(2 * len(PROMPTS)), ""), 0
    while (reply := engine.receive()[0]).HasField("sample_frame"):
        frames += 1
        for delta in reply.sample_frame.deltas:
            tokens.setdefault(delta.row, []).extend(delta.token_ids)
            texts[delta.row] += "".join(delta.texts)
            if delta.stop_reason:
                reasons[delta.row] = delta.stop_reason
    assert frames >= 5
    whole = engines.one.request(sample=outside(call, PROMPTS).sample)[0].result.sample
    assert (
        [reasons[row] for row in sorted(reasons)] == list(whole.stop_reasons) == list(reply.result.sample.stop_reasons)
    )
    assert list(texts.values()) == list(whole.texts) == list(reply.result.sample.texts)
    assert sum(map(len, tokens.values())) == whole.num_sampled_tokens


def test_requests_beside_each_other_are_answered_each(engines: Engines) -> None:
    """Also where one of them fails: its grammar cannot be compiled."""
    calls = [({"max_tokens": 6 + number, "seed": number, "temperature": 1.0}, PROMPTS[:number]) for number in (1, 2, 3)]
    calls.append(({"max_tokens": 3, "seed": 1, "json_schema": '{"$ref": "#/nowhere"}'}, PROMPTS[:1]))
    engine: EngineProcess = engines.group
    for number, (call, prompts) in enumerate(calls):
        engine.link.send(outside(call, prompts, id=9100 + number), b"")
    found = {reply.id: reply for reply, _ in (engine.receive() for _ in calls)}
    for number, (call, prompts) in enumerate(calls):
        alone = engines.one.request(sample=outside(call, prompts).sample)[0]
        answer = found[9100 + number]
        assert (answer.result.sample, answer.error.code) == (alone.result.sample, alone.error.code)
    assert found[9103].error.code


@pytest.mark.parametrize("loss", [pytest.param("causal_lm", marks=pytest.mark.slow), "bco", "fault_beside"])
def test_samples_go_on_between_the_micro_batches_of_a_batch(engines: Engines, loss: str) -> None:
    if loss == "fault_beside" and "weights divided" in engines.group.hello.hello.device:
        pytest.skip("one rank's fault ends a group whose weights are divided")
    engine, run_id = engines.group, f"beside-{loss}"
    rows = token_rows([[1, 20 + row % 40, 30, 5 + row % 20, 9, 8, 7] for row in range(200)])
    call = pb.LossCall(loss_fn=loss)
    if loss == "bco":
        rows["label"] = Column(np.arange(200, dtype=np.float32) % 2)
        call = loss_call(get_loss(loss), {"reference_model": "base"})
    asked = {"max_tokens": 100, "n": 2, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    for each in (engine, engines.one):
        each.create(run_id, seed=3, lora={"rank": 4}, lanes=4)
        each.create(f"{run_id}-small", seed=4, lora={"rank": 4}, lanes=4)
    engine.link.send(outside(asked, PROMPTS, id=9001, streams=True), b"")
    assert engine.receive()[0].HasField("sample_frame")
    operation = pb.Operation(forward_backward=call)
    specs, buffers = encode(rows)
    sent = engine_pb2.EngineOperation(run_id=run_id, seq=1, operation=operation, tensors=specs)
    engine.link.send(engine_pb2.EngineRequest(id=9002, operation=sent), buffers)
    causal = {"forward_backward": pb.LossCall(loss_fn="causal_lm")}
    specs, buffers = encode(ROWS)
    sent = engine_pb2.EngineOperation(run_id=f"{run_id}-small", seq=1, operation=pb.Operation(**causal), tensors=specs)
    engine.link.send(engine_pb2.EngineRequest(id=9003, operation=sent), buffers)
    frames, answers = 0, dict[int, engine_pb2.EngineReply]()
    while len(answers) < 3:
        reply, _ = engine.receive()
        if reply.HasField("sample_frame"):
            frames += 9002 not in answers
        else:
            answers[reply.id] = reply
    engine.seqs[run_id] = 1
    alone = engines.one.op(run_id, rows, forward_backward=call)
    if loss == "fault_beside":
        assert "ValueError" in answers[9002].result.error.message
    else:
        assert frames >= 10, "the streams went on while the batch was computed"
        assert list(answers).index(9003) < list(answers).index(9002), "and so did a small operation of another run"
        assert answers[9003].result.loss.loss == engines.one.do(f"{run_id}-small", ROWS, **causal).proto.loss.loss
        assert answers[9002].result.loss.loss == alone.proto.loss.loss
        steps = [each.do(run_id, optim_step=STEP) for each in (engine, engines.one)]
        assert steps[0].proto.optim_step == steps[1].proto.optim_step
    whole = engines.one.request(sample=outside(asked, PROMPTS).sample)[0].result.sample
    assert answers[9001].result.sample == whole
