"""Where the numbers of a training go: a JSONL file always, and what else is asked for."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gradwire.rl.extras import require


class MetricLogger(Protocol):
    """Takes the numbers of an iteration."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON object a line: ``iteration``, ``time`` (Unix) and the metrics; what is not finite is null.

    Args:
        path: the file; made with its folder at the first line, and appended to.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, "time": time.time(), **finite}) + "\n")

    def close(self) -> None:
        """Each line is written as it comes."""


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a JSONL file; a torn last line is left out."""
    lines = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


class TensorBoardLogger:
    """Scalars for TensorBoard; needs ``tensorboard``, not torch."""

    def __init__(self, folder: Path | str) -> None:
        self._writer = require("tensorboard.summary", "tensorboard", "TensorBoardLogger").Writer(str(folder))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _RunLogger:
    """wandb, and trackio, which has its face."""

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        self._module = module
        module.init(**options)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=iteration)

    def close(self) -> None:
        self._module.finish()


class WandbLogger(_RunLogger):
    """Weights & Biases; the options are ``wandb.init``'s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(require("wandb", "wandb", "WandbLogger"), options)


class TrackioLogger(_RunLogger):
    """Trackio; the options are ``trackio.init``'s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(require("trackio", "trackio", "TrackioLogger"), options)
