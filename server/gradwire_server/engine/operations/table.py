"""The handler of each kind of operation, and the execution of one operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from gradwire_proto.v1 import engine_pb2

from gradwire_server.engine.errors import invalid, panics_as_errors
from gradwire_server.engine.interruption import between_micro_batches, interruptible
from gradwire_server.engine.operations import batches, checkpoints, limits, steps, train_steps
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.lifecycle import Answer, Execution
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.operation_kinds import kind_of, loss_result

Handler = Callable[[EngineContext, EngineRun, int, Any, Columns], Outcome]
"""Executes one operation, given the engine's parts, the run, the operation's number, its message and its tensors."""

HANDLERS: Mapping[str, Handler] = {
    "forward_backward": batches.forward_backward,
    "forward": batches.forward,
    "kept_forward": batches.kept_forward,
    "backward": batches.backward,
    "optim_step": steps.optim_step,
    "train_step": train_steps.train_step,
    "zero_grad": steps.zero_grad,
    "save_checkpoint": checkpoints.save_checkpoint,
    "load_checkpoint": checkpoints.load_checkpoint,
    "update_reference": steps.update_reference,
    "export": checkpoints.export,
}
"""Handlers by kind, except samples, which are generated one token at a time: see :mod:`.samples_in_progress`."""


def carry_out(context: EngineContext, request: engine_pb2.EngineRequest, columns: Columns, budget: Budget) -> Answer:
    """Execute a begun operation of a run. One that raises leaves the run's state unchanged.

    Args:
        budget: Memory limits of a divisible operation. If memory runs out all the same, it is repeated within the
            limits decided then.

    Raises:
        OperationError: The engine does not hold the run.
        torch.AcceleratorError: The device is lost, and the process with it.
    """
    asked = request.operation
    execution = Execution(context, asked)
    try:
        with execution.span(), panics_as_errors(), interruptible(partial(context.agreement.check, request)):
            between_micro_batches()
            outcome = _handled(context, execution.run, asked, columns, budget)
    except Exception as error:  # the boundary: the error becomes the operation's result
        return execution.failed(error)
    return execution.succeeded(outcome)


def _handled(
    context: EngineContext, run: EngineRun, asked: engine_pb2.EngineOperation, columns: Columns, budget: Budget
) -> Outcome:
    operation = asked.operation
    kind = kind_of(operation)
    if kind.name not in HANDLERS:
        raise invalid("this server does not know this kind of operation; it may be older than the client", "kind")
    handler, call = HANDLERS[kind.name], getattr(operation, kind.name)
    if kind.swaps_generators:
        return handler(context, run, asked.seq, call, columns)

    def attempt(budget: Budget) -> Outcome:
        with context.within(budget), run.rng():
            return handler(context, run, asked.seq, call, columns)

    if not kind.divisible:
        return attempt(budget)
    while (outcome := context.agreement.unless_out_of_memory(partial(attempt, budget))) is None:
        smaller = context.decisions.after_out_of_memory(run, columns, budget)
        if smaller is None:
            raise torch.OutOfMemoryError("the longest row does not fit into memory")
        budget = smaller
    if kind.changes_state:
        limits.record(loss_result(outcome.result), run, budget)
    return outcome
