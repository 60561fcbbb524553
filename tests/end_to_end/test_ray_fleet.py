"""A fleet in a Ray cluster of several nodes on loopback: `make test-fleet` runs this in an environment with Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import yaml
from support.batches import VOCAB, causal_lm
from support.blocking import DETECTOR
from support.server import Server

ray = pytest.importorskip("ray", reason="needs Ray: make test-fleet installs it beside the rest")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.filterwarnings("ignore")]

LOOPBACK = "127.0.0.1"
START_S = 300
"""What a node may take to start on a busy machine; Ray gives up after 30 s, which no setting changes."""
PLAIN = {"node_ip_address": LOOPBACK, "object_store_memory": 80 << 20}


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without room for engines, and a node with room for one; Ray's look-ups of addresses leave loopback."""
    from ray._private import services
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", str(START_S))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(services, "resolve_ip_for_localhost", lambda address, *rest, **more: address)
    monkeypatch.setattr(services, "get_node_ip_address", lambda *rest, **more: LOOPBACK)
    monkeypatch.setattr(services, "get_node", patient(services.get_node))
    wait = Cluster._wait_for_node
    monkeypatch.setattr(Cluster, "_wait_for_node", lambda cluster, node: wait(cluster, node, timeout=START_S))
    with DETECTOR.excused():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **PLAIN})
        cluster.add_node(num_cpus=1, **PLAIN)
        ray.init(address=cluster.address, _node_ip_address=LOOPBACK, namespace="gradwire", log_to_driver=False)
    yield cluster
    with DETECTOR.excused():
        ray.shutdown()
        cluster.shutdown()


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's look-up of a node, again while it is not known."""

    def get(*given: Any) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return get_node(*given)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    return get


@pytest.fixture
def server(tiny_model_path: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(tiny_model_path, tmp_path / "state", "--engines", "0", "--engine-lease", "5", "--threads", "1")
    yield running.start()
    assert running.end() == 0


async def until(what: str, holds: Callable[[list[Any]], bool], client: gradwire.ServiceClient) -> list[Any]:
    for _ in range(1200):
        engines = list((await client.server_info()).engines)
        if holds(engines):
            return engines
        await asyncio.sleep(0.25)
    raise AssertionError(f"waited in vain for {what}: {engines}")


def ready(*machines: str) -> Callable[[list[Any]], bool]:
    return lambda engines: {engine.machine for engine in engines if engine.ready} == set(machines)


async def train(run: gradwire.TrainingClient, first: int, count: int = 3) -> list[float]:
    figures = []
    for number in range(first, first + count):
        loss = run.forward_backward(causal_lm(np.random.default_rng(number), 4, VOCAB), "causal_lm")
        step = run.optim_step(learning_rate=1e-2)
        figures += [(await loss).loss, (await step).grad_norm]
    return figures


async def rows() -> list[dict[str, Any]]:
    """The fleet's status; not on the loop, as Ray may take seconds."""
    from gradwire.fleet.cluster import fleet

    return await asyncio.to_thread(lambda: ray.get(fleet().status.remote()))


async def test_a_fleet_follows_the_cluster(cluster: Any, server: Server, tmp_path: Path) -> None:
    """A plan is corrected, nodes come and go, one is drained, an agent killed: the figures stay those of a calm run."""
    from gradwire.fleet import cli
    from gradwire.fleet.cluster import fleet

    plan, group = tmp_path / "fleet.yaml", {"name": "far", "options": {"thread": 1}}

    async def up() -> None:
        plan.write_text(yaml.safe_dump({"front": f"http://{server.address}", "groups": [group]}))
        await asyncio.to_thread(cli.up, plan, "auto", "")

    await up()
    for _ in range(1200):
        states = [row["state"] for row in await rows()]
        if any(state.startswith("refused") for state in states):
            break
        await asyncio.sleep(0.25)
    assert states == ["refused: No such option: --thread (Possible options: --shard, --threads)"]
    del group["options"]
    await up()
    async with gradwire.connect(server.address) as client:
        await until("the first engine", ready("far-0"), client)
        calm, run = [await client.create_run("tiny", lora={"rank": 4, "dropout": 0.1}, seed=3) for _ in range(2)]
        expected = await train(calm, 0, 15)
        figures = await train(run, 0)

        with DETECTOR.excused():
            second = cluster.add_node(num_cpus=1, **PLAIN)  # in the main thread: it handles signals
        await until("an engine on the new node", ready("far-0", "far-1"), client)
        places = {row["engine"]: row["node"] for row in await rows()}
        assert len(set(places.values())) == 2
        assert await client.move_run(run.run_id, engine=1) == 1
        figures += await train(run, 3)

        await asyncio.to_thread(cli.drain, places["far-1"], "auto", False, "", None)
        await until("the drained engine's end", ready("far-0"), client)
        assert (await run.info()).engine == 0
        assert {(row["state"], row["node"]) for row in await rows()} == {
            ("running", places["far-0"]), ("drained", places["far-1"])
        }  # fmt: skip
        figures += await train(run, 6)
        await asyncio.to_thread(cli.drain, places["far-1"], "auto", True, "", None)
        await until("the engine of the node that was taken back", ready("far-0", "far-1"), client)

        killed = ray.get(ray.get_actor("far-1", "gradwire").pid.remote())
        await client.move_run(run.run_id, engine=1)
        os.kill(killed, signal.SIGKILL)
        figures += await train(run, 9)
        await until("the agent that Ray started again", ready("far-0", "far-1"), client)
        assert ray.get(ray.get_actor("far-1", "gradwire").pid.remote()) != killed

        await client.move_run(run.run_id, engine=1)
        with DETECTOR.excused():
            cluster.remove_node(second)
        figures += await train(run, 12)
        assert figures == expected
        await asyncio.to_thread(cli.down, "auto")
        await until("the end of all", ready(), client)
        assert fleet() is None
