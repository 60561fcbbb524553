"""An engine that an agent lends, through a network that is cut: the bits are those of the server's own engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from support.agent import Agent, Wire
from support.blocking import DETECTOR
from support.collector import Collector
from support.server import Server
from support.stage import wait_for

pytestmark = pytest.mark.long

LORA = {"rank": 4, "dropout": 0.2}
LEASE_S = 6


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("engine_elsewhere")
    flags = ("--engines", "1", "--threads", "1", "--checkpoint-every-steps", "2", "--engine-lease", str(LEASE_S))
    running = Server(tiny_model_path, state, *flags).start()
    yield running
    assert running.end() == 0


@pytest.fixture(scope="module")
def wire(server: Server) -> Iterator[Wire]:
    wire = Wire(server.address)
    yield wire
    with DETECTOR.excused():
        wire.close()


@pytest.fixture(scope="module")
def agent(wire: Wire) -> Iterator[Agent]:
    agent = Agent(wire.address).start()
    yield agent
    agent.end(signal.SIGKILL)


@contextlib.asynccontextmanager
async def attached(server: Server, agent: Agent) -> AsyncIterator[gradwire.ServiceClient]:
    """A client of the server, once the agent's engine is ready."""
    async with gradwire.connect(server.address) as client:
        while not await is_ready(client):
            assert agent.process.poll() is None, agent.said
            await asyncio.sleep(0.1)
        yield client


def ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not taken note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def is_ready(client: gradwire.ServiceClient) -> bool:
    return any(engine.ready and engine.machine == "other" for engine in (await client.server_info()).engines)


def rows(number: int) -> list[dict[str, Any]]:
    return [{"input_ids": [(number * 7 + 5 * place) % 90 + 3 for place in range(12)]} for _ in range(2)]


async def train(run: gradwire.TrainingClient, first: int = 0, count: int = 4) -> list[float]:
    figures: list[float] = []
    for each in range(first, first + count):
        parts = [run.forward_backward(rows(each + part), "causal_lm") for part in range(2)]
        step = run.optim_step(learning_rate=1e-2)
        figures += [*[(await part).loss for part in parts], (await step).grad_norm]
    return figures


async def weights(run: gradwire.TrainingClient) -> list[list[float]]:
    """What the run computes now, to the last bit."""
    scored = await run.forward(rows(3), outputs=["logprobs"])
    return [list(map(float, row)) for row in scored.outputs["logprobs"]]


async def test_a_run_has_the_same_bits_on_an_engine_elsewhere(server: Server, agent: Agent) -> None:
    async with attached(server, agent) as client:
        still, moving = [await client.create_run("tiny", lora=LORA, seed=1) for _ in range(2)]
        assert await client.move_run(still.run_id, engine=0) == 0
        assert await client.move_run(moving.run_id, engine=1) == 1
        assert await train(moving) == await train(still)
        saved = [await run.save_checkpoint("mine") for run in (moving, still)]
        assert saved[0].step == saved[1].step
        assert await weights(moving) == await weights(still)
        assert await client.move_run(moving.run_id, engine=0) == 0, "its checkpoint is where all engines find it"
        assert await train(moving, 4) == await train(still, 4)
        lost = agent.engine_pid
        assert lost is not None
        os.kill(lost, signal.SIGKILL)
        await asyncio.to_thread(wait_for, "another process of the agent", lambda: agent.engine_pid not in (None, lost))
        assert await train(moving, 8) == await train(still, 8)
        for run in (still, moving):
            await client.delete_run(run.run_id)


async def test_a_run_goes_on_when_the_network_is_cut(server: Server, agent: Agent, wire: Wire) -> None:
    """The engine ends itself although its agent is stopped; what it was doing then is done once."""
    async with attached(server, agent) as client:
        still, moving = [await client.create_run("tiny", lora=LORA, seed=1) for _ in range(2)]
        await client.move_run(moving.run_id, engine=1)
        await client.move_run(still.run_id, engine=0)
        figures, lost = await train(moving), agent.engine_pid
        training = asyncio.create_task(train(moving, 4))
        await asyncio.sleep(0)
        wire.cut()
        agent.process.send_signal(signal.SIGSTOP)
        assert figures + await training == await train(still, 0, 8)
        assert await weights(moving) == await weights(still)
        assert (await moving.info()).engine == 0
        assert lost is not None
        await asyncio.to_thread(wait_for, "the end of the engine whose agent is stopped", lambda: ended(lost))
        left = list((server.state_dir / "engines").iterdir())
        assert not left, "it can write nothing that others find"


@pytest.mark.slow
async def test_the_spans_of_an_engine_elsewhere_are_those_of_the_servers_own(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation is one trace, whichever engine executes it, and says which it was."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    collector = Collector()
    server = Server(tiny_model_path, tmp_path, "--engines", "1", "--traces", f"http://{collector.address}").start()
    agent = Agent(server.address).start()

    def trees() -> dict[int, set[tuple[str, str, str]]]:
        """Service, name and parent's name of the spans of each whole trace of an ``optim_step``, by engine."""
        traces: dict[bytes, list[tuple[str, Any]]] = {}
        for service, span in list(collector.spans):
            traces.setdefault(span.trace_id, []).append((service, span))
        found = {}
        for spans in traces.values():
            names = {span.span_id: span.name for _, span in spans}
            if {"gradwire.optim_step", "gradwire.engine", "gradwire.engine.optim_step"} <= set(names.values()):
                (at_engine,) = [span for _, span in spans if span.name == "gradwire.engine"]
                (number,) = [pair.value.int_value for pair in at_engine.attributes if pair.key == "gradwire.engine"]
                found[number] = {
                    (service, span.name, names.get(span.parent_span_id, "")) for service, span in spans
                } - {("gradwire-front", "gradwire.queue", "gradwire.optim_step")}  # it may have waited, or not
        return found

    try:
        async with attached(server, agent) as client:
            for number in range(2):
                run = await client.create_run("tiny", lora=LORA, seed=1)
                assert await client.move_run(run.run_id, engine=number) == number
                await train(run, count=1)
            await asyncio.to_thread(wait_for, "the spans of both engines", lambda: set(trees()) == {0, 1})
    finally:
        agent.end()
        server.end()
        collector.close()
    assert trees()[0] == trees()[1]
    assert ("gradwire-engine", "gradwire.engine.optim_step", "gradwire.engine") in trees()[1]
