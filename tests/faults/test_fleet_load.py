"""Sixteen runs on two engines while whatever they need fails at random moments: nothing lost, nothing twice, and in the
end the bits of a run left alone. Another tenant's small calls go on meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import gradwire
import numpy as np
import pytest
from gradwire_server.access.key_file import KeyFile, Role
from support import object_store, program, small_calls
from support.agent import Agent, Wire
from support.object_store import Objects
from support.stage import PATIENCE_S, Stage, kill

from tests.faults.conftest import SETTINGS, Calm
from tests.faults.test_agents import LEASE_S, strike
from tests.faults.test_tenants import ALLOWED, NOTICEABLE_S, Program

RUNS = 16
AHEAD = 4
"""Operations that a client submits before it has the results of those before."""
APART = 20
"""Operations between the slowest run and the fastest: in the end all have as many."""
ROUNDS = 40
"""Rounds of the other tenant's calls at least, with faults and without."""
ELSEWHERE = ("kill engine", "kill agent", "stop agent", "cut network", "reset network", "stop engine")
STORE = ("store is unavailable", "store is silent", "store loses answers")
HERE = ("kill own engine", "kill front", "reset clients")


class Load:
    """Training loops that go on until they are told how far.

    Attributes:
        seen: Number of operations whose results each of them has.
        results: Number of an operation -> its result, of each of them.
    """

    def __init__(self, address: str, key: str, seed: int) -> None:
        self._address, self._key, self._seed = address, key, seed
        self._goal: int | None = None
        self._submitted = 0
        self.seen = [0] * RUNS
        self.results: list[dict[int, Any]] = [{} for _ in range(RUNS)]

    async def train(self, place: int, run_id: str) -> None:
        async with gradwire.connect(self._address, api_key=self._key, reconnect_timeout=600) as service:
            run = await service.get_training_client(run_id)
            futures: dict[int, gradwire.Future[Any]] = {}
            submitted, number = 0, 1
            while self._goal is None or number <= self._goal:
                while self._goal is None and number > min(self.seen) + APART:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                while submitted < min(number + AHEAD, self._goal or number + AHEAD):
                    submitted += 1
                    self._submitted = max(self._submitted, submitted)
                    futures[submitted] = program.submit(run, self._seed, submitted)
                line = program.written(number, await futures.pop(number))
                self.results[place][number] = json.loads(line)["value"]
                self.seen[place] = number
                number += 1
                await asyncio.sleep(0.1)

    async def gets_on(self) -> None:
        """Wait until what is submitted now is done: an operation that two engines died of is rightly blamed."""
        wanted = [number + AHEAD + 1 for number in self.seen]
        async with asyncio.timeout(PATIENCE_S):
            while any(seen < least for seen, least in zip(self.seen, wanted, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def end(self) -> int:
        """Have all end after the same operation; its number."""
        self._goal = self._submitted
        return self._goal


class Fleet:
    """A front with an engine, an agent with another one, and an object store, all of which may fail."""

    def __init__(self, model: Path, folder: Path, store: Objects) -> None:
        self.store = store
        flags = ("--engine-lease", str(LEASE_S), "--store", f"{store.url}/fleet", "--store-patience", "600")
        self.stage = Stage(model, folder, *flags)
        keys = KeyFile(self.stage.state_dir)
        roles: dict[str, Role] = {"ada": "user", "bob": "user", "root": "admin", "far": "engine"}
        self.keys = {name: keys.create(name, role) for name, role in roles.items()}
        self.stage.start()
        self.agents, self.clients = (Wire(self.stage.server.address) for _ in range(2))
        with self._key_of_agents():
            self.agent = as_elsewhere(Agent(self.agents.address).start())

    def _key_of_agents(self) -> AbstractContextManager[Any]:
        return mock.patch.dict(os.environ, {"GRADWIRE_API_KEY": self.keys["far"]})

    def strike(self, fault: str) -> None:
        """Let something fail, and mend it."""
        if fault in ELSEWHERE:
            with self._key_of_agents():
                self.agent = as_elsewhere(strike(fault, self.agent, self.agents))
            return
        print(fault)
        if fault == "kill own engine":
            kill(self.stage.server.engine_pids[0])
        elif fault == "kill front":
            self.stage.server.process.kill()
            self.stage.restart_server()
        elif fault == "reset clients":
            self.clients.mend()

    async def store_fails(self, fault: str, rng: random.Random) -> None:
        """Let the store fail for seconds."""
        print(fault)
        how = {"unavailable": object_store.unavailable, "silent": object_store.silent}
        for method in ("PUT", "GET", "POST", "HEAD"):
            self.store.faults.plan(how.get(fault.split()[-1], object_store.lost_answer), method, "", times=-1)
        await asyncio.sleep(1 + 3 * rng.random())
        self.store.faults.mend()

    def state_of(self, run_id: str) -> dict[str, Any]:
        """As of :class:`Stage`, of the checkpoint "final" in the store."""

        def manifest(folder: str) -> Any:
            return json.loads(self.store.read(f"fleet/runs/{run_id}/{folder}manifest.json"))["content"]

        content = manifest(f"{manifest('')['folders']['checkpoints/final']['data']}/")
        files = {name: stored["blake2b"] for name, stored in content["files"].items()}
        return {"step": content["step"], "seq": content["seq"]} | files

    def close(self) -> None:
        self.store.faults.mend()
        self.agent.end(signal.SIGKILL)
        self.stage.close()
        for wire in (self.agents, self.clients):
            wire.close()


def as_elsewhere(agent: Agent) -> Agent:
    """Let an agent leave the processors to the rest, as on a machine of its own."""
    os.setpriority(os.PRIO_PROCESS, agent.process.pid, 19)
    return agent


@pytest.fixture
def fleet(tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with object_store.s3_server() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        fleet = Fleet(tiny_model_path, tmp_path, store)
        yield fleet
        fleet.close()


async def both(root: gradwire.ServiceClient) -> tuple[int, ...]:
    """Wait until both engines are ready; how often each was started again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            engines = (await root.server_info()).engines
            if len(engines) == 2 and all(engine.ready for engine in engines):
                return tuple(engine.restarts for engine in engines)
            await asyncio.sleep(0.1)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.holds_loop("it is the clients, and the store beside them")
async def test_sixteen_runs_lose_nothing_and_another_tenant_is_not_delayed(
    fleet: Fleet, seed: int, rng: random.Random, left_alone: Callable[[int, int], Calm]
) -> None:
    stage, seen = fleet.stage, Counter[str]()
    load = Load(fleet.clients.address, fleet.keys["ada"], seed)
    seconds: dict[bool, dict[str, list[float]]] = {failing: defaultdict(list) for failing in (False, True)}
    async with AsyncExitStack() as stack:
        root, ada = [
            await stack.enter_async_context(gradwire.connect(stage.server.address, api_key=fleet.keys[name]))
            for name in ("root", "ada")
        ]
        await both(root)
        bob = Program(small_calls.__file__, stage.server.address, "tiny", key=fleet.keys["bob"], cwd=Path.cwd())
        stack.callback(bob.close)

        async def measure(failing: bool) -> None:
            bob.say("5")
            for name, values in json.loads(await bob.hear()).items():
                seconds[failing][name] += values

        async def measure_on() -> None:
            while True:
                await measure(failing=True)

        await measure(failing=False)
        seconds[False].clear()
        (of_bob,) = [run.run_id for run in await root.list_runs()]
        await root.move_run(of_bob, engine=0)
        run_ids = [(await ada.create_run("tiny", **SETTINGS)).run_id for _ in range(RUNS)]
        async with asyncio.TaskGroup() as tasks:
            for place, run_id in enumerate(run_ids):
                tasks.create_task(load.train(place, run_id))

            async def spread() -> None:
                await both(root)
                for run_id in run_ids[::2]:
                    await root.move_run(run_id, engine=1)

            async def strike_with(fault: str) -> None:
                await load.gets_on()
                await asyncio.sleep(2 * rng.random())
                seen[fault] += 1
                if fault in STORE:
                    await fleet.store_fails(fault, rng)
                    return
                await asyncio.to_thread(fleet.strike, fault)
                await spread()

            await spread()
            while len(seconds[False]["info"]) < ROUNDS:
                await measure(failing=False)
            measuring = tasks.create_task(measure_on())
            for fault in rng.sample([*ELSEWHERE, *STORE], 9):
                await strike_with(fault)
            while len(seconds[True]["info"]) < ROUNDS:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            measuring.cancel()
            for fault in rng.sample([*HERE, *rng.choices((*ELSEWHERE, *STORE), k=3)], 6):
                await strike_with(fault)
            await load.gets_on()
            goal = load.end()
        print(f"{dict(seen)}; {goal} operations of {RUNS} runs")
        late = {}
        for name, values in seconds[True].items():
            before, beside = (float(np.percentile(each, 99)) for each in (seconds[False][name], values))
            print(f"{name:18} {before * 1e3:6.1f} {beside * 1e3:6.1f} ms: {beside / before:4.1f} times, {len(values)}")
            if beside > max(ALLOWED * before, NOTICEABLE_S):
                late[name] = beside
        calm = await asyncio.to_thread(left_alone, seed, goal)
        for place, run_id in enumerate(run_ids):
            assert load.results[place] == calm.results
            rows = stage.query("SELECT accepted_seq, applied_seq FROM runs WHERE run_id = ?", run_id)
            assert rows == [(goal, goal)]
            await (await ada.get_training_client(run_id)).save_checkpoint("final")
            assert fleet.state_of(run_id) == calm.state
    assert not late
