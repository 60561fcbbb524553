"""A program on the `tinker` SDK, run by the interpreter of a rival's environment: JSON lines in, JSON lines out.

Written for the SDK 0.7 to 0.38. Batches are turned into the SDK's objects before the clock starts.
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


def datum(ids: list[int]) -> types.Datum:
    tokens = len(ids) - 1
    weights = types.TensorData(data=[1.0] * tokens, dtype="float32", shape=[tokens])
    targets = types.TensorData(data=ids[1:], dtype="int64", shape=[tokens])
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def loss(output: Any) -> float:
    """The summed cross entropy, from the log-probabilities: SkyRL returns no metric."""
    return -float(sum(np.sum(np.asarray(each["logprobs"].tolist())) for each in output.loss_fn_outputs))


class Program:
    """The runs of one service, and what is asked of them."""

    def __init__(self, model: str, rank: int, adam: dict[str, float]) -> None:
        self.service = tinker.ServiceClient()
        self.model, self.rank = model, rank
        self.adam = types.AdamParams(**adam)
        self.runs: dict[str, list[Any]] = {}

    async def create(self, name: str, count: int) -> dict[str, Any]:
        """Create this many runs under a name."""
        began = time.perf_counter()
        self.runs[name] = [
            await self.service.create_lora_training_client_async(
                base_model=self.model, rank=self.rank, train_unembed=False
            )
            for _ in range(count)
        ]
        return {"seconds": time.perf_counter() - began}

    async def steps(self, name: str, batches: list[list[list[list[int]]]]) -> dict[str, Any]:
        """Take a step for each batch, which has the rows of each run; return ``seconds`` and the losses of each run."""
        data = [[[datum(ids) for ids in rows] for rows in step] for step in batches]
        runs = self.runs[name]
        began = time.perf_counter()
        if len(runs) == 1:
            outputs = [await self._awaited(runs[0], [step[0] for step in data])]
        else:
            outputs = await asyncio.gather(
                *(self._together(run, [step[index] for step in data]) for index, run in enumerate(runs))
            )
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "losses": [[loss(output) for output in each] for each in outputs]}

    async def _awaited(self, run: Any, steps: list[list[types.Datum]]) -> list[Any]:
        outputs = []
        for data in steps:
            outputs.append(await (await run.forward_backward_async(data, "cross_entropy")))
            await (await run.optim_step_async(self.adam))
        return outputs

    async def _together(self, run: Any, steps: list[list[types.Datum]]) -> list[Any]:
        outputs = []
        for data in steps:
            result = await run.forward_backward_async(data, "cross_entropy")
            step = await run.optim_step_async(self.adam)
            outputs.append(await result)
            await step
        return outputs


async def main(plan: dict[str, Any]) -> None:
    program = Program(**plan)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        answer = await getattr(program, asked.pop("do"))(**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
