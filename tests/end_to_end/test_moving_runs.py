"""Runs that move to disk and back between any two of their operations, and an engine killed meanwhile: the results
are those of a server that keeps every run where it is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.descriptions import RunsHeld
from support.server import Server

pytestmark = pytest.mark.long

SETTINGS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 2, "alpha": 3.0, "target_modules": ["q_proj", "down_proj"]},
    {"rank": 6, "dropout": 0.1},
    {"rank": 3, "alpha": 1.0, "target_modules": ["v_proj"]},
]
ROUNDS = 4


@pytest.fixture
def moving(tiny_model_path: Path, tmp_path: Path) -> Iterator[Server]:
    flags = ("--engines", "1", "--run-memory", "0", "--run-host-memory", "20 KiB")
    server = Server(tiny_model_path, tmp_path / "state", *flags).start()
    yield server
    server.end()


def rows(number: int) -> list[dict[str, Any]]:
    return [{"input_ids": [(number * 7 + 5 * place) % 90 + 3 for place in range(12)]} for _ in range(2)]


async def results(service: gradwire.ServiceClient, kill: Any = None) -> list[list[tuple[float, ...]]]:
    """Losses and gradient norms by run; all runs are busy at the same time."""
    runs = [await service.create_run("tiny", lora=lora, seed=seed) for seed, lora in enumerate(SETTINGS * 2)]
    found: list[list[tuple[float, ...]]] = [[] for _ in runs]
    for each in range(ROUNDS):
        futures = []
        for number, run in enumerate(runs):
            first = run.forward_backward(rows(number + each), "causal_lm")
            futures.append((number, first, run.optim_step(learning_rate=1e-2)))
        if kill is not None and each in (1, 3):
            await futures[2][1]
            kill()
        for number, first, step in futures:
            found[number].append(((await first).loss, (await step).grad_norm))
    return found


@pytest.mark.slow
async def test_runs_move_and_the_engine_dies_and_every_bit_is_the_same(
    moving: Server, service: gradwire.ServiceClient, tmp_path: Path
) -> None:
    expected = await results(service)
    async with gradwire.connect(moving.address) as client:
        found = await results(client, lambda: os.kill(moving.engine_pid, signal.SIGKILL))
        assert found == expected
        info = await client.server_info()
    held = info.engines[0].runs
    assert sum(each.runs for each in held.values()) <= len(SETTINGS) * 2
    assert info.engines[0].restarts == 2


async def after_heartbeat(
    service: gradwire.ServiceClient, reached: Callable[[Mapping[str, RunsHeld]], bool]
) -> gradwire.ServerInfo:
    """The server's information once a heartbeat of its engine says what is waited for."""
    while not reached((info := await service.server_info()).engines[0].runs):  # noqa: ASYNC110  nobody announces it
        await asyncio.sleep(0.2)
    return info


async def test_the_status_says_where_runs_are(moving: Server, tmp_path: Path) -> None:
    async with gradwire.connect(moving.address) as client:
        runs = [await client.create_run("tiny", lora={"rank": 4}, seed=seed) for seed in range(6)]
        for run in runs:
            await run.forward_backward(rows(1), "causal_lm")

        def all_placed(held: Mapping[str, RunsHeld]) -> bool:  # a heartbeat may come while one of them moves
            return sum(each.runs for each in held.values()) == 6 and held.get("disk", RunsHeld()).runs >= 4

        info = await after_heartbeat(client, all_placed)
        assert info.engines[0].runs["disk"].nbytes > 0
        assert list(info.engines[0].runs) == ["device", "disk", "host"]
        assert len(list((tmp_path / "state" / "spilled" / "0").iterdir())) >= 4
        for run in runs:
            await client.delete_run(run.run_id)
        await after_heartbeat(client, lambda held: not any(each.runs for each in held.values()))
    assert not list((tmp_path / "state" / "spilled" / "0").iterdir())
