"""The service on a GPU, by one server and one model: training, sampling, many runs, checkpoints, an engine's death, and
the training step's time by part.

Targets stand beside the figures they are for: NeMo Automodel trains LoRA on Llama 3 8B, rows of 4,096 tokens, at 12,473
tokens/s on one H100; prime-rl LoRA of rank 16 on Qwen3-4B, rows of 16,384, at 6,229, of which twice is wanted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import torch
from gradwire_server.engine.machine import total_memory
from gradwire_server.engine.sizing.estimate import Device, Workload, estimate
from support.server import Server, free_port

from benchmarks import roofline
from benchmarks.in_process import InProcess
from benchmarks.qwen import LORA_RANK, Shape
from benchmarks.step_parts import engine_settings, step_parts
from benchmarks.training import KINDS, train

TARGETS = {"8B:lora:4k": 12_500.0, "4B:lora:16k": 12_500.0, "8B:full:4k": 8_500.0}
"""Tokens per second."""
TURNS = 3
RUNS, RUN_TOKENS = 64, 256


@dataclass(frozen=True)
class Shapes:
    """What is trained and sampled: rows a step by name, prompts and lengths."""

    rows: dict[str, list[int]]
    samples: dict[str, tuple[int, int, int, int]]

    @classmethod
    def of(cls, *, smoke: bool) -> Shapes:
        if smoke:
            return cls({"4k": [24] * 4, "16k": [48] * 2}, {"64 of 64": (4, 8, 1, 6), "alone": (1, 8, 1, 6)})
        rows = {"4k": [4096] * 8, "16k": [16_384] * 2}
        prompts = {
            "64 of 64": (64, 64, 1, 128),
            "64 of 1,024": (64, 1024, 1, 128),
            "4 of 512, 16 each": (4, 512, 16, 128),
        }
        return cls(rows, prompts | {"alone": (1, 64, 1, 128)})


async def measured(
    name: str, model: Path, shape: Shape, tuning: str, device: str, *, smoke: bool, vllm: bool = False
) -> dict[str, Any]:
    """Every part's figures; a part that fails says why, and the next ones are measured. With vLLM only samples.

    Prints what there is so far as a line of JSON after each part: the last one is the result, also of who is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = f"127.0.0.1:{free_port()}"
        flags = ["--device", device, "--metrics-address", metrics] + ["--quantize", "nf4"] * (tuning == "nf4")
        flags += ["--sampler", "vllm"] * vllm
        flags += os.environ.get("GRADWIRE_BENCHMARK_SERVER_ARGS", "").split()
        began = time.perf_counter()
        with Server(model, Path(folder) / "state", *flags, name="m") as server:
            async with gradwire.connect(server.address) as service:
                lora = None if tuning == "full" else LORA_RANK
                run = await service.create_run("m", lora=lora, seed=1)
                by_title: dict[str, Any] = {"first run s": time.perf_counter() - began}
                found = {"parts": by_title, "steps": {}}
                part = _Measurements(name, service, run, server, metrics, shape, lora is not None, smoke, model, device)
                for title, measure in (part.samples() if vllm else part.all()).items():
                    try:
                        by_title[title] = await measure()
                    except gradwire.GradwireError as error:
                        by_title[title] = {"error": str(error)[:300]}
                    print(json.dumps(found), flush=True)
        if not vllm:  # the server has left the device
            settings = engine_settings(["--model", f"m={model}", *flags])
            engine = InProcess(model, Path(folder) / "alone", lora=lora, **settings)
            for title, lengths in Shapes.of(smoke=smoke).rows.items():
                batches = [part.rows(lengths) for _ in range(3)]
                measured_ms = step_parts(engine, batches, shape.vocab_size, device)
                found["steps"][title] = {"measured": measured_ms, "least": least(name, lengths, device, smoke=smoke)}
                print(json.dumps(found), flush=True)
        return found


def least(name: str, lengths: list[int], device: str, *, smoke: bool) -> dict[str, float] | None:
    """The roofline's milliseconds of such a step on this device; None where there are none."""
    size, tuning = name.split(":")
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    bandwidth = next((each for known, each in roofline.BANDWIDTH.items() if known in gpu), None)
    if smoke or bandwidth is None or tuning == "nf4":
        return None
    case = roofline.Case(name, size, 0 if tuning == "full" else LORA_RANK, tuple(lengths), 0.0)
    return roofline.milliseconds(case, bandwidth)


