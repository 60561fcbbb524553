"""The table of operation kinds: one row per kind, with the properties that the front and the engine act on.

A new operation is a message in ``training.proto``, a row here, and a handler in ``engine/operations/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb


@dataclass(frozen=True)
class OperationKind:
    """Properties of every operation of one kind.

    Attributes:
        name: Name of the field of ``Operation.kind`` that holds its message.
        changes_state: Whether a replay must repeat it.
        barrier: Whether no other operation of its run may be in the engine at the same time.
        writes_files: Whether it writes files into the state folder, under the ``name`` of its message, so that it may
            start only once it is journaled.
        stoppable: Whether it can be stopped while it is executed, between micro-batches or tokens.
        divisible: Whether it may be retried in smaller pieces when memory runs out.
        swaps_generators: Whether it reads or replaces the state of the run's random generators itself.
        gives_checkpoint: Whether its result names a new checkpoint of the run.
        loads_checkpoint: Whether it brings the run into the state of the checkpoint that it names.
        keeps_graph: Whether it leaves state in memory that no checkpoint contains.
        ends_accumulation: Whether the next gradient accumulation starts from zero, whatever the operation's result.
        loss: Gets the loss or the scores that it asks for; None if it evaluates no batch by a call of a loss.
        step: Gets the optimizer step that it is or ends with; None if it takes none.
        samples: Whether it generates tokens from prompts.
    """

    name: str
    changes_state: bool = False
    barrier: bool = False
    writes_files: bool = False
    stoppable: bool = False
    divisible: bool = False
    swaps_generators: bool = False
    gives_checkpoint: bool = False
    loads_checkpoint: bool = False
    keeps_graph: bool = False
    ends_accumulation: bool = False
    loss: Callable[[pb.Operation], pb.LossCall] | None = None
    step: Callable[[pb.Operation], pb.OptimStep] | None = None
    samples: bool = False

    @property
    def steps(self) -> bool:
        """Whether it takes an optimizer step; where it is aborted, what follows is not."""
        return self.step is not None

    @property
    def only_steps(self) -> bool:
        """Whether it is an optimizer step and nothing else."""
        return self.step is not None and self.loss is None


KINDS: Mapping[str, OperationKind] = {
    kind.name: kind
    for kind in (
        OperationKind(
            "forward_backward",
            changes_state=True,
            stoppable=True,
            divisible=True,
            loss=lambda operation: operation.forward_backward,
        ),
        OperationKind("forward", stoppable=True, divisible=True, loss=lambda operation: operation.forward),
        OperationKind("kept_forward", changes_state=True, stoppable=True, divisible=True, keeps_graph=True),
        OperationKind("backward", changes_state=True),
        OperationKind(
            "optim_step", changes_state=True, ends_accumulation=True, step=lambda operation: operation.optim_step
        ),
        OperationKind(
            "train_step",
            changes_state=True,
            stoppable=True,
            divisible=True,
            ends_accumulation=True,
            loss=lambda operation: operation.train_step.loss,
            step=lambda operation: operation.train_step.optim_step,
        ),
        OperationKind("zero_grad", changes_state=True, ends_accumulation=True),
        OperationKind("sample", stoppable=True, samples=True),
        OperationKind("save_checkpoint", barrier=True, writes_files=True, swaps_generators=True, gives_checkpoint=True),
        OperationKind(
            "load_checkpoint", changes_state=True, barrier=True, swaps_generators=True, loads_checkpoint=True
        ),
        OperationKind("update_reference", changes_state=True),
        OperationKind("export", writes_files=True),
    )
}
"""Every known kind, by name."""

UNKNOWN = OperationKind("")
"""The row of an operation from a newer client, whose kind this server does not know."""


def kind_of(operation: pb.Operation) -> OperationKind:
    """The row of an operation; ``UNKNOWN`` for one without a kind that this server knows."""
    return KINDS.get(operation.WhichOneof("kind") or "", UNKNOWN)


def loss_call(operation: pb.Operation) -> pb.LossCall | None:
    """The loss or the scores that an operation asks for; None for one that evaluates no batch by a call of a loss."""
    get = kind_of(operation).loss
    return None if get is None else get(operation)


def training_call(operation: pb.Operation) -> pb.LossCall | None:
    """The loss whose gradient an operation accumulates; None for one that accumulates none, or the client's own."""
    return loss_call(operation) if kind_of(operation).changes_state else None


def is_part(operation: pb.Operation) -> bool:
    """Whether an operation brings a part of a batch, which waits for the last one."""
    return operation.HasField("forward_backward") and operation.forward_backward.accumulate


def ends_parts(operation: pb.Operation, status: pb.Status.ValueType) -> bool:
    """Whether no part of a batch waits any more behind an operation with this status."""
    kind = kind_of(operation)
    trained = training_call(operation) is not None and not is_part(operation) and status == pb.STATUS_SUCCEEDED
    return trained or kind.ends_accumulation or (kind.loads_checkpoint and status == pb.STATUS_SUCCEEDED)


def step_call(operation: pb.Operation) -> pb.OptimStep | None:
    """The optimizer step that an operation is or ends with; None for one that takes none."""
    get = kind_of(operation).step
    return None if get is None else get(operation)


def has_loss(result: pb.OperationResult) -> bool:
    """Whether a result holds that of a loss or of scores."""
    return result.HasField("loss") or result.HasField("train_step")


def has_step(result: pb.OperationResult) -> bool:
    """Whether a result holds that of an optimizer step."""
    return result.HasField("optim_step") or result.HasField("train_step")


def loss_result(result: pb.OperationResult) -> pb.LossResult:
    """The result of an operation's loss; empty for one without."""
    return result.train_step.loss if result.HasField("train_step") else result.loss


def step_result(result: pb.OperationResult) -> pb.OptimStepResult:
    """The result of an operation's optimizer step; empty for one without."""
    return result.train_step.optim_step if result.HasField("train_step") else result.optim_step
