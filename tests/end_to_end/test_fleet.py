"""A server without engines of its own, and two engines elsewhere that share no folder with it: only an object store."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from support.agent import Agent
from support.batches import VOCAB, causal_lm
from support.object_store import BUCKET, Objects, s3_server
from support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {"seed": 7, "lora": {"rank": 4, "dropout": 0.1}}
PROMPTS = [[number + 3, 5, 8 + number] for number in range(10)]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


async def until_ready(client: gradwire.ServiceClient, count: int, *agents: Agent) -> None:
    while sum(engine.ready for engine in (await client.server_info()).engines) < count:
        for agent in agents:
            assert agent.process.poll() is None, agent.said
        await asyncio.sleep(0.1)


async def train(run: gradwire.TrainingClient, first: int = 0) -> list[float]:
    figures = []
    for number in range(first, first + 4):
        loss, step = (
            run.forward_backward(causal_lm(np.random.default_rng(number), 4, VOCAB), "causal_lm"),
            run.optim_step(learning_rate=1e-2),
        )
        figures += [(await loss).loss, (await step).grad_norm]
    return figures


async def logprobs(run: gradwire.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in await run.compute_logprobs([[5, 9, 11, 30, 7], list(range(3, 40))])]


async def tokens(run: gradwire.TrainingClient) -> list[list[int]]:
    result = await run.sample(PROMPTS, max_tokens=12, n=7, seed=3)
    assert set(result.engines) == {0, 1}
    return [sample.token_ids.tolist() for of_prompt in result.samples for sample in of_prompt]


@pytest.mark.parametrize("kind", ["s3", "file"])
async def test_engines_elsewhere_need_a_store_alone(
    kind: str, tiny_model_path: Path, tmp_path: Path, s3: Objects
) -> None:
    """The client waits until the first of them has come."""
    store = f"s3://{BUCKET}/fleet" if kind == "s3" else (tmp_path / "shared").as_uri()
    flags = ("--engines", "0", "--store", store, "--checkpoint-every-steps", "2", "--engine-lease", "4")
    server = Server(Path("/not/here"), tmp_path / "state", *flags).start()
    agents: list[Agent] = []
    try:
        connecting = asyncio.ensure_future(gradwire.connect(server.address))
        await asyncio.sleep(0)
        for name in ("one", "two"):
            own = ("--state-dir", str(tmp_path / name), "--model", f"tiny={tiny_model_path}", "--threads", "1")
            agents.append(Agent(server.address, *own, name=name).start())
        async with await connecting as client:
            await until_ready(client, 2, *agents)
            still, moving = [await client.create_run("tiny", **SETTINGS) for _ in range(2)]
            await client.move_run(still.run_id, engine=0)
            await client.move_run(moving.run_id, engine=1)
            assert await train(moving) == await train(still)
            assert await tokens(moving) == await tokens(still), "spread over both, through the store"
            if kind == "s3":
                assert any("/passing/" in key for key in s3.objects())
            await moving.save_checkpoint("mine")
            await client.move_run(moving.run_id, engine=0)
            assert await train(moving, 4) == await train(still, 4)
            await client.move_run(moving.run_id, engine=1)
            machines = [engine.machine for engine in (await client.server_info()).engines]
            training = asyncio.create_task(train(moving, 8))
            await asyncio.sleep(0)
            agents[["one", "two"].index(machines[1])].end(signal.SIGKILL)
            assert await training == await train(still, 8)
            assert await logprobs(moving) == await logprobs(still)
            assert not list((tmp_path / "state").glob("engines/*")), "nothing of it was in the state folder"
    finally:
        for agent in agents:
            agent.end(signal.SIGKILL)
        assert server.end() == 0
