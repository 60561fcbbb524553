"""A server whose engine is a group of two ranks: a rank that is killed costs a run nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from support.batches import VOCAB, causal_lm
from support.server import Server

pytestmark = pytest.mark.long


def kill_the_other_rank(server: Server) -> None:
    pid = server.engine_pid
    (other,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(other), signal.SIGKILL)


async def trained(service: gradwire.ServiceClient, batches: list[dict[str, Any]], halfway: Callable[[], None]) -> Any:
    run = await service.create_run("tiny", seed=7, lora={"rank": 4, "dropout": 0.1})
    figures = []
    for number, batch in enumerate(batches):
        if number == len(batches) // 2:
            halfway()
        loss, step = run.forward_backward(batch, "causal_lm"), run.optim_step(learning_rate=1e-2)
        figures.append(((await loss).metrics["loss"], (await step).grad_norm))
    return figures, [row.tolist() for row in await run.compute_logprobs([[5, 9, 11, 30, 7], list(range(3, 40))])]


async def told_of(service: gradwire.ServiceClient) -> tuple[gradwire.RankInfo, ...]:
    """The ranks of the engine, which tells of them in its first heartbeats."""
    while len(ranks := (await service.server_info()).engines[0].ranks) < 2:  # noqa: ASYNC110  nobody announces it
        await asyncio.sleep(0.1)
    return ranks


@pytest.mark.slow
async def test_a_killed_rank_costs_a_run_nothing(
    tiny_model_path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    batches = [causal_lm(rng, 4, VOCAB) for _ in range(4)]
    server = Server(tiny_model_path, tmp_path, "--ranks", "2", "--device", "cpu").start()
    try:
        async with gradwire.connect(server.address) as service:
            calm = await trained(service, batches, lambda: None)
            before = server.engine_pid
            assert await trained(service, batches, lambda: kill_the_other_rank(server)) == calm
            assert server.engine_pid != before
            assert {run.lanes for run in await service.list_runs()} == {2}
            ranks = await told_of(service)
            assert all(rank.device == "cpu" and rank.memory_bytes > 10 << 20 for rank in ranks)
            assert all(0 <= rank.heartbeat_age_s < 60 for rank in ranks)
            with pytest.raises(gradwire.InvalidArgumentError, match="power of two"):
                await service.create_run("tiny", lanes=3)
        assert server.end() == 0
    finally:
        server.process.kill()


async def continued(server: Server, run_id: str, batch: dict[str, Any]) -> Any:
    """What a run says of one more step on a server that has replayed its journal."""
    async with gradwire.connect(server.address, connect_timeout=300) as service:
        run = service.get_training_client(run_id)
        loss = (await run.forward_backward(batch, "causal_lm")).metrics["loss"]
        norm = (await run.optim_step(learning_rate=1e-2)).grad_norm
        return loss, norm, [row.tolist() for row in await run.compute_logprobs([[5, 9, 11, 30, 7], list(range(3, 40))])]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_journal_of_two_ranks_is_replayed_on_one_and_on_four(
    tiny_model_path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    batches = [causal_lm(rng, 6, VOCAB) for _ in range(4)]
    server = Server(tiny_model_path, tmp_path / "2", "--ranks", "2", "--device", "cpu").start()
    try:
        async with gradwire.connect(server.address) as service:
            run = await service.create_run("tiny", seed=7, lora={"rank": 4, "dropout": 0.1}, lanes=4)
            for batch in batches[:-1]:
                await run.forward_backward(batch, "causal_lm")
                await run.optim_step(learning_rate=1e-2)
    finally:
        server.end(signal.SIGKILL)
    found = []
    for ranks in ("1", "4", "2"):  # the last one on the folder itself
        state = tmp_path / ranks
        if ranks != "2":
            shutil.copytree(tmp_path / "2", state)
        server = Server(tiny_model_path, state, "--ranks", ranks, "--device", "cpu").start()
        try:
            found.append(await continued(server, run.run_id, batches[-1]))
            assert server.end() == 0
        finally:
            server.process.kill()
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_run_goes_on_with_the_ranks_that_are_there(
    tiny_model_path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A rank that can no longer start: the engine is one process then, and the run has the bits that it would have."""
    batches = [causal_lm(rng, 4, VOCAB) for _ in range(4)]
    (tmp_path / "losses.py").write_text(
        "import os, pathlib, sys\n"
        "if pathlib.Path(__file__).with_name('broken').exists() and '--rank' in sys.argv:\n    os._exit(1)\n"
    )
    flags = ("--ranks", "2", "--min-ranks", "1", "--device", "cpu", "--losses", str(tmp_path / "losses.py"))
    server = Server(tiny_model_path, tmp_path / "state", *flags).start()

    def break_the_other_rank() -> None:
        (tmp_path / "broken").touch()
        kill_the_other_rank(server)

    try:
        async with gradwire.connect(server.address) as service:
            calm = await trained(service, batches, lambda: None)
            assert await trained(service, batches, break_the_other_rank) == calm
            assert not (await service.server_info()).engines[0].ranks
            assert {run.lanes for run in await service.list_runs()} == {2}
        assert server.end() == 0
        server.start()  # which tries all ranks again, twice
        async with gradwire.connect(server.address, connect_timeout=300) as service:
            assert len(await service.list_runs()) == 2
            assert not (await service.server_info()).engines[0].ranks
        assert server.end() == 0
    finally:
        server.process.kill()
