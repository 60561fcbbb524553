"""Each limit has a default, a flag and an error that names it; what is no tensor, name or number does not pass."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from gradwire_server.limits import Limits
from support.front import Start
from support.keyed import code_of, error_of, outcome


def ids(*rows: list[int], name: str = "input_ids") -> dict[str, Any]:
    specs, buffers = codec.encode({name: codec.Column.from_rows([np.array(row, np.int32) for row in rows])})
    return {"payload": b"".join(buffers), "tensors": specs}


def images(*contents: bytes) -> dict[str, Any]:
    specs, buffers = codec.encode(
        {
            codec.IMAGES: codec.Column.from_rows([np.arange(len(contents), dtype=np.int32)]),
            codec.IMAGE_BYTES: codec.Column.from_rows([np.frombuffer(content, np.uint8) for content in contents]),
        }
    )
    return {"payload": b"".join(buffers), "tensors": specs}


def gray(width: int, height: int) -> bytes:
    stream = BytesIO()
    np.save(stream, np.zeros((height, width), np.uint8))
    return stream.getvalue()


LOSS = {"forward_backward": pb.LossCall(loss_fn="a")}
SAMPLE: dict[str, Any] = {"prompts": ["x", "y"], "n": 1, "max_tokens": 1}


def sample(**call: Any) -> dict[str, Any]:
    return {"sample": pb.SampleCall(**SAMPLE | call)}


OPERATIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("max_payload_bytes", 10, {**LOSS, **ids([1, 2, 3])}),
    ("max_tensors", 1, {**LOSS, "payload": b"ab", "tensors": [
        pb.TensorSpec(name=name, dtype=pb.DTYPE_UINT8, shape=[1]) for name in "ab"]}),
    ("max_rows", 1, {**LOSS, **ids([1], [2])}),
    ("max_row_tokens", 2, {**LOSS, **ids([1], [1, 2, 3])}),
    ("max_row_tokens", 2, {**LOSS, **ids([1], [1, 2, 3], name="chosen_input_ids")}),
    ("max_images", 1, {**LOSS, **images(b"a", b"b")}),
    ("max_image_bytes", 2, {**LOSS, **images(b"a", b"abc")}),
    ("max_pixels", 2_000, {**LOSS, **images(gray(50, 20), gray(50, 21))}),
    ("max_batch_tokens", 3, {**LOSS, **ids([1, 2], [3, 4])}),
    ("max_rows", 1, sample()),
    ("max_samples", 9, sample(n=5)),
    ("max_sample_tokens", 8, sample(max_tokens=9)),
    ("max_payload_bytes", 15, sample()),
    ("max_stops", 2, sample(stop=["a", "b", "c"])),
    ("max_stops", 2, sample(stop_token_ids=[1, 2, 3])),
    ("max_stop_chars", 3, sample(stop=["abcd"])),
    ("max_text_chars", 3, sample(prompts=["abcd"])),
    ("max_logit_biases", 1, sample(logit_bias=[pb.LogitBias(token_id=1), pb.LogitBias(token_id=2)])),
    ("max_top_logprobs", 2, sample(top_logprobs=3)),
    ("max_top_logprobs", 2, sample(prompt_logprobs=True, top_prompt_logprobs=3)),
    ("max_kwargs_chars", 10, sample(json_schema='{"a": "0123456"}')),
    ("max_schema_entries", 4, sample(json_schema='{"properties": {"a": {}}}')),
    ("max_kwargs_chars", 10, {"forward": pb.LossCall(loss_kwargs_json='{"a": "0123456"}')}),
    ("max_string_chars", 5, {"forward": pb.LossCall(loss_fn="abcdef")}),
    ("max_string_chars", 5, {"forward": pb.LossCall(outputs=["abcdef"])}),
    ("max_string_chars", 5, {"save_checkpoint": pb.SaveCheckpoint(note="abcdef")}),
    ("max_string_chars", 5, {"backward": pb.Backward(abandoned="abcdef")}),
]  # fmt: skip
CALLS: list[tuple[str, int, str, Any]] = [
    ("max_rows", 1, "Sample", pb.SampleRequest(model="tiny", prompt_ids=[pb.TokenIds(ids=[1])] * 2)),
    ("max_sample_tokens", 8, "Sample", pb.SampleRequest(model="tiny", call=pb.SampleCall(max_tokens=9))),
    ("max_row_tokens", 2, "Sample", pb.SampleRequest(model="tiny", prompt_ids=[pb.TokenIds(ids=[1, 2, 3])])),
    ("max_images", 1, "Sample", pb.SampleRequest(model="tiny", images=[b"a", b"b"])),
    ("max_image_bytes", 2, "Sample", pb.SampleRequest(model="tiny", images=[b"abc"])),
    ("max_pixels", 999, "Sample", pb.SampleRequest(model="tiny", images=[gray(50, 20)])),
    ("max_payload_bytes", 7, "Sample", pb.SampleRequest(model="tiny", call=pb.SampleCall(prompts=["x"], max_tokens=1))),
    ("max_string_chars", 5, "Sample", pb.SampleRequest(model="abcdef")),
    ("max_encode_texts", 1, "Encode", pb.EncodeRequest(model="tiny", texts=["a", "b"])),
    ("max_encode_texts", 1, "Decode", pb.DecodeRequest(model="tiny", sequences=[pb.TokenIds()] * 2)),
    ("max_text_chars", 3, "Encode", pb.EncodeRequest(model="tiny", texts=["abcd"])),
    ("max_tags", 1, "CreateRun", pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny", tags={"a": "", "b": ""}))),
    ("max_tags", 1, "CreateRun", pb.CreateRunRequest(config=pb.RunConfig(
        base_model="tiny", lora=pb.LoraSettings(rank=1, target_modules=["a", "b"])))),
    ("max_name_chars", 5, "CreateRun", pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny", name="abcdef"))),
    ("max_name_chars", 5, "CreateRun", pb.CreateRunRequest(
        config=pb.RunConfig(base_model="tiny"), idempotency_key="abcdef")),
    ("max_name_chars", 5, "CreateRun", pb.CreateRunRequest(config=pb.RunConfig(
        base_model="tiny", lora=pb.LoraSettings(rank=1, target_modules=["abcdef"])))),
    ("max_name_chars", 5, "OpenRun", pb.OpenRunRequest(writer="abcdef")),
    ("max_runs", 1, "CreateRun", pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny"))),
    ("key_runs", 1, "CreateRun", pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny"))),
]  # fmt: skip
ELSEWHERE = {
    "key_records": "tests/server/doors/test_tinker_growth.py",
    "max_json_values": "test_what_was_found_is_refused_in_a_sentence",
    "max_json_containers": "test_what_was_found_is_refused_in_a_sentence",
    "max_message_fields": "test_what_was_found_is_refused_in_a_sentence",
    "max_http_body_bytes": "tests/server/doors/test_http.py",
    "max_json_body_bytes": "tests/server/doors/test_http.py",
    "max_message_bytes": "test_a_message_too_large_is_refused_by_number",
    "max_queued_operations": "tests/server/scheduling/test_operations.py",
    "max_queued_bytes": "test_the_bytes_queued_by_a_run_are_bounded",
    "max_part_bytes": "test_the_parts_of_batches_are_bounded_until_their_last_ones_come",
    "key_part_bytes": "test_the_parts_of_batches_are_bounded_until_their_last_ones_come",
    "max_messages": "tests/end_to_end/test_rendering.py",
    "key_waiting_calls": "tests/server/security/test_calls.py",
    "key_streams": "tests/server/security/test_calls.py",
    "key_call_bytes": "tests/server/security/test_calls.py",
    "key_memory_percent": "tests/server/engine/test_run_memory.py",
    "max_upload_bytes": "tests/server/core/test_uploads.py",
    "key_upload_bytes": "tests/server/core/test_uploads.py",
    "max_file_bytes": "tests/server/core/test_jobs.py",
    "max_files": "tests/server/core/test_jobs.py",
    "max_jobs": "tests/server/core/test_jobs.py",
    "key_file_bytes": "tests/server/core/test_jobs.py",
    "key_jobs": "tests/server/core/test_jobs.py",
    "key_running_jobs": "tests/server/core/test_jobs.py",
    "max_window": "tests/server/scheduling/test_operations.py",
    "max_window_bytes": "test_the_bytes_that_wait_for_a_number_are_bounded",
    "max_checkpoints": "test_the_checkpoints_of_a_run_are_bounded",
    "max_checkpoint_bytes": "test_the_checkpoints_of_a_run_are_bounded",
    "max_history_points": "tests/server/scheduling/test_history.py",
    "max_recorded_bytes": "tests/end_to_end/test_recorded.py",
    "max_incoming_bytes": "test_payloads_on_their_way_are_bounded",
    "key_queued_operations": "test_a_keys_queue_is_bounded_over_all_its_runs_and_empties",
    "key_queued_bytes": "test_a_keys_queue_is_bounded_over_all_its_runs_and_empties",
    **dict.fromkeys(
        (
            "key_sessions",
            "key_session_bytes",
            "max_session_calls",
            "max_session_turns",
            "max_session_seconds",
            "session_idle_seconds",
        ),
        "tests/server/doors/test_rollout_sessions.py",
    ),
    "key_tokens_per_minute": "test_a_keys_tokens_run_over_time",
}


def test_every_limit_is_tried() -> None:
    assert {name for name, *_ in OPERATIONS} | {name for name, *_ in CALLS} | set(ELSEWHERE) == set(Limits.model_fields)
    sources = {path: path.read_text() for path in Path(__file__).parent.glob("test_*.py")}
    root = Path(__file__).parents[3]
    for name, where in ELSEWHERE.items():
        if where.endswith(".py"):
            assert name in (root / where).read_text(), name
        else:
            assert any(f"def {where}(" in source for source in sources.values()), where


@pytest.mark.parametrize(("name", "value", "operation"), OPERATIONS, ids=lambda value: str(value)[:20])
async def test_an_operation_past_a_limit_fails_by_its_name(
    start: Start, name: str, value: int, operation: dict[str, Any]
) -> None:
    async with start(limits={name: value}) as door:
        client = await (await door.client()).begin()
        assert not (await client.submit(1, **operation)).HasField("error")
        await client.fb(2, failure_seen=1)
        [(result, _), (after, _)] = await client.results(2)
        assert result.error.code == pb.ERROR_CODE_LIMIT_EXCEEDED and result.error.rule == f"{name} = {value}"
        assert f"--limit {name}=N" in result.error.message and door.engine.seen == [(client.run_id, 2)]
        assert after.status == pb.STATUS_SUCCEEDED


@pytest.mark.long
@pytest.mark.parametrize(("name", "value", "rpc", "request_"), CALLS, ids=lambda value: str(value)[:20])
async def test_a_call_past_a_limit_is_refused_by_its_name(
    start: Start, name: str, value: int, rpc: str, request_: Any
) -> None:
    async with start(limits={name: value}) as door:
        client = await door.client()
        if name.endswith("runs") or rpc == "OpenRun":
            await client.begin()
        if rpc == "OpenRun":
            request_.run_id = client.run_id
        error = await outcome(client.stub, rpc, request_)
        assert code_of(error) == "limit_exceeded" and name.removeprefix("key_") in error.rule
        assert f"--limit {name}=N" in error.message


async def test_a_message_too_large_is_refused_by_number(start: Start) -> None:
    async with start(limits={"max_message_bytes": 2 << 20}) as door:
        client = await (await door.client()).begin()
        with pytest.raises(Exception, match=r"larger than max \(\d+ vs. 2097152\)"):
            await client.stub.CreateRun(pb.CreateRunRequest(idempotency_key="x" * (3 << 20)))
        assert not (await client.fb(1)).HasField("error")


async def test_a_compressed_message_is_not_unpacked(start: Start) -> None:
    async with start() as door, grpc.aio.insecure_channel(door.server.address) as channel:
        call = TrainingServiceStub(channel).CreateRun
        bomb = pb.CreateRunRequest(idempotency_key="x" * (7 << 20))
        with pytest.raises(grpc.RpcError) as caught:
            await call(bomb, compression=grpc.Compression.Gzip)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED, caught.value


async def test_the_bytes_queued_by_a_run_are_bounded(start: Start) -> None:
    async with start(limits={"max_queued_bytes": 1000}) as door:
        client = await (await door.client()).begin()
        door.engine.gate.clear()
        await client.fb(1, "a", bytes(600))
        error = (await client.fb(2, "a", bytes(600))).error
        assert error.code == pb.ERROR_CODE_LIMIT_EXCEEDED and "--limit max_queued_bytes=N" in error.message
        door.engine.gate.set()
        await client.results(1)
        assert not (await client.fb(2, "a", bytes(600))).HasField("error")


@pytest.mark.parametrize("limit", ["max_part_bytes", "key_part_bytes"])
async def test_the_parts_of_batches_are_bounded_until_their_last_ones_come(start: Start, limit: str) -> None:
    part = {"forward_backward": pb.LossCall(loss_fn="a", accumulate=True)}
    async with start(limits={limit: 1000}) as door:
        client = await (await door.client()).begin()
        other = client if limit == "max_part_bytes" else await (await door.client()).begin()
        later = 2 if other is client else 1
        assert not (await client.submit(1, bytes(600), **part)).HasField("error")
        await client.results(1)
        refused = (await other.submit(later, bytes(600), **part)).error
        assert refused.code == pb.ERROR_CODE_LIMIT_EXCEEDED and refused.rule == f"{limit} = 1000"
        assert "send the last part, or zero_grad" in refused.message
        ends: tuple[dict[str, Any], ...] = (
            {"forward_backward": pb.LossCall(loss_fn="a")}, {"zero_grad": pb.ZeroGrad()},
        )  # fmt: skip
        for seq, end in zip((2, 4), ends):  # what ends the parts passes, and gives their room back
            assert not (await client.submit(seq, bytes(600) if seq == 2 else b"", **end)).HasField("error")
            await client.results(seq)
            assert not (await client.submit(seq + 1, bytes(600), **part)).HasField("error")
            await client.results(seq + 1)
        await client.stub.DeleteRun(pb.DeleteRunRequest(run_id=client.run_id))
        if other is not client:
            assert not (await other.submit(1, bytes(600), **part)).HasField("error")


@pytest.mark.parametrize("limit", ["max_part_bytes", "key_part_bytes"])
async def test_the_parts_of_batches_are_counted_again_after_a_restart(start: Start, limit: str) -> None:
    part = {"forward_backward": pb.LossCall(loss_fn="a", accumulate=True)}
    async with start(limits={limit: 1000}) as door:
        client = await (await door.client()).begin()
        for seq in (1, 2):
            await client.submit(seq, bytes(400), **part)
        await client.results(2)
    async with start(limits={limit: 1000}) as door:
        again = await door.client()
        again.run_id, again.epoch = client.run_id, client.epoch
        await again.submit(3, forward=pb.LossCall(loss_fn="a"))  # brings the run back
        await again.results(3)
        refused = (await again.submit(4, bytes(400), **part)).error
        assert refused.code == pb.ERROR_CODE_LIMIT_EXCEEDED and refused.rule == f"{limit} = 1000"
        await again.submit(4, zero_grad=pb.ZeroGrad())
        await again.results(4)
        door.engine.die()  # and once, not twice, after the end of an engine
        await again.submit(5, bytes(600), **part)
        await again.results(5)
        door.engine.die()
        await again.submit(6, forward=pb.LossCall(loss_fn="a"))
        await again.results(6)
        assert not (await again.submit(7, bytes(400), **part)).HasField("error")


async def test_the_bytes_that_wait_for_a_number_are_bounded(start: Start) -> None:
    async with start(limits={"max_window_bytes": 1000}) as door:
        client = await (await door.client()).begin()
        await client.send(*client.frames(2, bytes(2000), forward_backward=pb.LossCall(loss_fn="2")))  # alone it passes
        refused = await client.fb(3, "3", bytes(1))
        assert refused.seq == 3 and refused.error.rule == "max_window_bytes = 1000"
        assert not (await client.fb(1, "1", bytes(3000))).HasField("error")
        assert not (await client.ack()).HasField("error")
        await client.fb(3, "3", bytes(1))
        await client.results(3)
        assert door.engine.runs[client.run_id].history == ["1", "2", "3"]


async def test_the_checkpoints_of_a_run_are_bounded(start: Start) -> None:
    async with start(limits={"max_checkpoints": 2}) as door:
        client = await (await door.client()).begin()
        for seq, name in enumerate("aabc", 1):
            save = pb.SaveCheckpoint(name=name, overwrite=True)
            await client.submit(seq, save_checkpoint=save)
        assert await client.statuses(4) == ["ok", "ok", "ok", "limit_exceeded"]
        [(result, _)] = await client.results(1, 4)
        assert result.error.rule == "max_checkpoints = 2"
        await client.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint=f"{client.run_id}/a"))
        await client.submit(5, save_checkpoint=pb.SaveCheckpoint(name="c"), failure_seen=4)
        assert await client.statuses(1, 5) == ["ok"]
    async with start(limits={"max_checkpoint_bytes": 1}) as door:
        run = door.server.core.storage.records._records[client.run_id]
        client = await (await door.client()).open(client.run_id, takeover=True)
        for checkpoint in run.checkpoints.values():
            checkpoint.size_bytes = 1
        await client.submit(6, save_checkpoint=pb.SaveCheckpoint(name="d"))
        [(result, _)] = await client.results(1, 6)
        assert result.error.rule == "max_checkpoint_bytes = 1"


@pytest.mark.parametrize(
    "kwargs",
    ["{", "[" * 100_000, '{"a": ' * 20_000, "1" * 5000, "\ud800".encode("utf-8", "surrogatepass").decode("latin1")],
)
async def test_arguments_that_are_no_json_fail_in_their_place(start: Start, kwargs: str) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.submit(1, forward_backward=pb.LossCall(loss_fn="a", loss_kwargs_json=kwargs))
        assert await client.statuses(1) == ["invalid_argument"] and not door.engine.seen


@pytest.mark.parametrize("way", ["operation", "rpc"])
@pytest.mark.parametrize("of", ["images", "grammar"])
async def test_images_and_grammars_count_against_the_tokens_of_their_key(start: Start, of: str, way: str) -> None:
    image, schema = gray(400, 400), json.dumps({"const": "a" * 150})
    async with start(limits={"key_tokens_per_minute": 100}) as door:
        client = await (await door.client()).begin()
        if way == "operation":
            sent = {**LOSS, **images(image)} if of == "images" else sample(json_schema=schema)
            await client.submit(1, **sent)
        else:
            call = pb.SampleCall(**SAMPLE, **({} if of == "images" else {"json_schema": schema}))
            await client.stub.Sample(
                pb.SampleRequest(model="tiny", call=call, images=[image] if of == "images" else [])
            ).read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Sample(pb.SampleRequest(model="tiny", call=pb.SampleCall(**SAMPLE))).read()
        assert error_of(caught.value).rule == "tokens_per_minute = 100"
