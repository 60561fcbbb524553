"""A real server process, its engine and a tiny model, and callers who mean harm: what it costs, what they read, what
stays in the log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil
import pytest
import torch
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from gradwire_server.access.key_file import KeyFile
from support import http2_floods
from support.front import Client
from support.keyed import Keyed, code_of, error_of, outcome

pytestmark = pytest.mark.long

UNAUTHENTICATED_MIB = 256
ALLOWED_GROWTH_MIB = 64
ALLOWED = ("empty", "pickled", "torn", "later")
SECRETS = ("tell-nobody-prompt", "tell-nobody-tag", "tell-nobody-stop", "tell-nobody-note", "tell-nobody-argument")


class Hostile:
    """The process, its folders, its log, and a key that works."""

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        self.folder, self.models = folder, models
        self.secret = KeyFile(folder / "state").create("ada")
        self.log_file = folder / "log"
        command = [
            sys.executable,
            "-m",
            "gradwire_server.cli",
            "serve",
            "--address",
            "127.0.0.1:0",
            "--threads",
            "1",
        ]
        command += ["--state-dir", str(folder / "state")]
        for name, path in models.items():
            command += ["--allow-model" if name in ALLOWED else "--model", f"{name}={path}"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("gradwire: listening on "), self.log
        self.address = line.split()[-1]

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(120) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("hostile")
    models = {"tiny": tiny_model_path, "later": tiny_model_path}
    for name in ("empty", "pickled", "torn"):
        models[name] = shutil.copytree(tiny_model_path, folder / name)
        (models[name] / "model.safetensors").unlink()
    (models["torn"] / "model.safetensors").write_bytes(b"\xff" * 100)
    torch.save({"x": Trap(folder / "sprung")}, models["pickled"] / "pytorch_model.bin")
    hostile = Hostile(folder, models)
    yield hostile
    hostile.end()


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


@pytest.fixture
async def client(server: Hostile) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        client = Client(channel)
        client.stub = Keyed(client.stub, server.secret)
        client.patience_s = 120.0
        yield client


def peak_mib(server: Hostile) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


@pytest.mark.holds_loop("the client serializes messages of hundreds of MiB")
async def test_an_unauthenticated_flood_costs_nothing(server: Hostile) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        stub: Any = TrainingServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            await stub.ListRuns(pb.ListRunsRequest())
        before, took = peak_mib(server), psutil.Process(server.process.pid).cpu_times().user
        huge = pb.CreateRunRequest(idempotency_key="x" * (UNAUTHENTICATED_MIB << 20))
        for stubbed in (stub, Keyed(stub, "gw_wrong")):
            with pytest.raises(grpc.RpcError) as caught:
                await stubbed.CreateRun(huge)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        stream = stub.Submit()
        frame = pb.SubmitFrame(header=pb.OperationHeader(payload_bytes=1 << 30), chunk=bytes(1 << 20))
        with pytest.raises((grpc.RpcError, asyncio.InvalidStateError)):  # the stream has ended
            for sent in range(UNAUTHENTICATED_MIB):  # noqa: B007  it is read below
                await stream.write(frame)
        assert sent < UNAUTHENTICATED_MIB // 2, "the server reads on"  # what is in flight when it ends is the network's
        grew = peak_mib(server) - before
        seconds = psutil.Process(server.process.pid).cpu_times().user - took
    print(f"3 x {UNAUTHENTICATED_MIB} MiB without a key: {grew:.1f} MiB and {seconds:.2f} s of CPU")
    assert grew < ALLOWED_GROWTH_MIB


@pytest.mark.parametrize("name", ["hpack_bomb", "half_messages"])
async def test_a_connection_of_headers_without_a_key_stops_nobody(server: Hostile, client: Client, name: str) -> None:
    """For half a second; test_floods.py of tests/faults measures long ones."""
    before, flood = (
        peak_mib(server),
        asyncio.create_task(asyncio.to_thread(http2_floods.flood, server.address, name, 0.5)),
    )
    times = []
    while not flood.done():
        began = time.monotonic()
        await client.stub.ListRuns(pb.ListRunsRequest())
        times.append(time.monotonic() - began)
        await asyncio.sleep(0.005)
    assert (await flood)["frames"] > 1000
    assert peak_mib(server) - before < 200
    assert max(times) < 4.0  # it was 13 s, and 3,600 MiB


def stated(error: pb.Error, server: Hostile) -> None:
    """That an error says what it may and no more."""
    text = str(error)
    assert error.code and error.message
    assert str(server.folder) not in text and "/site-packages" not in text and "Traceback" not in text, text
    assert not any(str(path) in text for path in server.models.values()) and str(Path.cwd()) not in text, text
    assert error.code != pb.ERROR_CODE_INTERNAL, text


async def test_errors_of_models_tell_no_path_and_run_no_pickle(server: Hostile, client: Client) -> None:
    for name in ("empty", "pickled", "torn"):
        with pytest.raises(grpc.RpcError) as caught:
            await client.stub.CreateRun(pb.CreateRunRequest(config=pb.RunConfig(base_model=name)))
        stated(error_of(caught.value), server)
        sampled = pb.SampleRequest(model=name, prompt_ids=[pb.TokenIds(ids=[4])], call=pb.SampleCall(max_tokens=1))
        stated(error_of_sample(await outcome(client.stub, "Sample", sampled)), server)
    assert not (server.folder / "sprung").exists()
    assert str(server.models["empty"]) in server.log  # whoever runs the server is told where


async def test_only_models_that_the_server_was_given_may_be_named(client: Client) -> None:
    listed = (await client.stub.ListModels(pb.ListModelsRequest())).models
    assert {"tiny"} <= {model.name for model in listed} and not {model.name for model in listed} & set(ALLOWED)
    for name, expected in (("later", "yes"), ("/etc", "unknown_model"), ("org/other-model", "unknown_model")):
        request = pb.CreateRunRequest(config=pb.RunConfig(base_model=name))
        assert code_of(await outcome(client.stub, "CreateRun", request)) == expected


def error_of_sample(answer: Any) -> pb.Error:
    return answer if isinstance(answer, pb.Error) else answer.header.error


ROWS = {"input_ids": codec.Column.from_rows([np.array(row, np.int32) for row in ([4, 5, 6, 7], [8, 9, 10])])}


def rows(**changed: Any) -> dict[str, codec.Column]:
    return ROWS | changed


def bad_operations() -> list[tuple[str, dict[str, Any], dict[str, codec.Column]]]:
    """The code that must come of it, the operation, its columns."""
    loss = {"forward_backward": pb.LossCall(loss_fn="causal_lm")}
    ids, (lengths,) = ROWS["input_ids"].values, ROWS["input_ids"].levels
    bad, argument = "invalid_batch", "invalid_argument"

    def mask(values: Any) -> dict[str, codec.Column]:
        return rows(loss_mask=codec.Column(values, (lengths,)))

    found = [
        (bad, loss, {"input_ids": codec.Column(ids + 10**6, (lengths,))}),
        (bad, loss, {"input_ids": codec.Column(-ids, (lengths,))}),
        (bad, loss, {"input_ids": codec.Column(ids.astype(np.float32), (lengths,))}),
        (bad, loss, {"input_ids": codec.Column(ids, ())}),
        (bad, loss, {"input_ids": codec.Column.from_rows([np.full(300, 4, np.int32)])}),
        (bad, loss, mask(np.full(len(ids), 2, np.int32))),
        (bad, loss, mask(np.full(len(ids), np.nan, np.float32))),
        (bad, loss, rows(no_such_field=ROWS["input_ids"])),
        (bad, loss, {}),
        (argument, {"forward_backward": pb.LossCall(
            loss_fn="causal_lm", loss_kwargs_json=json.dumps({SECRETS[4]: 1}))}, ROWS),
        ("unknown_loss", {"forward_backward": pb.LossCall(loss_fn="../../etc/passwd")}, ROWS),
        ("unknown_model", {"forward": pb.LossCall(model="/etc/passwd")}, ROWS),
        ("unknown_model", {"forward": pb.LossCall(model="org/other-model")}, ROWS),
        ("unknown_checkpoint", {"load_checkpoint": pb.LoadCheckpoint(checkpoint="../../etc")}, {}),
        ("unknown_checkpoint", {"load_checkpoint": pb.LoadCheckpoint(checkpoint="..")}, {}),
        ("unknown_checkpoint", {"load_checkpoint": pb.LoadCheckpoint(checkpoint="run-a/../../b")}, {}),
        (argument, {"save_checkpoint": pb.SaveCheckpoint(name="../x", note=SECRETS[3])}, {}),
        (argument, {"export": pb.ExportModel(name="a/b")}, {}),
        (argument, {"optim_step": pb.OptimStep(learning_rate=float("nan"))}, {}),
        (argument, {"update_reference": pb.UpdateReference(ema=float("inf"))}, {}),
        (argument, {"sample": pb.SampleCall(prompts=[SECRETS[0]], max_tokens=1, temperature=float("nan"))}, {}),
    ]  # fmt: skip
    return found


async def test_bad_operations_fail_with_a_code_and_the_run_goes_on(server: Hostile, client: Client) -> None:
    await client.begin(tags={"about": SECRETS[1]})
    seq = 0
    for code, operation, columns in bad_operations():
        seq += 1
        specs, buffers = codec.encode(columns)
        payload = b"".join(buffers)
        await client.submit(seq, payload, tensors=specs, failure_seen=seq - 1, **operation)
        [(result, _)] = await client.results(1, seq)
        assert code_of(result.error) == code, (operation, columns, result.error)
        stated(result.error, server)
    specs, buffers = codec.encode(ROWS)
    await client.fb(seq + 1, "causal_lm", b"".join(buffers), tensors=specs, failure_seen=seq)
    assert await client.statuses(1, seq + 1) == ["ok"]
    assert {path.name for path in server.folder.iterdir()} == {"state", "log", "empty", "pickled", "torn"}
    assert not [path for path in (server.folder / "state").rglob("*") if path.name in ("x", "passwd", "b")]


async def test_stop_strings_cannot_hang_and_templates_are_not_evaluated(server: Hostile, client: Client) -> None:
    stops = ["a" * 999 + "b", "(a+)+$", ".*" * 400, SECRETS[2], *(f"{number:04}" * 250 for number in range(60))]
    call = pb.SampleCall(prompts=[SECRETS[0], "{{ 7 * 7 }}"], n=4, max_tokens=200, stop=stops, ignore_eos=True, seed=1)
    await client.begin()
    await client.submit(1, sample=call)
    [(result, payload)] = await client.results(1)
    assert result.status == pb.STATUS_SUCCEEDED and payload and set(result.sample.stop_reasons) == {"length"}
    encoded = await client.stub.Encode(pb.EncodeRequest(model="tiny", texts=["{{ 7 * 7 }}", "49"]))
    decoded = await client.stub.Decode(pb.DecodeRequest(model="tiny", sequences=encoded.sequences))
    assert list(decoded.texts) == ["{{ 7 * 7 }}", "49"]
    for model in ("/etc", "../tiny", "org/other-model", ""):
        error = await outcome(client.stub, "Encode", pb.EncodeRequest(model=model, texts=["x"]))
        assert code_of(error) == "unknown_model"
        stated(error, server)


async def test_no_key_and_no_text_of_a_user_is_in_the_log(server: Hostile, client: Client) -> None:
    """Best as the last test of the module: everything before it went through this log."""
    stub = client.stub._stub
    wrong = "gw_" + "w" * 43
    assert code_of(await outcome(Keyed(stub, wrong), "ListRuns", pb.ListRunsRequest())) == "unauthenticated"
    long = pb.EncodeRequest(model="tiny", texts=[SECRETS[0] * 10, "\x00\udfff".encode("utf-8", "ignore").decode()])
    await outcome(client.stub, "Encode", long)
    broken = pb.CreateRunRequest(config=pb.RunConfig(base_model="torn", name=SECRETS[1]))
    assert code_of(await outcome(client.stub, "CreateRun", broken)) == "unsupported"
    await outcome(client.stub, "Decode", pb.DecodeRequest(model="tiny", sequences=[pb.TokenIds(ids=[2**32 - 1])]))
    assert not [path for path in (server.folder / "state").rglob("*") if path.stat().st_mode & 0o077]
    log = server.log
    assert "gradwire" in log, "the log is there"
    assert [secret for secret in (*SECRETS, server.secret, server.secret[12:], wrong) if secret in log] == []
    assert "could not be loaded" in log
