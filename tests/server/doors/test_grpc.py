"""The door: what is refused, with which words, and that nothing else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import ANYONE, Caller
from gradwire_server.checkpoint_files import MANIFEST, sealed
from gradwire_server.config import EngineSettings, ServerConfig, parse_model
from gradwire_server.core.core import PROTOCOL
from gradwire_server.doors.grpc.door import SERVICE
from gradwire_server.doors.grpc.interceptors import CALLER, GRPC_STATUS
from gradwire_server.doors.grpc.service import TrainingService
from gradwire_server.engine_client.process import EngineProcess
from gradwire_server.errors import ServiceError
from gradwire_server.server import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_engine import FakeEngine
from support.front import Client, Door, Start
from support.keyed import error_of
from support.scripted import until


def test_every_code_has_a_grpc_status() -> None:
    assert set(GRPC_STATUS) == set(pb.ErrorCode.values())
    assert grpc.StatusCode.OK not in GRPC_STATUS.values() and grpc.StatusCode.UNKNOWN not in GRPC_STATUS.values()


def test_the_front_does_not_import_torch() -> None:
    imports = "import sys, gradwire_server.cli.app, gradwire_server.server"
    code = imports + "; print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


async def test_a_connection_that_says_nothing_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them took all descriptors of the server, so that it could not write its journal."""
    monkeypatch.setattr("gradwire_server.doors.grpc.door.HANDSHAKE_S", 0.2)
    async with start() as door:
        host, _, port = door.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
        await (await door.client()).begin()


