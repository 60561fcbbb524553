"""The workload: a model of four layers and 256 units, and rows of 32 to 512 tokens.

Its vocabulary of 4,096 makes the output head a quarter of the arithmetic, as in a model of 0.6 B parameters with one
of 150,000. Lengths are log-normal, clipped to the range, so that padding a batch of 16 to its longest row computes 2.1
times the real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _support.small_model import SPECIAL, small_model

ROWS = 16
SHORTEST, LONGEST = 32, 512
VOCABULARY = 4096
FIRST_WORD = len(SPECIAL)
SAMPLES_OF_A_PROMPT = 4

Rows = list[list[int]]


def standard_model(path: Path, *, smoke: bool = False, **settings: Any) -> Path:
    """The model as a Hugging Face folder; ``settings`` as of ``small_model``."""
    words = 200 if smoke else VOCABULARY
    shape = {"hidden_size": 32, "num_layers": 1} if smoke else {"hidden_size": 256, "num_layers": 4}
    return small_model(
        path,
        **{
            "characters": "".join(chr(0x4E00 + index) for index in range(words - FIRST_WORD)),
            "context_length": 1024,
            "initializer_range": 0.02,
            **shape,
            **settings,
        },
    )


@dataclass(frozen=True)
class Draw:
    """Source of batches; the same seed draws the same batches."""

    rng: np.random.Generator
    smoke: bool = False

    @staticmethod
    def of(seed: int, *, smoke: bool = False) -> Draw:
        return Draw(np.random.default_rng(seed), smoke)

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(FIRST_WORD, 200 if self.smoke else VOCABULARY, count).tolist()

    def lengths(self, count: int) -> list[int]:
        scale = 0.1 if self.smoke else 1.0
        drawn = np.clip(self.rng.lognormal(np.log(200 * scale), 0.7, count), SHORTEST * scale, LONGEST * scale)
        return drawn.astype(int).tolist()

    def rows(self, count: int = ROWS) -> Rows:
        """Token ids of each row."""
        return [self.tokens(length) for length in self.lengths(count)]

    def pairs(self, count: int = ROWS // 2) -> list[dict[str, list[int]]]:
        """``prompt``, ``chosen`` and ``rejected`` of each pair; prompt and response together have a row's length."""
        out = []
        for chosen, rejected in zip(self.lengths(count), self.lengths(count), strict=True):
            prompt = int(self.rng.integers(min(chosen, rejected) // 4, min(chosen, rejected) // 2 + 1)) + 1
            sides = {"chosen": self.tokens(chosen - prompt), "rejected": self.tokens(rejected - prompt)}
            out.append({"prompt": self.tokens(prompt)} | sides)
        return out

    def groups(self, count: int = ROWS // SAMPLES_OF_A_PROMPT) -> list[dict[str, Any]]:
        """``prompt``, ``responses`` and ``rewards`` of each group; prompt and response together have a row's length."""
        out = []
        for _ in range(count):
            lengths = self.lengths(SAMPLES_OF_A_PROMPT)
            prompt = int(self.rng.integers(min(lengths) // 4, min(lengths) // 2 + 1)) + 1
            out.append(
                {
                    "prompt": self.tokens(prompt),
                    "responses": [self.tokens(length - prompt) for length in lengths],
                    "rewards": self.rng.normal(size=SAMPLES_OF_A_PROMPT).tolist(),
                }
            )
        return out


def num_tokens(batch: Any) -> int:
    """Count the tokens of a batch's sequences; a prompt counts with each of its responses."""
    total = 0
    for row in batch:
        if isinstance(row, dict):
            responses = row["responses"] if "responses" in row else [row["chosen"], row["rejected"]]
            total += sum(len(row["prompt"]) + len(response) for response in responses)
        else:
            total += len(row)
    return total
