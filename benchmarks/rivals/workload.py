"""The workload: a Qwen3 of two layers and 128 units, LoRA of rank 8, and batches of equal rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.qwen import Shape, qwen
from benchmarks.workload import Rows

VOCABULARY = 4096
RANK = 8
ALPHA = 32.0
"""The Tinker service's value, which SkyRL and our Tinker door use, too; TuFT's is the rank."""
LEARNING_RATE, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8
DIFFERENT_BATCHES = 4
"""After so many steps a shape's batches come again, so that its losses must fall."""

MODEL = Shape(
    hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=VOCABULARY,
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is timed.

    Attributes:
        name: As in ``--only``, and in the table.
        runs: LoRA runs that train at once; each sends forward_backward and optim_step together. One run awaits each.
        rows, tokens: Of the batch of one step of one run.
        steps: Of each run in a turn.
    """

    name: str
    runs: int
    rows: int
    tokens: int
    steps: int

    def batches(self) -> list[list[Rows]]:
        """Token ids of each row of each run, for ``DIFFERENT_BATCHES`` steps; a row has a token more than are trained.

        No token is 0, which TuFT takes for padding.
        """
        draw = np.random.default_rng(self.tokens)
        shape = (DIFFERENT_BATCHES, self.runs, self.rows, self.tokens + 1)
        drawn: list[list[Rows]] = draw.integers(4, VOCABULARY, shape).tolist()
        return drawn


WORKS = (
    Work("1 x 32 tokens", runs=1, rows=1, tokens=32, steps=12),
    Work("8 x 128 tokens", runs=1, rows=8, tokens=128, steps=4),
    Work("64 runs of 1 x 32 tokens", runs=64, rows=1, tokens=32, steps=2),
)


def model(path: Path) -> Path:
    """The model in float32; TuFT tells by a ``qwen`` in the path which layers to adapt."""
    folder = qwen(path / "qwen3", MODEL, device="cpu", dtype="float32")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where TuFT's transformers 4 looks for it
    file.write_text(json.dumps(config))
    return folder
