"""Two engines of one thread against one: training, rollouts, the relay of an engine of an agent; runs on four engines.

    python -m benchmarks.engines [--repeats 5] [--smoke] [--only training|rollout|relay|placement]

The rollout has groups of eight samples, as RL's iterations have. With one for each prompt it is not divided: a token of
16 samples takes an engine four fifths of the time of 32, because most of it is the same for any number of samples.

A machine needs two idle cores for the figures to mean something. The agent and its engine are processes of this machine
too, so that the relay's figure holds both ends' work, and no network.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import gradwire
from gradwire_server.config import TRAINED_BYTES
from gradwire_server.scheduling.who_is_next import LEAST_BYTES
from support.agent import Agent
from support.server import Server

from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, empty_operations, train
from benchmarks.turns import Turns
from benchmarks.workload import Draw, num_tokens, standard_model

RUNS, ROWS, LORA_RANK = 8, 4, 8
PROMPTS, GROUP, NEW_TOKENS = 32, 8, 64
TRAINING_TARGET, ROLLOUT_TARGET, RELAY_MS = 1.8, 0.6, 0.5
PLACED, PLACED_ON, RUN_MEMORY, MOST_SHARE = 4096, 4, 256 << 20, 1.2
"""Runs, engines, bytes of runs that each engine keeps in memory, and the most of its even share that one may have."""
ONE, TWO = "1 engine", "2 engines"
HERE, FAR = "here", "relayed"


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"


async def _training(services: dict[str, gradwire.ServiceClient], size: Size) -> Figure:
    source, turns = Draw.of(9, smoke=size.smoke), Turns(TWO, ONE)
    runs = {
        name: [await service.create_run("m", lora=LORA_RANK, seed=seed) for seed in range(RUNS)]
        for name, service in services.items()
    }
    losses: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _ in range(size.repeats + 1):
        shares = [[source.rows(ROWS) for _ in range(2)] for _ in range(RUNS)]
        batches = [[KINDS["sft"].batch(rows) for rows in share] for share in shares]
        for name, those in runs.items():
            with turns.turn(name, sum(num_tokens(rows) for share in shares for rows in share)):
                losses[name] += await asyncio.gather(
                    *(train(run, KINDS["sft"], each) for run, each in zip(those, batches, strict=True))
                )
    turns.drop_first()
    same = "the same bits" if losses[ONE] == losses[TWO] else "losses differ"
    detail = f"{turns.said('tokens')}; {same}; {_load()}"
    name = "eight LoRA runs: two engines against one"
    return Figure(name, turns.ratio(), "x", TRAINING_TARGET, detail=detail, samples=turns.rates)


async def _rollout(services: dict[str, gradwire.ServiceClient], size: Size) -> Figure:
    """Time of a sample of a run's own weights after a step, so that the other engine has to get them, too."""
    source, seconds = Draw.of(10, smoke=size.smoke), dict[str, list[float]]({name: [] for name in services})
    runs = {name: await service.create_run("m", lora=LORA_RANK, seed=1) for name, service in services.items()}
    tokens: dict[str, list[list[int]]] = {name: [] for name in runs}
    asked: dict[str, Any] = {"n": GROUP, "max_tokens": size.pick(NEW_TOKENS, 4), "ignore_eos": True, "seed": 1}
    for _ in range(size.repeats + 1):
        prompts = [source.tokens(16) for _ in range(size.pick(PROMPTS, 8))]
        batch = KINDS["sft"].batch(source.rows(ROWS))
        for name, run in runs.items():
            await train(run, KINDS["sft"], [batch])
            began = time.perf_counter()
            found = await run.sample(prompts, **asked)
            seconds[name].append(time.perf_counter() - began)
            tokens[name] += [list(sample.token_ids) for row in found.samples for sample in row]
    two, one = (statistics.median(seconds[name][1:]) for name in (TWO, ONE))
    same = "the same tokens" if tokens[ONE] == tokens[TWO] else "tokens differ"
    ratio = statistics.median(more / less for more, less in zip(seconds[TWO][1:], seconds[ONE][1:], strict=True))
    detail = f"{two * 1e3:.0f} and {one * 1e3:.0f} ms; {same}; {_load()}"
    name = f"a rollout of {PROMPTS} x {GROUP} samples: two engines' time over one's"
    return Figure(name, ratio, "x", ROLLOUT_TARGET, at_least=False, detail=detail, samples=seconds)


