"""An algorithm's own state, beside the server's checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AlgorithmState:
    """How far an algorithm is.

    Attributes:
        iteration: how many are done.
        best_success: the best share of successes in an evaluation.
        checkpoint: the server's, ``"RUN_ID/NAME"``.
        version: optimizer steps taken.
        curriculum: its state.
    """

    iteration: int = 0
    best_success: float = -1.0
    checkpoint: str = ""
    version: int = 0
    curriculum: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Replaces the file at once, so that a crash leaves the old one or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        with aside.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)

    @staticmethod
    def read(path: Path) -> AlgorithmState:
        return AlgorithmState(**json.loads(path.read_text(encoding="utf-8")))
