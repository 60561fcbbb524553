"""The engine's parts, as passed to the handlers of operations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.tokenizers import TextTokenizer, load_tokenizer
from gradwire_server.engine.operations.decisions import Decisions
from gradwire_server.engine.sampling.samplers.sampler import Sampler
from gradwire_server.engine.scoring.memory import Memory
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.checkpoints import CheckpointStore
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.references import References
from gradwire_server.engine.state.residency import Residency
from gradwire_server.engine.state.run_memory import light_bytes
from gradwire_server.observability.tracing import Tracing

logger = logging.getLogger(__name__)


@dataclass
class EngineContext:
    """The engine's parts.

    Attributes:
        tokenizer_files: Model name -> tokenizer file; models without a tokenizer are missing.
        shares_prefixes: Whether known prompts' beginnings of base models serve all API keys.
        runs: Every run in the engine, by id.
        budget: Budget of the operation being executed.
    """

    pool: ModelPool
    store: CheckpointStore
    references: References
    sampler: Sampler[Any]
    memory: Memory
    tracing: Tracing
    tokenizer_files: dict[str, Path]
    residency: Residency
    agreement: Agreement
    shares_prefixes: bool = False
    runs: dict[str, EngineRun] = field(default_factory=dict)
    decisions: Decisions = field(init=False)
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.decisions = Decisions(
            self.memory, self.runs, self.agreement, self.sampler.make_room, partial(light_bytes, self.pool)
        )
        self.budget = self.memory.most

    def held(self, run_id: str) -> EngineRun:
        """A run in the engine."""
        if run_id not in self.runs:
            raise OperationError(training_pb2.ERROR_CODE_UNKNOWN_RUN, f"the engine holds no run {run_id!r}")
        return self.runs[run_id]

    @contextmanager
    def within(self, budget: Budget) -> Iterator[None]:
        """Execute the body within these limits."""
        before, self.budget = self.budget, budget
        try:
            yield
        finally:
            self.budget = before

    @property
    def groups_runs(self) -> bool:
        """Whether operations of several runs are computed together."""
        return self.decisions.group_tokens > 0

    def tokenizer(self, model: str, *, needed: bool = True) -> TextTokenizer | None:
        """The tokenizer of a model; None if it has none.

        Args:
            needed: Whether a tokenizer that cannot be read is an error; else it is logged, and None.

        Raises:
            OperationError: UNSUPPORTED; names model and file.
        """
        file = self.tokenizer_files.get(model)
        try:
            return load_tokenizer(file) if file else None
        except OperationError as error:
            message = f"model {model!r}: {error.message}"
            if needed:
                raise OperationError(error.code, message, field=error.field) from error
            logger.warning("%s; samples have no texts", message)
            return None
