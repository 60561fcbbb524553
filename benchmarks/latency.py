"""The cost of network latency: a training loop over loopback and over a link with added latency, pipelined and awaited.

    python benchmarks/latency.py [--added-ms 50] [--steps 100] [--repeats 5]

Each repeat runs the four loops in turn on one server; the table gives medians, and speeds as a share of the
same loop's over loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from support.slow_link import slow_link
from support.tiny import tiny_model

IN_FLIGHT = 16


async def pipelined(run: gradwire.TrainingClient, batch: dict[str, Any], steps: int) -> float:
    """Measure the seconds of the loop with up to 16 steps submitted ahead of the awaited one."""
    start = time.perf_counter()
    waiting: deque[gradwire.Future[Any]] = deque()
    for _ in range(steps):
        run.forward_backward(batch, "causal_lm")
        waiting.append(run.optim_step(learning_rate=1e-5))
        if len(waiting) > IN_FLIGHT:
            await waiting.popleft()
    while waiting:
        await waiting.popleft()
    return time.perf_counter() - start


async def awaited(run: gradwire.TrainingClient, batch: dict[str, Any], steps: int) -> float:
    """Measure the seconds of the loop with every call awaited before the next."""
    start = time.perf_counter()
    for _ in range(steps):
        await run.forward_backward(batch, "causal_lm")
        await run.optim_step(learning_rate=1e-5)
    return time.perf_counter() - start


async def measure(model: Path, added_s: float, steps: int, repeats: int) -> dict[tuple[str, str], list[float]]:
    """``(loop, link) -> seconds of each repeat``."""
    rng = np.random.default_rng(0)
    batch = {"input_ids": rng.integers(3, 60, (16, 64))}
    seconds: dict[tuple[str, str], list[float]] = {}
    async with (
        gradwire.connect(models=[f"tiny={model}"]) as near,
        slow_link(near.address, added_s) as far_address,
        gradwire.connect(far_address, api_key=near.api_key) as far,
    ):
        runs = {"loopback": await near.create_run("tiny"), "slow": await far.create_run("tiny")}
        for run in runs.values():
            await pipelined(run, batch, 5)
        for _ in range(repeats):
            for loop in (pipelined, awaited):
                for link, run in runs.items():
                    seconds.setdefault((loop.__name__, link), []).append(await loop(run, batch, steps))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--added-ms", type=float, default=50)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model")
        seconds = asyncio.run(measure(model, args.added_ms / 1e3, args.steps, args.repeats))
    print(
        f"{'loop':<10} {'loopback':>12} {f'+{args.added_ms:g} ms':>12} {'speed kept':>11}   (medians of {args.repeats})"
    )
    for loop in ("pipelined", "awaited"):
        near, far = (statistics.median(seconds[loop, link]) / args.steps for link in ("loopback", "slow"))
        print(f"{loop:<10} {near * 1e3:>9.2f} ms {far * 1e3:>9.2f} ms {near / far:>10.1%}")


if __name__ == "__main__":
    main()
