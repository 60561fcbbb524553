"""Estimated time and memory of a training, for ``gradwire train --dry-run``."""

from __future__ import annotations

from dataclasses import dataclass

import gradwire
from gradwire.cli.text import size

MOMENT_BYTES = {"adamw": 8, "adamw8bit": 2, "sgd": 4, "muon": 4}
"""Bytes of optimizer state per trained weight."""


@dataclass
class Estimate:
    """Estimated time and memory of a training.

    Attributes:
        rows, tokens, steps: Sizes of the training; tokens through the model, extrapolated from the first batches.
        parameters: Number of the model's parameters, and how many of them are trained.
        memory_bytes: Weights, gradients and optimizer; activations come on top.
        seconds: Extrapolated from one step, evaluations included.
    """

    rows: int
    tokens: int
    steps: int
    parameters: tuple[int, int]
    memory_bytes: int
    seconds: float

    @staticmethod
    def of(
        optimizer: str, rows: int, tokens: int, steps: int, model: gradwire.ModelInfo, trained: int, seconds: float
    ) -> Estimate:
        """From what was measured; trained weights are held in float32, beside a narrower copy if the model has one."""
        width = 4 if model.dtype == "float32" else 2
        held = model.num_parameters * width + trained * (4 + MOMENT_BYTES[optimizer] + (4 if width == 2 else 0))
        return Estimate(rows, tokens, steps, (model.num_parameters, trained), held, seconds)

    def __str__(self) -> str:
        total, trained = self.parameters
        return (
            f"{self.rows:,} rows, about {self.tokens:,} tokens through the model, {self.steps:,} steps\n"
            f"{total:,} parameters, {trained:,} of them trained: {size(self.memory_bytes)} for weights, gradients and "
            "optimizer; activations come on top\n"
            f"about {self._duration()}, by the time of one step"
        )

    def _duration(self) -> str:
        if self.seconds < 100:
            return f"{self.seconds:.0f} seconds"
        return f"{self.seconds / 60:.0f} minutes" if self.seconds < 6000 else f"{self.seconds / 3600:.1f} hours"
