"""A tiny Llama loaded through the real host, runs over it, and a random batch for any registered loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import LossSpec, load_builtin_losses
from gradwire_proto.codec import Column
from gradwire_proto.v1.training_pb2 import LoraSettings, RunConfig
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.state.engine_run import EngineRun
from transformers import LlamaConfig, LlamaForCausalLM

load_builtin_losses()

VOCAB = 64
CONTEXT = 64

MakeRun = Callable[..., EngineRun]


@dataclass(frozen=True)
class RandomBatches:
    """Random valid columns for whatever a loss declares: its required fields, its masks, and rewards."""

    generator: np.random.Generator

    def columns(self, loss: LossSpec, rows: int, shortest: int, longest: int) -> dict[str, Column]:
        samples = np.full(rows, 3, np.uint32)
        lengths: dict[str, tuple[np.ndarray, ...]] = {}
        for field in loss.fields:
            if field.ids and not field.aligned_with:
                outer = (samples,) if "samples" in field.shapes[0] else ()
                count = 3 * rows if outer else rows
                lengths[field.name] = (*outer, self.generator.integers(shortest, longest, count).astype(np.uint32))
        required = {field.name for field in loss.fields if field.required}
        taken = required | {"rewards", "response_masks", "mask" if "target_tokens" in required else "loss_mask"}
        taken |= {"importance_sampling": {"behavior_log_probs"}, "gigpo": {"advantages"}}.get(loss.name, set())
        columns = {}
        for field in loss.fields:
            if field.name not in taken:
                continue
            shape = [shape for shape in field.shapes if "candidates" not in shape] or list(field.shapes)
            levels: tuple[np.ndarray, ...] = (samples,) if "samples" in shape[-1] else ()
            if "tokens" in shape[-1]:
                levels = lengths[field.aligned_with or field.name]
            count = int(levels[-1].sum()) if levels else rows
            size = (count, 4) if "candidates" in shape[-1] else (count,)
            columns[field.name] = Column(self._values(field.name, field.dtype, size), levels)
        if "teacher_input_ids" in columns:  # which repeats the response, here after a prompt of the same length
            columns |= {f"teacher_{name}": columns[name] for name in ("input_ids", "loss_mask")}
        return columns

    def _values(self, name: str, dtype: str, size: tuple[int, ...]) -> np.ndarray:
        if dtype == "int":
            return self.generator.integers(0, VOCAB, size)
        if dtype == "bool":
            return self.generator.random(size) < 0.8
        if "label" in name:
            return self.generator.random(size).astype(np.float32)
        mean, spread = (-4.0, 0.3) if "log_probs" in name or "logprobs" in name else (0.0, 1.0)
        return self.generator.normal(mean, spread, size).astype(np.float32)

    def batch(self, loss: LossSpec, rows: int = 8, shortest: int = 1, longest: int = 9) -> Batch:
        return read_batch(loss, self.columns(loss, rows, shortest, longest), vocab_size=VOCAB, context_length=CONTEXT)


@pytest.fixture
def batches(seed: int) -> RandomBatches:
    return RandomBatches(np.random.default_rng(seed))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pool(model_path: Path) -> ModelPool:
    """Loads the frozen model once for the tests of a file."""
    return ModelPool({"tiny": str(model_path)})


@pytest.fixture
def make_run(pool: ModelPool) -> Iterator[MakeRun]:
    """``make_run(lora=rank or settings, head=..., seed=..., run_id=..., host=...)``"""
    made: list[EngineRun] = []

    def make(
        lora: int | dict[str, Any] | None = None,
        head: str = "",
        seed: int = 0,
        run_id: str | None = None,
        pool: ModelPool = pool,
        gradient_checkpointing: bool = False,
    ) -> EngineRun:
        config = RunConfig(base_model="tiny", head=head, seed=seed, gradient_checkpointing=gradient_checkpointing)
        config.num_labels = VOCAB if head == "classification" else 0
        if lora is not None:
            config.lora.CopyFrom(LoraSettings(**({"rank": lora} if isinstance(lora, int) else lora)))
        made.append(EngineRun(pool, run_id or f"run-{len(made)}", config))
        return made[-1]

    yield make
    for run in made:
        run.close()