async def _relay(service: gradwire.ServiceClient, far: int, size: Size) -> Figure:
    """Milliseconds that an agent adds to an operation that computes nothing."""
    runs = {name: await service.create_run("m", lora=1) for name in (HERE, FAR)}
    for name, run in runs.items():
        await service.move_run(run.run_id, engine=far if name == FAR else 0)
    medians = await empty_operations(runs, size)
    relayed, here = (statistics.median(medians[name]) for name in (FAR, HERE))
    return Figure(
        "an operation that computes nothing: an agent's engine over the server's own",
        max(relayed - here, 0.0),
        "ms",
        RELAY_MS,
        at_least=False,
        detail=f"{relayed:.2f} and {here:.2f} ms; {_load()}",
        samples=medians,
    )


async def _placement(model: Path, folder: Path, size: Size) -> Figure:
    """Place runs of many sizes, a step of each; the largest share of an engine, in units of an even one."""
    flags = ["--device", "cpu", "--threads", "1", "--engines", str(PLACED_ON), "--run-memory", str(RUN_MEMORY)]
    flags += [word for name in ("max_runs", "key_runs") for word in ("--limit", f"{name}={PLACED}")]
    server, count, nbytes = Server(model, folder, *flags, name="m").start(), size.pick(PLACED, 32), dict[int, int]()
    draws, most = Draw.of(11, smoke=True).rng, 0
    try:
        async with gradwire.connect(server.address) as service:
            while not all(engine.ready for engine in (await service.server_info()).engines):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for _ in range(0, count, 16):
            ranks = [2 ** int(each) for each in draws.integers(0, 10, 16)]
            async with gradwire.connect(server.address) as service:  # each open run has a stream
                runs = await asyncio.gather(*(service.create_run("m", lora=rank) for rank in ranks))
                await asyncio.gather(*(run.train_step({"input_ids": [[3, 4, 5]]}, "causal_lm") for run in runs))
                for run in runs:
                    info = await run.info()
                    counted = max(TRAINED_BYTES * info.num_trainable_parameters, LEAST_BYTES)
                    nbytes[info.engine] = nbytes.get(info.engine, 0) + counted
                engines = (await service.server_info()).engines
                most = max(most, *(engine.memory_by_owner.get("runs", 0) for engine in engines))
        placed = [engine.placed_runs for engine in engines]
    finally:
        server.end()
    share = max(nbytes.values()) / (sum(nbytes.values()) / PLACED_ON)
    detail = f"{placed} runs; at most {most >> 20} MiB of them in an engine's memory, {RUN_MEMORY >> 20} allowed"
    name = f"{count} runs on {PLACED_ON} engines: the largest share over an even one"
    return Figure(name, share, "x", MOST_SHARE, at_least=False, detail=f"{detail}; {_load()}")


async def _wait_for_agent(service: gradwire.ServiceClient) -> int:
    while True:
        for engine in (await service.server_info()).engines:
            if engine.machine and engine.ready:
                return engine.number
        await asyncio.sleep(0.1)


async def figures(folder: Path, size: Size) -> list[Figure]:
    model, measured = standard_model(folder / "model", smoke=size.smoke), list[Figure]()
    flags = ["--device", "cpu", "--threads", "1"]
    if size.wants("placement"):
        measured.append(await _placement(standard_model(folder / "tiny", smoke=True), folder / "placed", size))
    async with AsyncExitStack() as stack:
        services = {}
        for name in (ONE, TWO):
            server = Server(model, folder / name, *flags, "--engines", name.split()[0], name="m").start()
            stack.callback(server.end)
            services[name] = await stack.enter_async_context(gradwire.connect(server.address))
        if size.wants("training"):
            measured.append(await _training(services, size))
        if size.wants("rollout"):
            measured.append(await _rollout(services, size))
        if size.wants("relay"):
            agent = Agent(services[ONE].address).start()
            stack.callback(agent.end)
            far = await asyncio.wait_for(_wait_for_agent(services[ONE]), 300)
            measured.append(await _relay(services[ONE], far, size))
    return measured


def measure(size: Size) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(figures(Path(folder), size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
