"""The operations of a run's record as columns of numbers, for ``HistoryPage``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from gradwire_proto.v1 import training_pb2 as pb

OPTIONAL = ("loss", "learning_rate", "grad_norm")
TEXTS = ("operation", "loss_fn", "run_id")
ALWAYS = ("step", "tokens", "seconds", "time", "seq", *TEXTS)
METRIC = "metrics."
_always = attrgetter(*ALWAYS)  # in one call, which takes half the time


def to_columns(points: Sequence[pb.HistoryPoint]) -> pb.HistoryColumns:
    """Convert operations to the columns that ``History.from_wire`` of the client reads."""
    columns: dict[str, Sequence[Any]] = dict.fromkeys(ALWAYS, ())
    columns |= zip(ALWAYS, zip(*map(_always, points)))
    numbers: dict[str, int] = {}
    for name in TEXTS:
        columns[name] = [numbers.setdefault(text, len(numbers)) for text in columns[name]]
    for name in OPTIONAL:
        columns[name] = [getattr(one, name) if one.HasField(name) else math.nan for one in points]  # type: ignore[arg-type]
    metrics: dict[str, list[float]] = {}
    for index, one in enumerate(points):
        measured = one.metrics
        for name in measured:
            if name not in metrics:
                metrics[name] = [math.nan] * len(points)
            metrics[name][index] = measured[name]
    columns |= {METRIC + name: values for name, values in metrics.items()}
    values = np.array(list(columns.values()), "<f8")
    return pb.HistoryColumns(names=list(columns), texts=list(numbers), values=values.tobytes())
