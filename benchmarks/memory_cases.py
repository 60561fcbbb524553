"""Seven workloads on a CPU whose peak memory is measured and computed: ``gradwire estimate`` against the kernel.

Each runs on a server of its own. Measured is the most that the engine's process ever held (``VmHWM``), beyond what the
engine of the same server held before any model was loaded. Every run takes two steps, because the first has no moments.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradwire

from benchmarks.machine import engine_process, memory_bytes
from benchmarks.report import Figure, Size, run_alone
from benchmarks.workload import Draw, standard_model

TOLERANCE = 0.15
BASE = {"hidden_size": 1024, "num_layers": 12}
SMALL = {"hidden_size": 512, "num_layers": 8}


@dataclass(frozen=True)
class Case:
    """A workload.

    Attributes:
        name: Name of the figure.
        shape: The model.
        flags: Further arguments of ``gradwire estimate``.
        rows, tokens: Of each batch.
        runs: Number of runs.
        lora: Rank; 0 trains all weights.
        head: Head of the runs.
        server_args: Arguments of ``gradwire serve``.
        reference: Whether the loss compares with another model.
        experts: Experts of each layer; 0 for a dense model.
    """

    name: str
    shape: dict[str, int]
    flags: Sequence[str]
    rows: int
    tokens: int
    runs: int = 1
    lora: int = 32
    head: str | None = None
    server_args: Sequence[str] = ()
    reference: bool = False
    experts: int = 0

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``gradwire estimate``."""
        size = ["--tokens", str(self.tokens), "--rows", str(self.rows), "--runs", str(self.runs)]
        return [*size, *(["--lora-rank", str(self.lora)] if self.lora else ["--full"]), *self.flags]


CASES = (
    # Two micro-batches: the gradients of the first are there beside all activations of the second.
    Case("full", SMALL | {"hidden_size": 768}, (), rows=16, tokens=256, lora=0),
    Case("LoRA", BASE, (), rows=8, tokens=256),
    Case("QLoRA", BASE, ("--quantize", "nf4"), rows=8, tokens=256, server_args=("--quantize", "nf4")),
    Case("long rows", SMALL, (), rows=2, tokens=6144),
    Case("many runs", SMALL, (), rows=2, tokens=128, runs=24, lora=64),
    Case("LoRA on experts", SMALL | {"hidden_size": 768}, (), rows=8, tokens=256, lora=16, experts=8),
    Case("reward and reference", BASE, ("--head", "reward"), rows=8, tokens=256, head="reward", reference=True),
)


async def measured(case: Case, model: Path, reference: Path | None) -> int:
    """Bytes at the peak of a case, beyond an engine that holds no model."""
    models = [f"m={model}"] + ([f"reference={reference}"] if reference else [])
    draw = Draw.of(5)
    async with gradwire.connect(models=models, server_args=case.server_args) as service:
        engine = engine_process()
        before = memory_bytes(engine, "VmRSS")
        lora = {"rank": case.lora} if case.lora else None
        runs = [await service.create_run("m", lora=lora, head=case.head) for _ in range(case.runs)]
        for _ in range(2):
            await gradwire.gather(*(_accumulate(case, run, draw) for run in runs))
            await gradwire.gather(*(run.optim_step(learning_rate=1e-5) for run in runs))
        return memory_bytes(engine, "VmHWM") - before


def _accumulate(case: Case, run: gradwire.TrainingClient, draw: Draw) -> Any:
    rows = [draw.tokens(case.tokens) for _ in range(case.rows)]
    if case.head != "reward":
        return run.forward_backward({"input_ids": rows}, "causal_lm")
    half = case.rows // 2
    pairs = {"chosen_input_ids": rows[:half], "rejected_input_ids": rows[half:]}
    if not case.reference:
        return run.forward_backward(pairs, "reward_modeling")
    run.forward_backward(pairs, "reward_modeling")
    pairs["prompt_lengths"] = [1] * half
    return run.forward_backward(pairs, "dpo", {"reference_model": "reference"})


def computed(case: Case, model: Path, reference: Path | None) -> int:
    """``total_bytes`` of ``gradwire estimate``."""
    command = [sys.executable, "-m", "gradwire.cli", "estimate", "--json", "--model", str(model), "--device", "cpu"]
    command += [*case.arguments, *(["--reference", str(reference)] if reference else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr.strip())
    return int(json.loads(done.stdout)["total_bytes"])


def compare(case: Case) -> Figure:
    """What is computed over what is measured."""
    with tempfile.TemporaryDirectory() as folder:
        model, reference = make_models(case, Path(folder))
        total = computed(case, model, reference)
        most = asyncio.run(measured(case, model, reference))
    detail = f"computed {total / 2**20:,.0f} MiB, measured {most / 2**20:,.0f} MiB beyond an engine that holds no model"
    return Figure(f"memory, {case.name}: computed over measured", total / most, "x", detail=detail)


def measure(size: Size) -> list[Figure]:
    if size.smoke:
        return [compare(replace(CASES[1], shape={"hidden_size": 32, "num_layers": 1}, rows=2, tokens=32))]
    return [compare(case) for case in CASES if size.wants(case.name)]


def make_models(case: Case, folder: Path) -> tuple[Path, Path | None]:
    """The model of a case, and the model it is compared with."""
    context = max(1024, case.tokens)
    if case.experts:
        return _mixture(folder / "model", case, context), None
    model = standard_model(folder / "model", context_length=context, **case.shape)
    if not case.reference:
        return model, None
    return model, standard_model(folder / "reference", context_length=context, seed=1, **SMALL)


def _mixture(path: Path, case: Case, context_length: int) -> Path:
    """A Qwen3-MoE of the case's shape, two experts a token, with the tokenizer of the standard model."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    standard_model(path, hidden_size=32, num_layers=1, context_length=context_length)
    vocabulary = AutoConfig.from_pretrained(path).vocab_size
    hidden, layers = case.shape["hidden_size"], case.shape["num_layers"]
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, head_dim=hidden // 8, moe_intermediate_size=hidden // 2, num_experts=case.experts,
        num_experts_per_tok=2, max_position_embeddings=context_length, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


if __name__ == "__main__":
    run_alone(measure, __doc__)
