"""A stream of one key beside a run of another that trains without pause: who gets how much of the time.

On a real server: a run on the workload's model takes steps of 64 rows, of some sixteen micro-batches each, and two are
always sent ahead; a chat samples from the base model. Each works alone, and then both work at once, in turns. Shares
are of what each does alone in a second, and for their sum in a second of the engine's processor time; a gap is the time
between two tokens of the stream, in micro-batches of the training alone."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import gradwire
from support.server import Server

from benchmarks.machine import engine_process
from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import cpu_seconds
from benchmarks.workload import Draw, standard_model

MICROBATCH_TOKENS = 1024
LEAST_SHARE, LEAST_SUM, MOST_GAP = 0.4, 0.95, 2.0


class Side:
    """What one of the two has done: the moments of its tokens, or of its steps."""

    def __init__(self) -> None:
        self.done: list[float] = []
        self.microbatches = 0

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.done, self.done[1:])]


async def _stream(service: gradwire.ServiceClient, prompt: list[int], until: float) -> Side:
    side = Side()
    client = service.sampling_client(model="m")
    while time.perf_counter() < until:
        async for _ in client.stream(prompt, max_tokens=512, temperature=1.0, ignore_eos=True):
            side.done.append(time.perf_counter())
            if time.perf_counter() >= until:
                break
    return side


async def _train(run: gradwire.TrainingClient, batch: list[dict[str, Any]], until: float) -> Side:
    side, ahead = Side(), deque[Any]()
    while time.perf_counter() < until:
        while len(ahead) < 2:
            ahead.append(run.train_step(batch, "causal_lm", learning_rate=1e-5))
        result = await ahead.popleft()
        side.microbatches = result.num_microbatches
        side.done.append(time.perf_counter())
    for each in ahead:
        await each
    return side


async def _figures(size: Size, server: Server, draw: Draw) -> list[Figure]:
    seconds = size.pick(20, 1)
    batch = [{"input_ids": row} for row in draw.rows(size.pick(64, 4))]
    shares: dict[str, list[float]] = {"stream": [], "training": [], "sum a CPU second": []}
    gaps: list[float] = []
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("m", lora={"rank": 16}, seed=0)
        await run.train_step(batch, "causal_lm", learning_rate=1e-5)
        engine, prompt = engine_process(), draw.tokens(32)
        for _ in range(size.repeats):
            rates = dict[str, float]()
            for name in ("stream", "training", "both"):
                until, used = time.perf_counter() + seconds, cpu_seconds(engine)
                works = {"stream": partial(_stream, service, prompt), "training": partial(_train, run, batch)}
                chosen = works if name == "both" else {name: works[name]}
                done = await asyncio.gather(*(work(until) for work in chosen.values()))
                sides = dict(zip(chosen, done, strict=True))
                used = cpu_seconds(engine) - used
                for side, of_side in sides.items():
                    rates[f"{side} {name}"] = len(of_side.done) / seconds
                    rates[f"{side} {name} cpu"] = len(of_side.done) / used
                if name == "training":
                    micro_s = seconds / max(1, len(sides[name].done)) / sides[name].microbatches
            gaps += [gap / micro_s for gap in sides["stream"].gaps()]
            for side in ("stream", "training"):
                shares[side].append(rates[f"{side} both"] / rates[f"{side} {side}"])
            of_cpu = [rates[f"{side} both cpu"] / rates[f"{side} {side} cpu"] for side in ("stream", "training")]
            shares["sum a CPU second"].append(sum(of_cpu))
    longest = statistics.quantiles(gaps, n=100)[98]
    said = "; ".join(f"{name} {statistics.median(each):.2f}" for name, each in shares.items())
    detail = f"steps of {sides['training'].microbatches} micro-batches; {said}; {size.repeats} turns"
    share, both = (statistics.median(shares[name]) for name in ("stream", "sum a CPU second"))
    return [
        Figure("stream beside training: share", share, "x", LEAST_SHARE, detail=detail),
        Figure("stream beside training: both shares", both, "x", LEAST_SUM, detail=detail),
        Figure(
            "stream beside training: gap between tokens", longest, "micro-batches", MOST_GAP, at_least=False,
            detail=f"99 of 100 are shorter; the longest {max(gaps):.1f}",
        ),
    ]  # fmt: skip


def measure(size: Size) -> list[Figure]:
    draw = Draw.of(0, smoke=size.smoke)
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "m", smoke=size.smoke)
        server = Server(
            model, Path(folder) / "state", "--microbatch-tokens", str(size.pick(MICROBATCH_TOKENS, 64)), name="m"
        )
        server.start()
        try:
            return asyncio.run(_figures(size, server, draw))
        finally:
            server.end()


if __name__ == "__main__":
    run_alone(measure, __doc__)
