"""The table of a training's metrics, as OpenAI's result files have it: a line a step."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from gradwire import JobEvent

CLOCK = re.compile("time|second")
"""Names of metrics that depend on the clock, which stay out."""
COLUMNS = {
    "train_loss": "train/loss", "train_accuracy": "train/token_accuracy", "valid_loss": "eval/loss",
    "valid_mean_token_accuracy": "eval/token_accuracy",
}  # fmt: skip
"""OpenAI's columns, which come first -> our metrics; ours follow under their own names."""


def write_results(events: Sequence[JobEvent], path: Path) -> Path:
    """Write the metrics of a job's events as CSV."""
    steps = sorted((event for event in events if event.type == "metrics"), key=lambda event: event.step)
    ours = sorted({name for event in steps for name in event.data if not CLOCK.search(name)})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *COLUMNS, *ours])
        for event in steps:
            values = [event.data.get(name, "") for name in (*COLUMNS.values(), *ours)]
            writer.writerow([event.step, *values])
    return path
