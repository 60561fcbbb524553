"""Two real engines behind one front: the same bits wherever an operation runs, under moves, too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from support.server import Server

LORA = {"rank": 4, "dropout": 0.2}
ROUNDS = 6
MOVES = 20


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("two_engines")
    running = Server(
        tiny_model_path, state, "--engines", "2", "--threads", "1", "--checkpoint-every-steps", "2"
    ).start()
    yield running
    running.end()


def rows(number: int) -> list[dict[str, Any]]:
    return [{"input_ids": [(number * 7 + 5 * place) % 90 + 3 for place in range(12)]} for _ in range(2)]


async def train(run: gradwire.TrainingClient) -> list[float]:
    """Two calls a step, so that most moves come in mid-accumulation; the figures of each result."""
    figures: list[float] = []
    for each in range(ROUNDS):
        first = run.forward_backward(rows(each), "causal_lm")
        second = run.forward_backward(rows(each + 1), "causal_lm")
        step = run.optim_step(learning_rate=1e-2)
        figures += [(await first).loss, (await second).loss, (await step).grad_norm]
    return figures


async def weights(run: gradwire.TrainingClient) -> list[list[float]]:
    """What the run computes now, to the last bit."""
    scored = await run.forward(rows(3), outputs=["logprobs"])
    return [list(map(float, row)) for row in scored.outputs["logprobs"]]


async def test_every_bit_is_the_same_on_each_engine_and_under_moves(server: Server) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with gradwire.connect(server.address) as client:
        runs = [await client.create_run("tiny", lora=LORA, seed=1) for _ in range(4)]
        still, moving = runs[:2], runs[2:]
        assert {(await run.info()).engine for run in still} == {0, 1}
        expected = await train(still[0])
        assert await train(still[1]) == expected
        training = [asyncio.create_task(train(run)) for run in moving]
        for _ in range(MOVES):
            await asyncio.sleep(rng.random() * 0.05)
            await client.move_run(rng.choice(moving).run_id)
        assert [await task for task in training] == [expected] * 2
        scores = await weights(still[0])
        assert [await weights(run) for run in runs] == [scores] * 4
        for run in runs:
            await client.delete_run(run.run_id)
