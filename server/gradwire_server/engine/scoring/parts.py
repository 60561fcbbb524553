"""Parts of a batch that a loss is evaluated on: its micro-batches, one by one, or the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gradwire_losses.batch import Batch, beside
from torch import Tensor

from gradwire_server.engine.scoring.planner import MicroBatch
from gradwire_server.engine.scoring.score_types import SEQUENCE_SCORES, entries_of


@dataclass(frozen=True)
class Part:
    """Some or all examples of a batch.

    Attributes:
        batch: The examples as a batch.
        micros: Micro-batches that go through the model, with indices into ``batch``.
        whole: The part as a micro-batch with indices into the whole batch; None if it is the whole batch.
    """

    batch: Batch
    micros: Sequence[MicroBatch]
    whole: MicroBatch | None = None

    @classmethod
    def of(cls, batch: Batch, micro: MicroBatch) -> Part:
        """One micro-batch of a batch, which may be the whole batch."""
        if micro.batch is batch:
            return cls(batch, [micro])
        examples, sequences, tokens = (
            torch.arange(len(each)) for each in (micro.examples, micro.sequences, micro.tokens)
        )
        return cls(micro.batch, [replace(micro, examples=examples, sequences=sequences, tokens=tokens)], micro)

    @property
    def examples(self) -> Tensor | None:
        """``[b]`` rows in the whole batch; None if this is the whole batch."""
        return None if self.whole is None else self.whole.examples

    @property
    def tokens(self) -> Tensor | None:
        """``[t]`` scored tokens in the whole batch; None if this is the whole batch."""
        return None if self.whole is None else self.whole.tokens

    @property
    def rows(self) -> Tensor:
        """``[b]`` rows in the whole batch."""
        return torch.arange(self.batch.num_examples) if self.whole is None else self.whole.examples

    def place(self, whole: Batch, name: str, values: Tensor, into: dict[str, Tensor]) -> None:
        """Write this part's scores to their places among those of the whole batch."""
        if self.whole is None:
            into[name] = values
        else:
            if name not in into:
                count = whole.num_sequences if name in SEQUENCE_SCORES else whole.num_scored
                into[name] = values.new_zeros(count, *values.shape[1:])
            into[name][beside(entries_of(self.whole, name), values)] = values
