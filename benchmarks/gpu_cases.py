"""The cases of ``benchmarks.gpu``, one per process: a model, LoRA or full fine-tuning, and the trainer."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_service import measured
from benchmarks.machine import wait_for
from benchmarks.qwen import LORA_RANK, qwen, shape
from benchmarks.training import KINDS, LEARNING_RATE, train
from benchmarks.workload import Rows

ROWS = 32
"""Of a step."""
THEIR_ROWS = 8
"""That theirs try to put through the model at once; halved until it fits."""
STEPS_OF_A_TURN = 2
SECONDS = 12.0
IGNORED = -100

SIDES: Mapping[str, tuple[str, ...]] = {
    "ours": (),
    "padded": ("peft",),
    "trl": ("trl",),
    "trl+liger": ("trl", "liger_kernel"),
    "service": (),
    "vllm": ("vllm",),
}
"""Whose code trains -> the packages that it needs beside ours; ``service``: ours, see :mod:`benchmarks.gpu_service`,
``vllm``: its samples by ``--sampler vllm``."""

TRAINERS = ("ours", "padded", "trl", "trl+liger")
"""Those that train on rows of different lengths."""


@dataclass(frozen=True)
class Case:
    """A model, what of it is trained, and by whom.

    Attributes:
        size: Of :data:`benchmarks.qwen.SIZES`, or of ``LARGER`` or ``SCALED``.
        tuning: ``lora`` or ``full``; for the service also ``nf4``.
        side: Of :data:`SIDES`; ``ours@2`` for ours on two ranks.
    """

    size: str
    tuning: str
    side: str

    def __str__(self) -> str:
        return f"{self.size}:{self.tuning}:{self.side}"

    @property
    def ranks(self) -> int:
        return int(self.side.partition("@")[2] or 1)

    @staticmethod
    def of(text: str) -> Case:
        return Case(*text.split(":"))


Turn = Callable[[list[Rows]], float]
"""Trains on these batches, a step each; the seconds that it took."""


def draw(count: int, vocab_size: int, *, smoke: bool) -> list[Rows]:
    """Draw batches of rows of 128 to 4,096 tokens with log-normal lengths, the same in every case."""
    rng = np.random.default_rng(0)
    shortest, longest = (8, 64) if smoke else (128, 4096)
    size = 4 if smoke else ROWS
    lengths = np.clip(rng.lognormal(np.log(5.0 * shortest), 0.9, (count, size)), shortest, longest).astype(int)
    return [[rng.integers(4, vocab_size, length).tolist() for length in batch] for batch in lengths]


def run_case(case: Case, models: Path, device: str, *, smoke: bool) -> dict[str, Any]:
    """Measure tokens and required operations per second: medians over turns of several steps, after a warm-up turn."""
    sizes = shape(case.size, smoke=smoke)
    model = qwen(models / (f"{case.size}-smoke" if smoke else case.size), sizes, device=device)
    if case.side in ("service", "vllm"):
        name, vllm = f"{case.size}:{case.tuning}", case.side == "vllm"
        return asyncio.run(measured(name, model, sizes, case.tuning, device, smoke=smoke, vllm=vllm))
    turns = 3 if smoke else 40
    batches = draw(turns * STEPS_OF_A_TURN, sizes.vocab_size, smoke=smoke)
    lora = case.tuning == "lora"
    rows_at_a_time = THEIR_ROWS
    while True:
        try:
            if case.side.startswith("ours"):
                rates, extra = _ours(model, batches, lora, device, case.ranks)
            else:
                rates, extra = SIDE_FUNCTIONS[case.side](model, batches, lora, device, rows_at_a_time, smoke)
            break
        except RuntimeError as error:
            if "out of memory" not in str(error).lower() or rows_at_a_time == 1:
                raise
        # Outside the handler, whose traceback keeps what did not fit.
        rows_at_a_time //= 2
        if device == "cuda":
            torch.cuda.empty_cache()
    if not case.side.startswith("ours"):
        extra["rows_at_a_time"] = rows_at_a_time
    tokens, flops = [], []
    for turn, seconds in enumerate(rates[1:], start=1):
        lengths = [
            [len(row) for row in rows] for rows in batches[turn * STEPS_OF_A_TURN : (turn + 1) * STEPS_OF_A_TURN]
        ]
        tokens.append(sum(map(sum, lengths)) / seconds)
        flops.append(sum(sizes.step_flops(each, lora=lora) for each in lengths) / seconds)
    return {
        "tokens_per_second": statistics.median(tokens),
        "flops_per_second": statistics.median(flops),
        "turns": len(tokens),
        **extra,
    }


def _timed(turn: Turn, batches: list[Rows]) -> list[float]:
    """Return the seconds of each turn after the first, which warms up."""
    seconds: list[float] = []
    for start in range(0, len(batches), STEPS_OF_A_TURN):
        seconds.append(turn(batches[start : start + STEPS_OF_A_TURN]))
        if len(seconds) > 3 and sum(seconds[1:]) > SECONDS:
            break
    return seconds


def _ours(model: Path, batches: list[Rows], lora: bool, device: str, ranks: int) -> tuple[list[float], dict[str, Any]]:
    import gradwire

    async def measured() -> list[float]:
        server = [
            "--device",
            device,
            "--ranks",
            str(ranks),
            *os.environ.get("GRADWIRE_BENCHMARK_SERVER_ARGS", "").split(),
        ]
        async with gradwire.connect(models=[f"m={model}"], server_args=server) as service:
            run = await service.create_run("m", lora=LORA_RANK if lora else None)
            seconds: list[float] = []
            for start in range(0, len(batches), STEPS_OF_A_TURN):
                chosen = [KINDS["sft"].batch(rows) for rows in batches[start : start + STEPS_OF_A_TURN]]
                began = time.perf_counter()
                await train(run, KINDS["sft"], chosen)
                seconds.append(time.perf_counter() - began)
                if len(seconds) > 3 and sum(seconds[1:]) > SECONDS:
                    break
            return seconds

    return asyncio.run(measured()), {}


def _padded(
    model: Path, batches: list[Rows], lora: bool, device: str, rows_at_a_time: int, smoke: bool
) -> tuple[list[float], dict[str, Any]]:
    """The common training loop: bfloat16 autocast over float32 weights, or an adapter on bfloat16 weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    trained: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if lora else torch.float32)
    if lora:
        config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        trained = get_peft_model(trained, config)
    trained = trained.to(device).train()
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(rows: Rows) -> None:
        learned = sum(len(row) - 1 for row in rows)
        for start in range(0, len(rows), rows_at_a_time):
            part = rows[start : start + rows_at_a_time]
            width = max(map(len, part))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in part])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part])
            labels = ids.masked_fill(mask == 0, IGNORED)
            ids, mask, labels = (each.to(device, non_blocking=True) for each in (ids, mask, labels))
            with torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext():
                loss = trained(
                    input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=learned, use_cache=False
                ).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def turn(chosen: list[Rows]) -> float:
        start = time.perf_counter()
        for rows in chosen:
            step(rows)
        wait_for(device)
        return time.perf_counter() - start

    seconds = _timed(turn, batches)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return seconds, {"peak_gib": peak}


