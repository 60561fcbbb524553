"""A server that is started again with other settings, or beside damaged files: acknowledged work waits, and is carried
out once the start is right again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire_http.child_processes import start_process
from support.scripted import until
from support.server import Server, free_port

pytestmark = pytest.mark.long

BATCH = {"input_ids": [[4, 5, 6, 7], [8, 9, 10, 11]]}
ROUNDS = 3


def train(run: gradwire.TrainingClient, rounds: int) -> list[gradwire.Future[Any]]:
    return [
        future
        for _ in range(rounds)
        for future in (run.forward_backward(BATCH, "causal_lm"), run.optim_step(learning_rate=1e-2))
    ]


def figures(results: list[Any]) -> list[float]:
    return [each.loss if hasattr(each, "loss") else each.grad_norm for each in results]


async def settled(run: gradwire.TrainingClient, *, parked: str | None = None, accepted_seq: int = 0) -> Any:
    """Waits until the server says so of the run."""
    async with asyncio.timeout(120):
        while True:
            info = await run.info()
            as_wanted = parked is None or (parked in info.parked and bool(parked) == bool(info.parked))
            if as_wanted and info.accepted_seq >= accepted_seq:
                return info
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running(server: Server, how: signal.Signals = signal.SIGTERM, **settings: Any) -> AsyncIterator[Any]:
    await asyncio.to_thread(server.start)
    try:
        async with gradwire.connect(server.address, **settings) as service:
            yield service
    finally:
        await asyncio.to_thread(server.end, how)


async def leave_queued(server: Server, state: Path, service: Any, before: int) -> tuple[str, list[float], list[Any]]:
    """A run that has its first results and two checkpoints, and as many operations again that are acknowledged and not
    executed: its id, the first figures, the futures."""
    run = await service.create_run("tiny", lora=2, seed=5)
    results = figures([await each for each in train(run, before)])
    await run.save_checkpoint("first")
    await run.save_checkpoint("second")
    await until(lambda: trimmed(state, run.run_id))  # only the two checkpoints are left to start from
    os.kill(server.engine_pid, signal.SIGSTOP)
    futures = train(run, ROUNDS)
    await settled(run, accepted_seq=2 * before + 2 + 2 * ROUNDS)
    os.kill(server.process.pid, signal.SIGKILL)  # the engine ends with it
    await asyncio.to_thread(server.process.wait)
    return run.run_id, results, futures


def trimmed(state: Path, run_id: str) -> bool:
    with contextlib.closing(sqlite3.connect(state / "gradwire.db")) as database:
        found = database.execute("SELECT trimmed_seq FROM runs WHERE run_id = ?", (run_id,)).fetchall()
    return any(seq for (seq,) in found)  # rows are written some time after the records


async def calm(service: Any, before: int) -> list[float]:
    run = await service.create_run("tiny", lora=2, seed=5)
    first = [await each for each in train(run, before)]
    return figures(first + [await each for each in train(run, ROUNDS)])


@pytest.mark.slow  # six starts
async def test_a_start_without_the_model_and_with_smaller_limits_destroys_nothing(
    tiny_model_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    state, address = tmp_path / "state", ("--address", f"127.0.0.1:{free_port()}")
    server = await asyncio.to_thread(Server(tiny_model_path, state, *address).start)
    caplog.set_level(logging.WARNING, "gradwire")
    async with gradwire.connect(server.address) as service:
        expected = await calm(service, 2)
        run_id, results, futures = await leave_queued(server, state, service, 2)
        assert results == expected[:4]
        async with running(Server(tiny_model_path, state, *address, name="other"), reconnect_timeout=1.0) as wrong:
            run = await wrong.get_training_client(run_id)
            info = await settled(run, parked="tiny")
            assert (info.accepted_seq, info.applied_seq) == (12, 6)
            with pytest.raises(gradwire.RunParkedError, match="tiny"):
                await run.forward_backward(BATCH, "causal_lm")
            assert (await run.info()).accepted_seq == 12
            words = (sys.executable, "-m", "gradwire.cli", "status", "--address", address[1])
            status = await start_process(*words, stdout=asyncio.subprocess.PIPE)
            shown = (await status.communicate())[0].decode()
            assert f"run {run_id} is parked" in shown and "1 parked" in shown
        assert f"run {run_id} is parked (operations waiting: 6)" in capfd.readouterr().err
        assert not any(each.done() for each in futures)
        async with running(Server(tiny_model_path, state, *address, "--limit", "max_rows=1")) as right:
            assert figures([await each for each in futures]) == expected[4:]
            run = await right.get_training_client(run_id)
            assert (await run.info()).parked == ""
            with pytest.raises(gradwire.LimitExceededError, match="max_rows"):
                await run.forward_backward(BATCH, "causal_lm")
    told = [record.message for record in caplog.records if record.name == "gradwire" and "is parked" in record.message]
    assert 1 <= len(told) <= 4  # each client says it once, and its transport that it tries again


@pytest.mark.slow
async def test_damaged_checkpoints_park_the_run_until_they_are_mended(tiny_model_path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    server = await asyncio.to_thread(Server(tiny_model_path, state).start)
    async with gradwire.connect(server.address) as service:
        run_id, _, _ = await leave_queued(server, state, service, 1)
    whole = {
        file: file.read_bytes()
        for name in ("first", "second")
        for file in (state / "runs" / run_id / "checkpoints" / name).rglob("*.safetensors")
    }
    assert whole
    for file, content in whole.items():
        file.write_bytes(content[:-4] + bytes(4 * [content[-1] ^ 1]))
    async with running(server) as service:
        run = await service.get_training_client(run_id)
        earlier = await run.earlier_operations()
        info = await settled(run, parked="checkpoint")
        assert (info.accepted_seq, info.applied_seq) == (10, 4)
        assert await run.discard_pending() == 6
        for seq in range(5, 11):
            with pytest.raises(gradwire.OperationCancelledError, match="discarded"):
                await earlier[seq]
        futures = train(run, 1)
        await settled(run, parked="checkpoint")
        assert not any(each.done() for each in futures)
        for file, content in whole.items():
            file.write_bytes(content)
        assert (await futures[1]).step == 2
        assert (await settled(run, parked="")).applied_seq == 12
