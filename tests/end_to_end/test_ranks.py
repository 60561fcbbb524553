"""A server whose engine is a group of two ranks: a rank that is killed costs a run nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from support.batches import VOCAB, causal_lm
from support.server import Server


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
