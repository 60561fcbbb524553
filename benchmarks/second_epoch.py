"""Sequences that PPO's second pass over a batch sends through the reference model again, by the server's metrics."""

from __future__ import annotations

import asyncio
import re
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from support.server import free_port

from benchmarks.report import Figure, Size, run_alone
from benchmarks.workload import Draw, Rows, standard_model

BATCHES = 4
TWO_BEATS_S = 2.5
MISSES = re.compile(r'^gradwire_cache_requests_total\{cache="logprobs",result="miss"\} ([\d.e+]+)$', re.MULTILINE)


def ppo_batch(rows: Rows, rng: np.random.Generator) -> dict[str, Any]:
    def draw(mean: float, spread: float) -> list[list[float]]:
        return [rng.normal(mean, spread, len(row)).tolist() for row in rows]

    return {"input_ids": rows, "old_log_probs": draw(-8, 0.3), "rewards": draw(0, 1), "old_values": draw(0, 0.5)}


async def forwards(address: str) -> int:
    """Return the number of sequences that the reference has computed, after the engine's next report."""
    await asyncio.sleep(TWO_BEATS_S)
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())
    found = MISSES.search(page)
    return int(float(found[1])) if found else 0


async def second_pass(size: Size) -> list[Figure]:
    source = Draw.of(6, smoke=size.smoke)
    batches = [ppo_batch(source.rows(4), source.rng) for _ in range(BATCHES)]
    metrics = f"127.0.0.1:{free_port()}"
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        async with gradwire.connect(models=[f"m={model}"], server_args=["--metrics-address", metrics]) as service:
            run = await service.create_run("m", head="value")
            for _ in range(2):
                for batch in batches:
                    await run.forward_backward(batch, "enhanced_ppo", {"reference_model": "base"})
                    await run.optim_step(learning_rate=1e-5)
                counts.append(await forwards(metrics))
    first, second = counts[0], counts[1] - counts[0]
    detail = f"{first} sequences through the reference in the first pass over {BATCHES} batches, {second} in the second"
    if not first:
        raise AssertionError(f"the first pass computed no reference: what is counted is something else ({detail})")
    return [Figure("reference forwards of a second epoch", second, "sequences", 0, at_least=False, detail=detail)]


def measure(size: Size) -> list[Figure]:
    return asyncio.run(second_pass(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
