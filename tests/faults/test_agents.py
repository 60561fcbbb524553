"""An engine on another machine whose process, agent or network fails while several runs train there: nothing lost,
nothing twice, nobody blamed for what was no run's doing, and in the end the bits of a run left alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import gradwire
import pytest
from support.agent import Agent, Wire
from support.stage import Stage, kill, wait_for

from tests.faults.conftest import COUNT, SETTINGS, Calm
from tests.faults.test_kills import compare

pytestmark = pytest.mark.long

RUNS = 3
LEASE_S = 4
FAULTS = ("kill engine", "kill agent", "stop agent", "cut network", "reset network", "stop engine")


@pytest.fixture
def far(tiny_model_path: Path, tmp_path: Path) -> Iterator[tuple[Stage, Wire]]:
    stage = Stage(tiny_model_path, tmp_path, "--engine-lease", str(LEASE_S)).start()
    wire = Wire(stage.server.address)
    yield stage, wire
    wire.close()
    stage.close()


@pytest.fixture
def agents() -> Iterator[dict[str, Agent]]:
    """The agents that go on, by their names; those that are left are ended."""
    alive: dict[str, Agent] = {}
    yield alive
    for agent in alive.values():
        agent.end()


def restarts_of(service: gradwire.sync.ServiceClient) -> int:
    """How often the engine elsewhere was started again; -1 while it is not ready."""
    return next((each.restarts for each in service.server_info().engines if each.machine == "other" and each.ready), -1)


def strike(fault: str, agent: Agent, wire: Wire) -> Agent:
    """Let something fail, and mend it after the end of the lease at the latest; the agent that goes on."""
    engine = agent.engine_pid
    print(f"{fault} (engine {engine})")
    if fault == "kill engine" and engine is not None:
        kill(engine)
    elif fault == "stop engine" and engine is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGSTOP)
        wire.mend()  # its agent ends it then, so that it need not be continued
    elif fault == "kill agent":
        agent.end(signal.SIGKILL)
        return Agent(wire.address).start()
    elif fault == "stop agent":
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 1)
        agent.process.send_signal(signal.SIGCONT)
    elif fault == "cut network":
        wire.cut()
        time.sleep(LEASE_S + 1)
        wire.mend()
    elif fault == "reset network":
        wire.mend()
    return agent


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_faults_of_an_engine_elsewhere_cost_nothing(
    far: tuple[Stage, Wire],
    agents: dict[str, Agent],
    seed: int,
    rng: random.Random,
    left_alone: Callable[[int, int], Calm],
) -> None:
    stage, wire = far
    faults = [*FAULTS, *rng.choices(FAULTS, k=4)]
    rng.shuffle(faults)
    calm = left_alone(seed, 40 * len(faults))
    agents["other"] = Agent(wire.address).start()
    outs = [stage.folder / f"results-{number}.jsonl" for number in range(RUNS)]
    seen: Counter[str] = Counter()
    with gradwire.sync.connect(stage.server.address) as service:
        wait_for("the agent", lambda: restarts_of(service) >= 0)
        run_ids, clients = [stage.create(**SETTINGS) for _ in outs], []
        for run_id, stage.out in zip(run_ids, outs, strict=True):
            service.move_run(run_id, engine=1)
            stage.run_client(run_id, calm.seed, calm.count)
            clients.append(stage.client)
        for fault in faults:
            for run_id in run_ids:  # else an operation may be there when the engine is killed twice, and is blamed
                further = min(stage.applied(run_id) + 12, calm.count)
                wait_for("the runs to get on", lambda: stage.got_to(run_id, further))  # noqa: B023
            restarts = restarts_of(service)
            agents["other"] = strike(fault, agents["other"], wire)
            seen[fault] += 1
            wait_for("another engine elsewhere", lambda: restarts_of(service) > restarts)  # noqa: B023
            for run_id in run_ids:
                service.move_run(run_id, engine=1)
        for run_id, stage.out, stage.client in zip(run_ids, outs, clients, strict=True):
            wait_for("the loop's end", stage.finished)
            compare(stage, run_id, calm)
        restarts = restarts_of(service)
    assert restarts >= len(faults)
    print(f"{dict(seen)}; {restarts} restarts of the engine elsewhere")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engines_are_replaced_one_after_another_while_runs_train(
    tiny_model_path: Path,
    tmp_path: Path,
    agents: dict[str, Agent],
    seed: int,
    left_alone: Callable[[int, int], Calm],
) -> None:
    calm = left_alone(seed, COUNT)
    stage = Stage(tiny_model_path, tmp_path, "--engines", "0").start()
    agents |= {name: Agent(stage.server.address, name=name).start() for name in ("one", "two")}
    outs = [stage.folder / f"results-{number}.jsonl" for number in range(RUNS)]
    with gradwire.sync.connect(stage.server.address) as service:

        def engines() -> dict[str, gradwire.EngineInfo]:
            return {engine.machine: engine for engine in service.server_info().engines if engine.ready}

        wait_for("both engines", lambda: len(engines()) == 2)
        run_ids, clients = [stage.create(**SETTINGS) for _ in outs], []
        for run_id, stage.out in zip(run_ids, outs, strict=True):
            stage.run_client(run_id, calm.seed, calm.count)
            clients.append(stage.client)
        for turn, (name, agent) in enumerate(list(agents.items()), start=1):
            for run_id in run_ids:
                wait_for("the runs to get on", lambda: stage.got_to(run_id, turn * COUNT // 4))  # noqa: B023
            number = engines()[name].number
            service.drain_engine(number)
            wait_for("an engine without runs", lambda: not engines()[name].placed_runs)  # noqa: B023
            agent.end()
            agents[name] = Agent(stage.server.address, name=name).start()
            wait_for("its successor", lambda: name in engines() and engines()[name].restarts)  # noqa: B023
            service.drain_engine(number, undo=True)
        assert not any(engine.drains for engine in engines().values())
        for run_id, stage.out, stage.client in zip(run_ids, outs, clients, strict=True):
            wait_for("the loop's end", stage.finished)
            compare(stage, run_id, calm)
    stage.close()
