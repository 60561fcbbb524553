"""Sampling of prompts that arrive over time with unequal lengths: continuous batching compared with waiting.

Sampled from the base model through the service, each request on its own: submitted as it arrives, so that it joins the
engine's batch between two tokens; or one after the other. Beside that transformers' ``generate`` on the same model in
this process, given whatever has arrived whenever it is free, as one padded batch that ends with its longest. All three
take turns in one run, at the same times of arrival; a rate counts from the first arrival to the last answer.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gradwire
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns, cpu_seconds
from benchmarks.workload import Draw, standard_model

GAP_S = 0.02
"""Mean time between two arrivals: several come while one is answered."""
SHORTEST, LONGEST = 4, 192
"""Tokens that are sampled."""
OURS, SERIAL, THEIRS = "joining", "one after another", "generate"


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival in seconds from the start, and its prompt and length."""

    at: float
    prompt: list[int]
    tokens: int


def arrivals(count: int, seed: int, *, smoke: bool) -> list[Arrival]:
    draw = Draw.of(seed, smoke=smoke)
    times = np.cumsum(draw.rng.exponential(GAP_S, count))
    longest = 12 if smoke else LONGEST
    wanted = np.clip(draw.rng.lognormal(np.log(longest / 5), 1.0, count), SHORTEST, longest).astype(int)
    prompts = [draw.tokens(int(length)) for length in draw.rng.integers(4, 64, count)]
    return [Arrival(*each) for each in zip(times.tolist(), prompts, wanted.tolist(), strict=True)]


class Waits:
    """Seconds that each request waited for its answer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def answered(self, request: Arrival) -> None:
        self.seconds.append(self.now - request.at)


async def joining(client: gradwire.SamplingClient, requests: Sequence[Arrival]) -> list[float]:
    waits = Waits()

    async def one(request: Arrival) -> None:
        await asyncio.sleep(request.at - waits.now)
        await client.sample([request.prompt], max_tokens=request.tokens, ignore_eos=True, seed=0)
        waits.answered(request)

    await asyncio.gather(*map(one, requests))
    return waits.seconds


async def serially(client: gradwire.SamplingClient, requests: Sequence[Arrival]) -> list[float]:
    waits = Waits()
    for request in requests:
        await asyncio.sleep(request.at - waits.now)
        await client.sample([request.prompt], max_tokens=request.tokens, ignore_eos=True, seed=0)
        waits.answered(request)
    return waits.seconds


class Generate:
    """The generation loop of transformers; all requests that have arrived form one batch, padded on the left."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def _batch(self, requests: Sequence[Arrival]) -> None:
        width = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        tokens = max(request.tokens for request in requests)
        self._model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0,
            max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip

    async def run(self, requests: Sequence[Arrival]) -> list[float]:
        waits, left = Waits(), list(requests)
        while left:
            await asyncio.sleep(left[0].at - waits.now)
            there = [request for request in left if request.at <= waits.now] or left[:1]
            left = left[len(there) :]
            self._batch(there)
            for request in there:
                waits.answered(request)
        return waits.seconds


async def compare(size: Size) -> list[Figure]:
    count = size.pick(48, 4)
    sides = [OURS, SERIAL, THEIRS]
    against_serial, against_generate = Turns(OURS, SERIAL), Turns(OURS, THEIRS)
    waited: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        theirs = Generate(model)
        async with gradwire.connect(models=[f"m={model}"]) as service:
            client = service.sampling_client("m")
            ways: dict[str, Callable[[Sequence[Arrival]], Awaitable[list[float]]]] = {
                OURS: lambda requests: joining(client, requests),
                SERIAL: lambda requests: serially(client, requests),
                THEIRS: theirs.run,
            }
            for turn in range(size.repeats + 1):
                requests = arrivals(count, turn, smoke=size.smoke)
                tokens = sum(request.tokens for request in requests)
                for side in sides:
                    tables = [table for table in (against_serial, against_generate) if side in table.rates]
                    began, cpu = time.perf_counter(), cpu_seconds()
                    seconds = await ways[side](requests)
                    for table in tables:
                        table.add(side, tokens, time.perf_counter() - began, cpu_seconds() - cpu)
                    if turn:
                        waited[side].append(statistics.median(seconds))
    figures = []
    for table, name in ((against_serial, SERIAL), (against_generate, f"transformers' {THEIRS}")):
        table.drop_first()
        side = SERIAL if name == SERIAL else THEIRS
        waits = f"median wait {statistics.median(waited[OURS]):.2f} s, theirs {statistics.median(waited[side]):.2f} s"
        detail = f"{count} prompts, {SHORTEST} to {LONGEST} tokens each; {table.said('tokens')}; {waits}"
        figures.append(Figure(f"sampling: joining, against {name}", table.ratio(), "x", detail=detail,
                              samples=table.rates))  # fmt: skip
    return figures


def measure(size: Size) -> list[Figure]:
    return asyncio.run(compare(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