async def test_a_mistake_of_the_server_leaves_as_a_number(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(door.server.core.scheduler.results, "release", broken)
    client = await (await door.client()).begin()
    with pytest.raises(grpc.RpcError) as caught:
        await client.stub.AckResults(pb.AckResultsRequest(run_id=client.run_id, up_to_seq=1, epoch=client.epoch))
    error = error_of(caught.value)
    assert caught.value.code() == grpc.StatusCode.INTERNAL and error.code == pb.ERROR_CODE_INTERNAL
    assert error.request_id in error.message and "secret" not in error.message


async def test_a_message_that_cannot_be_parsed_is_an_invalid_argument(door: Door) -> None:
    async with grpc.aio.insecure_channel(door.server.address) as channel:
        for method in ("CreateRun", "GetRun"):
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/{method}")(b"\xff\xff\xff")
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        stream = channel.stream_stream(f"/{SERVICE}/Submit")()
        await stream.write(b"\xff\xff")
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.holds_loop("it looks through all objects")
async def test_calls_leave_nothing_to_the_garbage_collector(door: Door) -> None:
    """Their collection holds the event loop; gRPC leaves cycles of its own, but none with a call's context."""
    kinds = {"_MessageReceiver", "_ServicerContext", "RPCState", "Caller", "ServiceError"}
    client = await (await door.client()).begin()

    def held() -> Counter[str]:
        return Counter(name for each in gc.get_objects() if (name := type(each).__name__) in kinds)

    await asyncio.sleep(0.1)  # what the calls above hold ends, and would hide as much of those below
    gc.collect()
    gc.disable()
    try:
        before = held()
        assert before, "gRPC's objects have these names"
        for run_id in (client.run_id, "run-of-nobody"):
            with contextlib.suppress(grpc.RpcError):
                await client.stub.GetRun(pb.GetRunRequest(run_id=run_id))
            with contextlib.suppress(grpc.RpcError):
                await anext(aiter(client.stub.GetHistory(pb.GetHistoryRequest(run_id=run_id))), None)
        for seq in (1, 0, 10**6):
            assert (await client.fb(seq, epoch=client.epoch + (seq == 1))).HasField("error")
        await client.send(pb.SubmitFrame())
        with pytest.raises(grpc.RpcError):
            await client.ack()
        await until(lambda: held() <= before)
    finally:
        gc.enable()


async def test_a_stream_dropped_between_two_messages_ends_what_it_reads(door: Door) -> None:
    """gRPC drops a handler at its yield when the client leaves: its requests must not be read any more by then."""
    client = await (await door.client()).begin()
    header = pb.OperationHeader(run_id=client.run_id, epoch=client.epoch + 1, seq=1)
    header.operation.zero_grad.SetInParent()

    async def requests() -> AsyncGenerator[pb.SubmitFrame]:
        yield pb.SubmitFrame(header=header)
        await asyncio.Event().wait()

    CALLER.set(ANYONE)
    reading = requests()
    acks = TrainingService(door.server.core).Submit(reading, None)
    assert (await anext(acks)).HasField("error")
    await acks.aclose()
    await reading.aclose()  # fails while a task still reads


SPEC = {"dtype": pb.DTYPE_UINT8}
MALFORMED: list[tuple[str, list[pb.TensorSpec], str]] = [
    ("sizes that do not add up", [pb.TensorSpec(name="x", shape=[1, 5], **SPEC)], ""),
    ("no dtype", [pb.TensorSpec(name="x", shape=[4])], "x"),
    ("twice", [pb.TensorSpec(name="x", shape=[2], **SPEC), pb.TensorSpec(name="x", shape=[2], **SPEC)], "x"),
    ("absurd", [pb.TensorSpec(name="x", shape=[2**60, 2**60], **SPEC)], "x"),
    ("no name", [pb.TensorSpec(shape=[4], **SPEC)], ""),
]


@pytest.mark.parametrize(("tensors", "field"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
async def test_a_malformed_batch_fails_and_the_run_goes_on(door: Door, tensors: Any, field: str) -> None:
    client = await (await door.client()).begin()
    assert not (await client.fb(1, "a", b"1234", tensors=tensors)).HasField("error")
    await client.fb(2, "b", b"1234", failure_seen=1)
    [(result, _), (good, _)] = await client.results(2)
    assert (result.error.code, result.error.field) == (pb.ERROR_CODE_INVALID_BATCH, field)
    assert result.error.rule and good.status == pb.STATUS_SUCCEEDED
    assert door.engine.runs[client.run_id].history == ["b"]


async def test_a_payload_that_is_not_what_its_digest_names_is_refused_and_can_be_sent_again(door: Door) -> None:
    client = await (await door.client()).begin()
    refused = await client.fb(1, "a", b"1234", digest=bytes(16))
    assert refused.error.code == pb.ERROR_CODE_PAYLOAD_CORRUPT
    assert not (await client.fb(1, "a", b"1234")).HasField("error")
    assert await client.statuses(1) == ["ok"]


async def test_what_passes_a_limit_fails_with_its_name_and_blocks_nobody(start: Start) -> None:
    async with start(limits={"max_payload_bytes": 1000, "max_rows": 3, "max_tensors": 2}) as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a", bytes(3 << 20))
        rows = pb.TensorSpec(name="x", shape=[4], **SPEC)
        await client.fb(2, "a", b"1234", tensors=[rows], failure_seen=1)
        many = [pb.TensorSpec(name=name, shape=[1], **SPEC) for name in "abc"]
        await client.fb(3, "a", b"123", tensors=many, failure_seen=2)
        await client.fb(4, "a", bytes(1000), failure_seen=3)
        results = await client.results(4)
        rules = [result.error.rule for result, _ in results]
        assert rules == ["max_payload_bytes = 1000", "max_rows = 3", "max_tensors = 2", ""]
        assert all("--limit" in result.error.message for result, _ in results[:3])


async def test_an_operation_of_no_kind_or_with_a_name_that_leaves_its_folder_fails(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.submit(1)
    for seq, name in enumerate(("../../x", "a/b", ".hidden", "x" * 101), 2):
        await client.submit(seq, save_checkpoint=pb.SaveCheckpoint(name=name), failure_seen=seq - 1)
    await client.submit(6, export=pb.ExportModel(name="../x"), failure_seen=5)
    assert await client.statuses(6) == ["invalid_argument"] * 6
    assert door.engine.seen == []


@pytest.mark.parametrize(
    "frames",
    [
        [pb.SubmitFrame(chunk=b"x")],
        [pb.SubmitFrame(header=pb.OperationHeader(payload_bytes=9), chunk=b"x")] * 2,
        [pb.SubmitFrame(header=pb.OperationHeader(payload_bytes=1), chunk=b"xy")],
        [pb.SubmitFrame(header=pb.OperationHeader(payload_bytes=2 << 20), chunk=bytes((1 << 20) + 1))],
    ],
    ids=["chunk first", "header too early", "too much", "chunk too large"],
)
async def test_frames_out_of_order_end_the_stream(door: Door, frames: list[pb.SubmitFrame]) -> None:
    client = await (await door.client()).begin()
    await client.send(*frames)
    with pytest.raises(grpc.RpcError) as caught:
        await client.ack()
    assert error_of(caught.value).code == pb.ERROR_CODE_INVALID_ARGUMENT


async def test_what_does_not_exist_is_unknown(door: Door) -> None:
    client = await door.client()
    stub, run = client.stub, {"run_id": "run-nobody"}
    for call in (
        stub.GetRun(pb.GetRunRequest(**run)), stub.DeleteRun(pb.DeleteRunRequest(**run)),
        stub.OpenRun(pb.OpenRunRequest(**run)), stub.Cancel(pb.CancelRequest(**run)),
        stub.AckResults(pb.AckResultsRequest(**run)), stub.ListCheckpoints(pb.ListCheckpointsRequest(**run)),
    ):  # fmt: skip
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert error_of(caught.value).code == pb.ERROR_CODE_UNKNOWN_RUN
    for call in (
        stub.ForkRun(pb.ForkRunRequest(checkpoint="run-nobody/x")),
        stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint="../../etc")),
        stub.Download(pb.DownloadRequest(checkpoint="run-nobody/x")).read(),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert error_of(caught.value).code == pb.ERROR_CODE_UNKNOWN_CHECKPOINT
    with pytest.raises(grpc.RpcError) as caught:
        await stub.CreateRun(pb.CreateRunRequest(config=pb.RunConfig(base_model="gpt-9")))
    assert (
        error_of(caught.value).code == pb.ERROR_CODE_UNKNOWN_MODEL and "it has tiny" in error_of(caught.value).message
    )


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"head": "regression"}, "head"),
        ({"lora": pb.LoraSettings()}, "lora.rank"),
        ({"lora": pb.LoraSettings(rank=1, dropout=1.0)}, "lora.dropout"),
        ({"lora": pb.LoraSettings(rank=1, alpha=float("nan"))}, "lora.alpha"),
        ({"name": "n" * 201}, "name"),
        ({"tags": {"k": "v" * 201}}, "tags"),
    ],
)
async def test_a_run_that_makes_no_sense_is_not_made(door: Door, config: dict[str, Any], field: str) -> None:
    client = await door.client()
    with pytest.raises(grpc.RpcError) as caught:
        await client.begin(**config)
    assert error_of(caught.value).field == field


