"""`gradwire serve` as a process of its own, with a real engine and a real (tiny) model, spoken to in raw gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb
from support.front import Client

pytestmark = pytest.mark.long

ROWS = {"input_ids": codec.Column.from_rows([np.array(row, np.int32) for row in ([4, 5, 6, 7], [8, 9, 10])])}


def command(model: Path, state_dir: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "gradwire_server.cli", "serve", "--address", "127.0.0.1:0", "--threads", "1"]
    return [*words, "--model", f"tiny={model}", "--state-dir", str(state_dir), *more]


@asynccontextmanager
async def serving(model: Path, state_dir: Path, end: signal.Signals = signal.SIGTERM) -> AsyncIterator[str]:
    def heeds_hangup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, also by the server

    words = command(model, state_dir)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=heeds_hangup) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            assert line.startswith("gradwire: listening on "), line
            yield line.split()[-1]
        finally:
            process.send_signal(end)
            assert await asyncio.to_thread(process.wait, 120) == (-end if end == signal.SIGKILL else 0)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(address) as channel:
        client = Client(channel)
        client.patience_s = 120.0  # an engine that is started again loads torch first
        yield client


async def train(client: Client, seq: int) -> float:
    """One gradient and one step; the loss before it."""
    specs, buffers = codec.encode(ROWS)
    await client.fb(seq, "causal_lm", b"".join(buffers), tensors=specs)
    step = pb.OptimStep(learning_rate=0.01, beta1=0.9, beta2=0.999, eps=1e-8)
    await client.submit(seq + 1, optim_step=step)
    [(loss, _), (stepped, _)] = await client.results(2, seq)
    assert (loss.status, stepped.status) == (pb.STATUS_SUCCEEDED, pb.STATUS_SUCCEEDED), (loss.error, stepped.error)
    assert loss.timings.engine_s > 0
    return loss.loss.loss


def engine_of(server_words: str) -> int:
    """The pid of the engine process whose state folder this is."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "gradwire_server.engine.process" in words and any(server_words in word for word in words):
                return int(entry.name)
    raise LookupError(server_words)


@pytest.mark.slow  # three starts; test_durability has the short form
async def test_a_run_outlives_its_engine_and_its_server(tiny_model_path: Path, tmp_path: Path) -> None:
    lora = pb.LoraSettings(rank=2, dropout=0.1)
    async with serving(tiny_model_path, tmp_path, signal.SIGKILL) as address:
        async with connected(address) as calm:
            await calm.begin(seed=5, lora=lora)
            expected = [await train(calm, seq) for seq in (1, 3, 5)]
            assert expected[2] < expected[0]
            losses = await calm.stub.ListLosses(pb.ListLossesRequest())
            assert "causal_lm" in {loss.name for loss in losses.losses}
            text = pb.EncodeRequest(model="tiny", texts=["2+2=4"])
            ids = (await calm.stub.Encode(text)).sequences
            assert list((await calm.stub.Decode(pb.DecodeRequest(model="tiny", sequences=ids))).texts) == ["2+2=4"]
        async with connected(address) as stormy:
            await stormy.begin(seed=5, lora=lora)
            found = [await train(stormy, 1)]
            os.kill(engine_of(str(tmp_path)), signal.SIGKILL)
            found.append(await train(stormy, 3))
            engine = (await stormy.stub.GetServerInfo(pb.GetServerInfoRequest())).engines[0]
            assert (engine.restarts, engine.heartbeat_age_s < 60) == (1, True)
    async with serving(tiny_model_path, tmp_path) as address, connected(address) as again:
        await again.open(stormy.run_id)
        found.append(await train(again, 5))
    assert found == expected


def test_what_the_front_sets_for_itself(tmp_path: Path) -> None:
    """A thread that computes for one key keeps the calls of another waiting for no longer than this each time, and
    connections take descriptors from files only where the system has no more."""
    code = (
        "import resource, sys; from gradwire_server.cli import app, serve\n"
        "files = resource.RLIMIT_NOFILE; _, most = resource.getrlimit(files)\n"
        "resource.setrlimit(files, (most - 1, most))\n"
        "async def told(*arguments): return print(sys.getswitchinterval(), resource.getrlimit(files)[0] == most) or 0\n"
        "serve._serve = told; app.app()"
    )
    words = ["serve", "--address", "127.0.0.1:0", "--model", f"tiny={tmp_path}", "--state-dir", str(tmp_path / "state")]
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["0.0005", "True"]), done.stderr


def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    missing = subprocess.run(command(tmp_path / "nothing", tmp_path), capture_output=True, text=True, timeout=120)
    assert missing.returncode == 75 and "gradwire:" in missing.stderr and "nothing" in missing.stderr
    address = subprocess.run(
        [*command(tmp_path, tmp_path), "--address", "nowhere"], capture_output=True, text=True, timeout=120
    )
    assert address.returncode == 2 and "HOST:PORT" in address.stderr


async def test_it_says_at_once_that_it_stops(tiny_model_path: Path, tmp_path: Path) -> None:
    words, written = [*command(tiny_model_path, tmp_path / "state"), "--grace", "60"], tmp_path / "stderr"
    with (
        written.open("w") as stderr,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,  # noqa: ASYNC220
    ):
        assert process.stdout is not None
        address = (await asyncio.to_thread(process.stdout.readline)).split()[-1]
        async with connected(address) as client:
            await client.begin(seed=5, lora=pb.LoraSettings(rank=2))
            await client.submit(1, sample=pb.SampleCall(prompts=["2+2="], n=64, max_tokens=60, ignore_eos=True))
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(wait_for, lambda: "stopping; waiting up to 60 s" in written.read_text())
            assert process.poll() is None
        assert await asyncio.to_thread(process.wait, 120) == 0


@pytest.mark.slow
async def test_it_says_which_runs_have_no_model_here(tiny_model_path: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_path, tmp_path / "state", signal.SIGHUP) as address, connected(address) as client:
        for _ in range(2):
            await client.begin(seed=5, lora=pb.LoraSettings(rank=2))
    words, written = command(tiny_model_path, tmp_path / "state"), tmp_path / "stderr"
    words[words.index("--model") + 1] = f"renamed={tiny_model_path}"
    with (
        written.open("w") as stderr,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,  # noqa: ASYNC220
    ):
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 120) == 0
    assert "2 of these runs wait for tiny, which this server does not have: --model tiny=PATH" in written.read_text()


def test_it_ends_with_its_parent(tiny_model_path: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    words = command(tiny_model_path, tmp_path / "state", "--die-with-parent", "--ready-file", str(ready))
    code = f"import subprocess, time; subprocess.Popen({words!r}, stdout=subprocess.DEVNULL); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(ready.exists)
    finally:
        parent.kill()
        parent.wait()
    server = int((tmp_path / "state" / "lock").read_text())
    wait_for(lambda: not Path(f"/proc/{server}").exists() or "Z" in Path(f"/proc/{server}/stat").read_text().split()[2])
    with pytest.raises(LookupError):
        engine_of(str(tmp_path / "state"))


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
