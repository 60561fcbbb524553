"""The memory limits of an operation in its result, from which the journal repeats it within the same."""

from __future__ import annotations

import logging

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun

logger = logging.getLogger(__name__)


def record(result: training_pb2.LossResult, run: EngineRun, budget: Budget) -> None:
    """Write into a result within which limits its operation was executed.

    The log says so once for each run whose activations are not all kept.
    """
    result.limits.CopyFrom(to_wire(budget))
    chosen = {label for label in result.activations if label != Activations.KEEP.label}
    if chosen - run.told_activations:
        run.told_activations |= chosen
        logger.info(
            "run %s: activations of micro-batches above %d tokens: %s", run.run_id, budget.kept_tokens,
            ", ".join(sorted(chosen)),
        )  # fmt: skip


def to_wire(budget: Budget) -> training_pb2.MemoryLimits:
    """The limits as the wire has them."""
    return training_pb2.MemoryLimits(
        microbatch_tokens=budget.microbatch_tokens,
        activation_bytes=budget.activation_bytes,
        logits_elements=budget.logits_elements,
        kept_logits=budget.kept_logits,
        kept_tokens=budget.kept_tokens,
        recompute=Activations.RECOMPUTE in budget.beyond,
        whole_tokens=budget.whole_tokens,
        offload=Activations.OFFLOAD in budget.beyond,
        image_cost=budget.image_cost,
        lanes=budget.lanes,
    )


def from_wire(limits: training_pb2.MemoryLimits) -> Budget:
    """The limits that :func:`to_wire` wrote."""
    recompute = Activations.RECOMPUTE if limits.recompute else Activations.KEEP
    offload = Activations.OFFLOAD if limits.offload else Activations.KEEP
    return Budget(
        limits.microbatch_tokens,
        limits.activation_bytes,
        limits.logits_elements,
        limits.kept_logits,
        limits.kept_tokens,
        recompute | offload,
        limits.whole_tokens,
        limits.image_cost,
        max(1, limits.lanes),
    )