async def test_one_key_makes_one_run(door: Door) -> None:
    client = await door.client()
    request = pb.CreateRunRequest(config=pb.RunConfig(base_model="/models/tiny"), idempotency_key="k")
    made = await asyncio.gather(*(client.stub.CreateRun(request) for _ in range(8)))
    assert len({run.run_id for run in made}) == 1 and made[0].config.base_model == "tiny"
    request.config.seed = 1
    with pytest.raises(grpc.RpcError) as caught:
        await client.stub.CreateRun(request)
    assert error_of(caught.value).code == pb.ERROR_CODE_ALREADY_EXISTS


async def test_two_with_one_key_in_one_turn_of_the_loop_make_one_run(door: Door) -> None:
    runs, config, caller = door.server.core.runs, pb.RunConfig(base_model="tiny"), Caller("")
    one, other = await asyncio.gather(runs.create(caller, config, "k"), runs.create(caller, config, "k"))
    assert one == other and door.server.core.storage.records.count == 1


async def test_runs_are_listed_in_pages_and_their_number_is_bounded(start: Start) -> None:
    async with start(limits={"max_runs": 5}) as door:
        client = await door.client()
        made = [(await client.begin(name=str(i))).run_id for i in range(5)]
        listed, token = [], ""
        while True:
            page = await client.stub.ListRuns(pb.ListRunsRequest(page_size=2, page_token=token))
            listed += [run.run_id for run in page.runs]
            token = page.next_page_token
            if not token:
                break
        assert listed == made
        with pytest.raises(grpc.RpcError) as caught:
            await client.begin()
        assert error_of(caught.value).code == pb.ERROR_CODE_LIMIT_EXCEEDED


