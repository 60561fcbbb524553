"""An algorithm's own state, stored beside the server's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.whole_files import replace_json


@dataclass(frozen=True)
class AlgorithmState:
    """The progress of an algorithm.

    Attributes:
        iteration: Number of finished iterations.
        best_success: The best success rate of an evaluation.
        checkpoint: The server's checkpoint, ``"RUN_ID/NAME"``.
        version: Number of optimizer steps.
        curriculum: State of the curriculum.
    """

    iteration: int = 0
    best_success: float = -1.0
    checkpoint: str = ""
    version: int = 0
    curriculum: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Replace the file atomically, so that a crash leaves the old or the new one."""
        replace_json(path, asdict(self))

    @staticmethod
    def read(path: Path) -> AlgorithmState:
        return AlgorithmState(**json.loads(path.read_text(encoding="utf-8")))
