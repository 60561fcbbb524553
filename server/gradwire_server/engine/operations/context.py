"""What the handlers of operations work with: the engine's parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire_server.engine.model.pool import ModelPool
from gradwire_server.engine.model.tokenizers import TextTokenizer, load_tokenizer
from gradwire_server.engine.sampling.sampler import Sampler
from gradwire_server.engine.scoring.memory import Memory
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.checkpoints import CheckpointStore
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.references import References
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.observability.tracing import Tracing


@dataclass
class EngineContext:
    """The engine's parts.

    Attributes:
        pool: the models.
        store: checkpoints and exports on disk.
        references: reference models.
        sampler: generates samples.
        memory: how much an operation may hold.
        tracing: where the spans of operations go.
        tokenizer_files: tokenizer file by model name; models without a tokenizer are missing.
        runs: every run in the engine, by id.
        crash_marks: which requests have begun, in memory that outlives the process; None without a front.
        budget: of the operation that is being carried out.
    """

    pool: ModelPool
    store: CheckpointStore
    references: References
    sampler: Sampler[Any]
    memory: Memory
    tracing: Tracing
    tokenizer_files: dict[str, Path]
    runs: dict[str, EngineRun] = field(default_factory=dict)
    crash_marks: CrashMarks | None = None
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = self.memory.most

    def tokenizer(self, model: str) -> TextTokenizer | None:
        """The tokenizer of a model; None where it has none."""
        file = self.tokenizer_files.get(model)
        return load_tokenizer(file) if file else None
