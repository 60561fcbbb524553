"""The Tinker SDK's side of a benchmark, in an environment of its own: trains on command.

``tinker_side.py MODEL``, started by ``benchmarks.tinker_door`` with TINKER_BASE_URL and TINKER_API_KEY set. A line of
JSON on stdin says what to do, and is answered by a line of JSON on stdout. ``{"clients": C, "steps": N}``: C clients at
once take N steps of ``forward_backward`` and ``optim_step``, each awaited before the next. A client has a session and a
model of its own, which it makes when it is first asked for. The answer has ``seconds``, ``cpu_seconds``, and for each
client its ``losses`` and its ``numbers``, the model's count of steps after each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
import tinker
from tinker import types

TOKENS = 32
RANK = 8


class Client:
    """A session with one model and one row."""

    def __init__(self, model: str, seed: int) -> None:
        self._service = tinker.ServiceClient()
        self._model, self._seed = model, seed
        ids = np.random.default_rng(seed).integers(3, 90, TOKENS + 1).tolist()
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * TOKENS}
        self._data = [types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)]
        self._training: Any = None

    async def begin(self) -> None:
        """Create the model."""
        self._training = await self._service.create_lora_training_client_async(
            base_model=self._model, rank=RANK, seed=self._seed
        )

    async def train(self, steps: int) -> tuple[list[float], list[float]]:
        """The loss of each step, and the model's count of steps after it."""
        losses, numbers = [], []
        for _ in range(steps):
            loss = await (await self._training.forward_backward_async(self._data, "cross_entropy"))
            step = await (await self._training.optim_step_async(types.AdamParams(learning_rate=1e-3)))
            losses.append(loss.metrics["loss:sum"])
            numbers.append(step.metrics["step:max"])
        return losses, numbers


async def main(model: str) -> None:
    """Answer each line."""
    clients: list[Client] = []
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        new = [Client(model, seed) for seed in range(len(clients), asked["clients"])]
        await asyncio.gather(*(client.begin() for client in new))
        clients += new
        wall, cpu = time.perf_counter(), time.process_time()
        trained = await asyncio.gather(*(client.train(asked["steps"]) for client in clients[: asked["clients"]]))
        answer = {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "losses": [losses for losses, _ in trained],
            "numbers": [numbers for _, numbers in trained],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