async def test_a_checkpoint_downloads_whole(door: Door, tmp_path: Path) -> None:
    client = await (await door.client()).begin()
    await client.fb(1, "word")
    await client.submit(2, save_checkpoint=pb.SaveCheckpoint(name="c"))
    await client.results(2)
    secret = tmp_path / "secret"
    secret.write_text("no")
    folder = tmp_path / "runs" / client.run_id / "checkpoints" / "c"
    (folder / "link").symlink_to(secret)
    (folder / "empty").touch()
    manifest = {"run_id": client.run_id, "name": "c", "step": 0, "seq": 2, "created_at": 0.0, "note": "", "config": {}}
    (folder / MANIFEST).write_text(sealed(manifest | {"versions": {}, "files": {}}))
    found: dict[str, bytes] = {}
    async for frame in client.stub.Download(pb.DownloadRequest(checkpoint=f"{client.run_id}/c")):
        if frame.file:
            name, found[frame.file] = frame.file, b""
            size = frame.size_bytes
        found[name] += frame.chunk
        assert len(frame.chunk) <= 1 << 20 and len(found[name]) <= size
    assert found.pop(MANIFEST)
    assert {name: len(data) for name, data in found.items()} == {"deep/big": 3 << 20, "empty": 0, "history": 6}
    for export in (f"{client.run_id}/../checkpoints/c", f"{client.run_id}/nothing"):
        with pytest.raises(grpc.RpcError):
            await client.stub.Download(pb.DownloadRequest(export=export)).read()


async def test_without_keys_the_server_stays_on_loopback(tmp_path: Path) -> None:
    config = ServerConfig(address="0.0.0.0:0", state_dir=tmp_path, models={"tiny": "x"})
    with pytest.raises(SystemExit, match="loopback only"):
        async with Server(config, [FakeEngine(tmp_path)]):
            pass


async def test_live_and_ready_are_told_apart(door: Door) -> None:
    async with grpc.aio.insecure_channel(door.server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def state(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert (await state(""), await state(SERVICE)) == (1, 1)
        door.engine.end()
        async with asyncio.timeout(60):
            while await state(SERVICE) != 2:  # noqa: ASYNC110  nobody announces it
                await asyncio.sleep(0.01)
        assert await state("") == 1


async def test_streams_end_with_a_word_when_the_server_stops(start: Start) -> None:
    async with start() as door:
        client: Client = await (await door.client()).begin()
        await client.fb(1)
        call = client.stub.Results(pb.ResultsRequest(run_id=client.run_id, from_seq=1))
        assert (await call.read()).header.seq == 1
        reading, acking = asyncio.create_task(call.read()), asyncio.create_task(client.ack())
        await door.server.stop()
        for task in (reading, acking):
            with pytest.raises(grpc.RpcError) as caught:
                await task
            assert error_of(caught.value).code == pb.ERROR_CODE_SHUTTING_DOWN


async def test_a_fault_in_starting_the_engine_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gradwire_server.engine_client.launcher.command", lambda *_: 1 // 0)
    engine = EngineProcess.here(EngineSettings(state_dir=tmp_path, models={"tiny": "x"}))
    open_before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(ServiceError, match=r"did not start .*division"):
        await asyncio.wait_for(engine.start(), 60)
    assert sorted(os.listdir("/proc/self/fd")) == open_before, "a failed start leaves its socket or its marks open"


async def test_the_server_says_what_it_is(door: Door) -> None:
    info = await (await door.client()).stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.protocol, info.device, info.engine_ready) == (PROTOCOL, "fake", True)
    assert info.limits["max_payload_bytes"] == 1 << 30 and info.durability == "journal"


def test_models_are_named_by_their_folder_or_as_asked(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    assert parse_model(str(tmp_path / "llama")) == ("llama", str(tmp_path / "llama"))
    assert parse_model("mine=/somewhere/else") == ("mine", "/somewhere/else")
    assert parse_model("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