def _trl(
    model: Path,
    batches: list[Rows],
    lora: bool,
    device: str,
    rows_at_a_time: int,
    smoke: bool,
    *,
    liger: bool = False,
) -> tuple[list[float], dict[str, Any]]:
    """TRL's SFTTrainer: bfloat16 autocast over float32 weights, or an adapter on bfloat16 weights."""
    from benchmarks.against_trl import Trainer

    size = min(rows_at_a_time, len(batches[0]))
    plan = {
        "kind": "sft",
        "model": str(model),
        "batches": [*batches, batches[0]],
        "learning_rate": LEARNING_RATE,
        "threads": 0,
        "device": device,
        "dtype": "bfloat16",
        "lora_rank": LORA_RANK if lora else 0,
        "model_init_kwargs": {"dtype": "bfloat16" if lora and device == "cuda" else "float32"},
        "arguments": {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": len(batches[0]) // size,
            "max_length": 4096,
            "use_liger_kernel": liger,
        },
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(plan, Path(folder) / "trl", python=os.environ.get("GRADWIRE_TRL_PYTHON", sys.executable)) as trainer,
    ):
        seconds = _timed(lambda chosen: float(trainer.steps(len(chosen))["seconds"]), batches)
    return seconds, {}


def _trl_liger(*args: Any) -> tuple[list[float], dict[str, Any]]:
    return _trl(*args, liger=True)


SIDE_FUNCTIONS: Mapping[str, Callable[..., tuple[list[float], dict[str, Any]]]] = {
    "padded": _padded,
    "trl": _trl,
    "trl+liger": _trl_liger,
}
