"""What carrying out an operation gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2

Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Outcome:
    """The ``kind`` of an ``OperationResult`` set, and its tensors."""

    result: training_pb2.OperationResult
    columns: Columns = field(default_factory=dict)
