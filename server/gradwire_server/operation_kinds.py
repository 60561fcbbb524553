"""The kinds of operation and what front and engine must know of each: one row a kind.

A new operation is a message in ``training.proto``, a row here, and a handler in ``engine/operations/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb


@dataclass(frozen=True)
class OperationKind:
    """What is true of every operation of one kind.

    Attributes:
        name: the field of ``Operation.kind`` that holds its message.
        changes_state: whether a replay must repeat it. A sample without a seed does as well: see :func:`is_replayed`.
        barrier: whether no other operation of its run may be in the engine together with it.
        writes_files: whether it leaves files in the state folder, so that it may begin only once it is journaled.
        divisible: whether it may be repeated in smaller pieces when memory runs out.
        swaps_generators: whether it reads or replaces the state of the run's random generators itself.
        groupable: whether operations of this kind of several runs may be computed together.
        gives_checkpoint: whether its result names a checkpoint that is kept from then on.
        keeps_graph: whether a state in memory outlives it that no checkpoint holds.
        ends_accumulation: whether the next accumulation starts from zero, whatever becomes of the operation.
    """

    name: str
    changes_state: bool = False
    barrier: bool = False
    writes_files: bool = False
    divisible: bool = False
    swaps_generators: bool = False
    groupable: bool = False
    gives_checkpoint: bool = False
    keeps_graph: bool = False
    ends_accumulation: bool = False


KINDS: Mapping[str, OperationKind] = {
    kind.name: kind
    for kind in (
        OperationKind("forward_backward", changes_state=True, divisible=True, groupable=True),
        OperationKind("forward", divisible=True),
        OperationKind("kept_forward", changes_state=True, divisible=True, keeps_graph=True),
        OperationKind("backward", changes_state=True),
        OperationKind("optim_step", changes_state=True, ends_accumulation=True),
        OperationKind("zero_grad", changes_state=True, ends_accumulation=True),
        OperationKind("sample"),
        OperationKind("save_checkpoint", barrier=True, writes_files=True, swaps_generators=True, gives_checkpoint=True),
        OperationKind("load_checkpoint", changes_state=True, barrier=True, swaps_generators=True),
        OperationKind("update_reference", changes_state=True),
        OperationKind("export", writes_files=True),
    )
}
"""Every kind that the server knows, by name."""

UNKNOWN = OperationKind("")
"""Of an operation that a newer client sent."""


def kind_of(operation: pb.Operation) -> OperationKind:
    """The row of an operation; ``UNKNOWN`` for one without a kind that this server knows."""
    return KINDS.get(operation.WhichOneof("kind") or "", UNKNOWN)


def is_replayed(operation: pb.Operation) -> bool:
    """Whether a recovery must repeat the operation once it has succeeded.

    A sample without a seed of its own moves the run's generator, so it counts as well.
    """
    kind = kind_of(operation)
    return kind.changes_state or (kind.name == "sample" and not operation.sample.HasField("seed"))
