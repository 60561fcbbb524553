"""Search for the row with a value that is not finite, which waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from gradwire_losses.batch import Batch, segment_ids
from gradwire_losses.outputs import LossOutput
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.scoring.score_types import SEQUENCE_SCORES


def check_finite(batch: Batch, values: Mapping[str, Tensor], rows: Tensor, what: str) -> None:
    """Check that all entries are finite.

    Args:
        values: Score name -> entries shaped like that score.
        rows: ``[b]`` rows in the caller's batch of this batch's examples.
        what: Beginning of the error message, which the score's name follows.

    Raises:
        OperationError: NON_FINITE, with the row of the first non-finite entry.
    """
    for name, entries in values.items():
        if not entries.is_floating_point() or bool(entries.isfinite().all()):
            continue
        first = int((~entries.isfinite()).nonzero()[0, 0])
        sequence = first if name in SEQUENCE_SCORES else int(segment_ids(batch.row_lengths)[first])
        row = int(rows[segment_ids(batch.group_sizes)[sequence]])
        raise OperationError(
            training_pb2.ERROR_CODE_NON_FINITE,
            f"{what} {name} in row {row}; nothing was accumulated and the weights are untouched",
            row=row,
            rule="finite",
        )


def non_finite_loss(
    name: str,
    batch: Batch,
    rows: Tensor,
    scores: Mapping[str, Tensor],
    loss: Callable[[Batch, Mapping[str, Tensor]], LossOutput],
) -> OperationError:
    """Make an error that names the first row whose own loss is not finite, or no row if only the total is not.

    Args:
        rows: See :func:`check_finite`.
        loss: Evaluates it on some of the batch, given these scores of it.
    """
    row = None
    scores = {name: values.cpu() for name, values in scores.items()}
    sequences = segment_ids(batch.group_sizes)
    for example in range(batch.num_examples):
        of_sequence = sequences == example
        of_token = of_sequence.repeat_interleave(batch.row_lengths)
        own = {score: values[of_sequence if score in SEQUENCE_SCORES else of_token] for score, values in scores.items()}
        with torch.no_grad():
            output = loss(batch.select(torch.tensor([example])), own)
        if not all(math.isfinite(term.sum.item()) for term in output.terms.values()):
            row = int(rows[example])
            break
    where = "" if row is None else f" in row {row}"
    return OperationError(
        training_pb2.ERROR_CODE_NON_FINITE,
        f"the loss {name} is not finite{where}; nothing was accumulated and the weights are untouched",
        row=row,
        rule="finite",
    )