@dataclass
class _Measurements:
    name: str
    service: gradwire.ServiceClient
    run: gradwire.TrainingClient
    server: Server
    metrics: str
    shape: Shape
    lora: bool
    smoke: bool
    model: Path
    device: str

    def __post_init__(self) -> None:
        self._rng, self._shapes = np.random.default_rng(0), Shapes.of(smoke=self.smoke)

    def all(self) -> dict[str, Callable[[], Awaitable[dict[str, Any]]]]:
        parts: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {}
        for title in self._shapes.rows:
            parts[f"train {title}"] = partial(self.train, title)
        parts |= self.samples()
        if self.lora:
            parts[f"{RUNS} runs"] = self.runs
        return parts | {"checkpoint": self.checkpoint, "recovery": self.recovery}

    def samples(self) -> dict[str, Callable[[], Awaitable[dict[str, Any]]]]:
        return {f"sample {title}": partial(self.sample, title) for title in self._shapes.samples}

    def rows(self, lengths: list[int]) -> list[list[int]]:
        return [self._rng.integers(4, self.shape.vocab_size, length).tolist() for length in lengths]

    async def train(self, title: str) -> dict[str, Any]:
        lengths = self._shapes.rows[title]
        seconds = []
        for _ in range(1 + TURNS):
            batches = [KINDS["sft"].batch(self.rows(lengths)) for _ in range(2)]
            began = time.perf_counter()
            await train(self.run, KINDS["sft"], batches)
            seconds.append((time.perf_counter() - began) / 2)
        took = statistics.median(seconds[1:])
        found = {"tokens/s": sum(lengths) / took, "flops/s": self.shape.step_flops(lengths, lora=self.lora) / took}
        more = {"target": None if self.smoke else TARGETS.get(f"{self.name}:{title}"), "peak GiB": self._peak()}
        more["estimated GiB"] = self._estimated(lengths)
        return found | {name: value for name, value in more.items() if value is not None}

    def _peak(self) -> float | None:
        """Largest memory of tensors so far; none on a CPU."""
        page = urllib.request.urlopen(f"http://{self.metrics}/metrics").read().decode()
        for line in page.splitlines():
            if line.startswith("gradwire_device_memory_bytes") and 'state="peak"' in line:
                return float(line.rsplit(" ", 1)[1]) / 2**30
        return None

    def _estimated(self, lengths: list[int]) -> float:
        """What ``gradwire estimate`` says of such a step on this device."""
        size = total_memory(torch.device(self.device))
        workload = Workload(
            str(self.model), LORA_RANK if self.lora else 0, max(lengths), len(lengths),
            quantize="nf4" if ":nf4" in self.name else None,
        )  # fmt: skip
        return estimate(workload, Device("cuda" if self.device == "cuda" else "cpu", size)).total_bytes / 2**30

    async def sample(self, title: str) -> dict[str, Any]:
        count, length, n, tokens = self._shapes.samples[title]
        seconds = []
        for _ in range(2):
            prompts = self.rows([length] * count)
            began = time.perf_counter()
            await self.run.sample(prompts, n=n, max_tokens=tokens, ignore_eos=True, seed=0)
            seconds.append(time.perf_counter() - began)
        return {"tokens/s": count * n * tokens / seconds[1], "first s": seconds[0]}

    async def runs(self) -> dict[str, Any]:
        """Steps of many runs at once, against the same one after another."""
        runs = [await self.service.create_run("m", lora=16, seed=number) for number in range(2 if self.smoke else RUNS)]
        length = 16 if self.smoke else RUN_TOKENS
        tokens = len(runs) * length

        async def step(run: gradwire.TrainingClient) -> None:
            await train(run, KINDS["sft"], [KINDS["sft"].batch(self.rows([length]))])

        rates = dict[str, list[float]]()
        for _ in range(2):
            began = time.perf_counter()
            await asyncio.gather(*map(step, runs))
            rates.setdefault("tokens/s", []).append(tokens / (time.perf_counter() - began))
            began = time.perf_counter()
            for run in runs:
                await step(run)
            rates.setdefault("one after another", []).append(tokens / (time.perf_counter() - began))
        found = {name: each[1] for name, each in rates.items()}
        for run in runs:
            await self.service.delete_run(run.run_id)
        return found | {"ratio": found["tokens/s"] / found["one after another"]}

    async def checkpoint(self) -> dict[str, Any]:
        began = time.perf_counter()
        saved = await self.run.save_checkpoint("benchmark")
        taken = time.perf_counter() - began
        began = time.perf_counter()
        await self.run.load_checkpoint(saved.path)
        return {"save s": taken, "load s": time.perf_counter() - began}

    async def recovery(self) -> dict[str, Any]:
        """From the engine's death until the run's next result."""
        os.kill(self.server.engine_pid, signal.SIGKILL)
        began = time.perf_counter()
        lengths = self._shapes.rows["4k"]
        await train(self.run, KINDS["sft"], [KINDS["sft"].batch(self.rows(lengths))])
        return {"s": time.perf_counter() - began}
