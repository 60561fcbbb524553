"""The shapes of models that people train, with random weights: against TRL, and against a packed loop in plain PyTorch.

SmolLM2-135M, four layers of Qwen3-0.6B, and Gemma-3-270M, from the numbers of their public configurations. TRL's side
and the check of losses are those of ``against_trl``. The packed loop computes no padding either: all rows of a batch
are one row, under a mask that keeps them apart.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradwire
import torch
from _support.small_model import small_model

from benchmarks.against_trl import RIVALS, check_installed, draw, race
from benchmarks.padded_loop import IGNORED, PaddedLoop
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, train
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, Rows, num_tokens

ROWS = {"sft": 6, "dpo": 3, "grpo": 1}
"""Rows of a batch for SFT, pairs for DPO, groups of four responses for GRPO."""
SMOKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 512,
}
COMMON: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 8192}


def smollm2(**settings: Any) -> Any:
    """HuggingFaceTB/SmolLM2-135M: 30 layers of 576, a vocabulary of 49,152."""
    from transformers import LlamaConfig

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49_152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    return LlamaConfig(**COMMON | shape | heads | settings)


def qwen3(**settings: Any) -> Any:
    """Four of the 28 layers of Qwen/Qwen3-0.6B, 1,024 wide, with its vocabulary of 151,936."""
    from transformers import Qwen3Config

    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 151_936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    return Qwen3Config(**COMMON | shape | heads | settings)


def gemma3(**settings: Any) -> Any:
    """google/gemma-3-270m: 18 layers of 640, one head of keys and values, a vocabulary of 262,144."""
    from transformers import Gemma3TextConfig

    shape = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 262_144}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    window = {"sliding_window": 512, "query_pre_attn_scalar": 256}
    return Gemma3TextConfig(**COMMON | shape | heads | window | settings)


SHAPES: dict[str, Callable[..., Any]] = {"SmolLM2-135M": smollm2, "Qwen3-0.6B, 4 layers": qwen3, "Gemma-3-270M": gemma3}


def build(path: Path, shape: Callable[..., Any], *, smoke: bool) -> Path:
    """Write a random float32 model of a shape as a Hugging Face folder; its tokenizer is that of a small model."""
    from transformers import AutoModelForCausalLM

    small_model(path, hidden_size=8, num_layers=1, num_heads=1)
    torch.manual_seed(0)
    config = shape(pad_token_id=0, bos_token_id=1, eos_token_id=2) if not smoke else shape(**SMOKE)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


class PackedLoop(PaddedLoop):
    """The rows of a batch one after the other in one row, each attending to itself."""

    def loss(self, rows: Rows) -> torch.Tensor:
        ids = torch.tensor([token for row in rows for token in row])[None]
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows]))
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        mask = ((owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril())[None, None]
        labels = ids.masked_fill(positions == 0, IGNORED)
        return self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False
        ).loss


async def against_packed(model: Path, batches: list[Rows]) -> Turns:
    turns = Turns("ours", "packed loop")
    theirs = PackedLoop(model)
    async with gradwire.connect(models=[f"m={model}"]) as service:
        run = await service.create_run("m")
        for rows in batches:
            tokens = num_tokens(rows)
            with turns.turn("ours", tokens):
                ours = await train(run, KINDS["sft"], [KINDS["sft"].batch(rows)])
            with turns.turn("packed loop", tokens):
                losses = [theirs.step(rows)]
            check_losses(ours, losses)
    turns.drop_first()
    return turns


def batches_of(kind: str, size: Size) -> list[Any]:
    source = Draw.of(11, smoke=size.smoke)
    return [draw(kind, source, ROWS[kind]) for _ in range(size.repeats + 1)]


async def compare(name: str, size: Size) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "model", SHAPES[name], smoke=size.smoke)
        races = {"a packed loop": (1.0, against_packed(model, batches_of("sft", size)))}
        for kind in ("sft", "dpo", "grpo"):
            races[f"TRL's {RIVALS[kind].name}"] = (2.0, race(RIVALS[kind], model, batches_of(kind, size), 1))
        for rival, (target, running) in races.items():
            turns = await running
            detail = f"{turns.said('tokens')}; losses equal"
            figures.append(
                Figure(f"{name} against {rival}", turns.ratio(), "x", target, detail=detail, samples=turns.rates)
            )
    return figures


def measure(size: Size) -> list[Figure]:
    """Measure four figures per shape; ``only`` names shapes.

    Raises:
        FileNotFoundError: TRL's environment does not exist.
    """
    check_installed()
    return [figure for name in SHAPES if size.wants(name) for figure in asyncio.run(compare(name, size))]


if __name__ == "__main__":
    run_alone(measure, __doc__)
