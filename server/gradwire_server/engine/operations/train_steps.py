"""``train_step``: a ``forward_backward`` and the ``optim_step`` behind it as one operation."""

from __future__ import annotations

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_out_of_memory
from gradwire_server.engine.interruption import between_micro_batches
from gradwire_server.engine.operations import batches, steps
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.reading import refuse_part
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training.optimizer import check_settings


def train_step(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.TrainStep, columns: Columns
) -> Outcome:
    """Compute a loss, add its gradient to the run's accumulation, and take a step with all of it."""
    check_settings(call.optim_step)  # before a gradient is computed that no step could take
    refuse_part(call.loss)
    return stepped(context, run, seq, call, batches.forward_backward(context, run, seq, call.loss, columns))


def stepped(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.TrainStep, computed: Outcome
) -> Outcome:
    """Take the step of a ``train_step`` whose gradient is accumulated; the last moment to cancel it is here.

    Raises:
        OperationError: The step's error. Also where memory runs out: the gradient is there, so no smaller micro-batch
            would help, and a second attempt would accumulate it twice.
    """
    between_micro_batches()
    try:
        done = steps.optim_step(context, run, seq, call.optim_step, {})
    except Exception as error:
        raise step_error(error) from error
    return with_step(computed, done)


def step_error(error: Exception) -> Exception:
    """The error of a ``train_step`` whose optimizer step raised one; no ``MemoryError``, as above."""
    if not is_out_of_memory(error):
        return error
    return OperationError(
        training_pb2.ERROR_CODE_OUT_OF_MEMORY,
        "the server ran out of memory in the optimizer's step; weights and moments are as they were",
    )


def with_step(computed: Outcome, step: Outcome) -> Outcome:
    """The outcome of a ``train_step``, of those of its halves."""
    result = training_pb2.TrainStepResult(loss=computed.result.loss, optim_step=step.result.optim_step)
    return Outcome(training_pb2.OperationResult(train_step=result), computed.columns)
