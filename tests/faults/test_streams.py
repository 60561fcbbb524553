"""A stream over HTTP whose engine, then whose server is killed, with the state folder on a file system of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gradwire
import httpx
import pytest
from support.server import free_port
from support.tinker import HttpServer

MEMORY = Path("/dev/shm")
pytestmark = [
    pytest.mark.slow,  # four engines
    pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="no /dev/shm: the other file system of this test"),
]
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 240, "stream": True, "ignore_eos": True, "n": 32}
BATCH = {"input_ids": [[5, 9, 23, 7, 11], [3, 14, 15, 9]]}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system in memory, from which nothing can be linked or renamed to that of the model."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY, prefix="gradwire-"))
    assert folder.stat().st_dev != tmp_path.stat().st_dev
    yield folder / "state"
    shutil.rmtree(folder)


async def losses(run: gradwire.TrainingClient, count: int) -> list[float]:
    return [(await run.train_step(BATCH, "causal_lm", learning_rate=1e-2)).loss for _ in range(count)]


async def test_streams_end_in_a_sentence_and_runs_go_on(tiny_model_path: Path, state: Path) -> None:
    server = HttpServer(tiny_model_path, state, free_port(), "--threads", "1", "--checkpoint-every-steps", "2")
    await asyncio.to_thread(server.start)
    async with gradwire.connect(server.address) as service, httpx.AsyncClient(timeout=120) as http:
        expected = await losses(await service.create_run("tiny", lora=2, seed=1), 9)
        run = await service.create_run("tiny", lora=2, seed=1)
        found = await losses(run, 3)
        async with http.stream("POST", f"{server.url}/v1/completions", json=BODY) as stream:
            lines = aiter(stream.aiter_lines())
            assert (await anext(lines)).startswith("data: {")
            os.kill(server.engine_pid, signal.SIGKILL)
            rest = [line async for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable" and "try again" in error["message"], error
        found += await losses(run, 3)
        answer = await http.post(f"{server.url}/v1/completions", json={**BODY, "stream": False, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        async with http.stream("POST", f"{server.url}/v1/completions", json=BODY) as stream:
            lines = aiter(stream.aiter_lines())
            assert (await anext(lines)).startswith("data: {")
            await asyncio.to_thread(server.end, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                _ = [line async for line in lines]
    await asyncio.to_thread(server.start)
    async with gradwire.connect(server.address) as service:
        run = await service.get_training_client(run.run_id)
        found += await losses(run, 3)
        assert found == expected
        await run.save_checkpoint("end")
    assert await asyncio.to_thread(server.end) == 0
