"""A training loop that may be killed at any moment and started again: python program.py ADDRESS RUN_ID SEED COUNT OUT.

The loop is a list of operations, each of which is a function of the seed and its number alone. Whoever runs it opens
the run, awaits what was submitted before and never acknowledged, and goes on behind it, a few dozen ahead of what it
has seen. What comes back is written down, one line an operation; a kill may cost lines, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

VOCAB = 64
PIPELINED = 30


def submit(run: gradwire.TrainingClient, seed: int, number: int) -> gradwire.Future[Any]:
    """Submit the operation with this number."""
    rng = np.random.default_rng([seed, number])
    rows = [rng.integers(3, VOCAB, rng.integers(2, 12)).tolist() for _ in range(2)]
    if number % 3 == 0:
        return run.optim_step(learning_rate=1e-3)
    if number % 30 in (4, 25) and number % 20 != 14:
        return run.train_step({"input_ids": rows}, "causal_lm", learning_rate=1e-3)
    if number % 20 == 1 and number > 1:
        return run.save_checkpoint("last", overwrite=True)
    if number % 20 == 8:
        return run.update_reference(0.5)
    if number % 20 == 14:
        return run.sample(rows, max_tokens=4)
    if number % 20 == 17:
        return run.forward_backward({"chosen_input_ids": rows, "rejected_input_ids": rows[::-1]}, "dpo",
                                    {"reference_model": "ema", "beta": 0.1})  # fmt: skip
    return run.forward_backward({"input_ids": rows}, "causal_lm")


def written(number: int, result: Any) -> str:
    """Format a result with every digit of its numbers."""
    if isinstance(result, gradwire.TrainStepResult):
        value: Any = [result.loss, result.metrics, result.step, result.grad_norm]
    elif isinstance(result, gradwire.LossResult):
        value = [result.loss, result.metrics]
    elif isinstance(result, gradwire.OptimStepResult):
        value = [result.step, result.grad_norm]
    elif isinstance(result, gradwire.Checkpoint):
        value = [result.name, result.step, result.seq]
    elif isinstance(result, gradwire.SampleResult):
        value = [sample.token_ids.tolist() for of_prompt in result.samples for sample in of_prompt]
    else:
        value = None
    return json.dumps({"number": number, "value": value})


async def main(address: str, run_id: str, seed: int, count: int, out: Path, reconnect_timeout: float = 600.0) -> None:
    async with gradwire.connect(address, connect_timeout=600, reconnect_timeout=reconnect_timeout) as service:
        run = await service.get_training_client(run_id)
        futures = await run.earlier_operations()
        submitted = (await run.info()).accepted_seq
        number = min(futures, default=submitted + 1)
        with out.open("a") as lines:
            while number <= count:
                while submitted < min(number + PIPELINED, count):
                    submitted += 1
                    futures[submitted] = submit(run, seed, submitted)
                lines.write(written(number, await futures.pop(number)) + "\n")
                lines.flush()
                number += 1


def read_lines(out: Path) -> dict[int, Any]:
    """Read number -> value; a line that a kill cut off is ignored."""
    found: dict[int, Any] = {}
    for line in out.read_text().splitlines() if out.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        assert found.setdefault(entry["number"], entry["value"]) == entry["value"], f"two results of {entry['number']}"
    return found


if __name__ == "__main__":
    address, run_id, seed, count, out = sys.argv[1:]
    asyncio.run(main(address, run_id, int(seed), int(count), Path(out)))
