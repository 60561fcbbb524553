"""What a loss is shown at a time: the whole batch, or one micro-batch of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gradwire_losses.batch import Batch, beside
from torch import Tensor

from gradwire_server.engine.scoring.planner import MicroBatch
from gradwire_server.engine.scoring.score_types import SEQUENCE_SCORES, entries_of


@dataclass(frozen=True)
class LossView:
    """Some examples of a batch, or all of them.

    Attributes:
        batch: the part as a batch of its own.
        micros: as which it goes through the model, with indices into ``batch``.
        whole: the one micro-batch that it is, with indices into the whole batch; None where it is the whole batch.
    """

    batch: Batch
    micros: list[MicroBatch]
    whole: MicroBatch | None = None

    @property
    def examples(self) -> Tensor | None:
        """``[b]`` rows in the whole batch, where the part is not that itself."""
        return None if self.whole is None else self.whole.examples

    @property
    def tokens(self) -> Tensor | None:
        """``[t]`` scored tokens in the whole batch, where the part is not that itself."""
        return None if self.whole is None else self.whole.tokens

    @property
    def rows(self) -> Tensor:
        """``[b]`` rows in the whole batch."""
        return torch.arange(self.batch.num_examples) if self.whole is None else self.whole.examples

    def place(self, whole: Batch, name: str, values: Tensor, into: dict[str, Tensor]) -> None:
        """Puts this part's scores where they belong in those of the whole batch."""
        if self.whole is None:
            into[name] = values
        else:
            if name not in into:
                count = whole.num_sequences if name in SEQUENCE_SCORES else whole.num_scored
                into[name] = values.new_zeros(count, *values.shape[1:])
            into[name][beside(entries_of(self.whole, name), values)] = values


def part_of(batch: Batch, micro: MicroBatch) -> LossView:
    """The part that one micro-batch of a batch is; the whole batch where it is all of it."""
    if micro.batch is batch:
        return LossView(batch, [micro])
    examples, sequences, tokens = (torch.arange(len(each)) for each in (micro.examples, micro.sequences, micro.tokens))
    own = replace(micro, examples=examples, sequences=sequences, tokens=tokens)
    return LossView(micro.batch, [own], micro)
