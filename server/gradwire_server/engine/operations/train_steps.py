"""``forward_backward``, and ``train_step``, which ends with an ``optim_step``, of one run or of several at once.

Several LoRA runs on one base model share a forward and a backward of the trunk, and the update of their steps. Each
gets the result that it gets alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal, is_out_of_memory
from gradwire_server.engine.operations import batches, steps
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.lifecycle import Execution
from gradwire_server.engine.operations.reading import hold, refuse_part
from gradwire_server.engine.operations.request import Outcome
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training import forward_backward as training_pass
from gradwire_server.engine.training.forward_backward import Training, can_join, fits
from gradwire_server.engine.training.optimizer import check_settings
from gradwire_server.operation_kinds import training_call


def train(
    context: EngineContext, executions: Sequence[Execution], group_tokens: int
) -> list[Outcome | Exception | None]:
    """Compute losses, add their gradients to the runs' accumulations, and take the steps that operations end with.

    A part of a batch waits for the last part.

    Args:
        executions: One operation, or several of different runs.
        group_tokens: Maximum tokens of several at once.

    Returns:
        For each its outcome, or its step's error; in company None for one that is to be repeated alone, of which
        nothing is accumulated.

    Raises:
        Exception: Any other error; nothing is accumulated then.
    """
    alone = len(executions) == 1
    if alone and _loss(executions[0]).accumulate and executions[0].step is None:
        return [hold(executions[0].run, _loss(executions[0]), executions[0].request.columns)]
    trainings = _prepared(context, executions, group_tokens)
    outcomes: dict[Execution, Outcome | Exception] = {}
    if alone or len(trainings) > 1:
        outcomes |= _evaluated(trainings)
    stepping = [execution for execution in outcomes if execution.step is not None]
    for execution, step in zip(stepping, steps.optim_steps(context, stepping, group_tokens), strict=True):
        computed = outcomes[execution]
        assert isinstance(computed, Outcome)
        outcomes[execution] = _step_error(step) if isinstance(step, Exception) else _with_step(computed, step)
    return [outcomes.get(execution) for execution in executions]


def _prepared(
    context: EngineContext, executions: Sequence[Execution], group_tokens: int
) -> Mapping[Execution, Training]:
    """What is to be computed for an operation alone, or for those of several that can be computed at once."""
    alone = len(executions) == 1
    trainings: dict[Execution, Training] = {}
    for execution in executions:
        try:
            with nullcontext() if alone else execution.within():
                if execution.step is not None:
                    check_settings(execution.step)  # before a gradient is computed that no step could take
                    refuse_part(_loss(execution))
                training = batches.prepare(context, execution.run, _loss(execution), execution.request.columns)
        except Exception as error:  # whatever it is, repeating the operation alone raises it again
            if alone or is_fatal(error):
                raise
            continue
        if not alone:
            training.loss.rng = partial(_rng, execution.run)
        if alone or (not execution.head_was_added and _joins([*trainings.values(), training], execution, group_tokens)):
            trainings[execution] = training
    return trainings


def _joins(trainings: Sequence[Training], execution: Execution, group_tokens: int) -> bool:
    """Whether the last of these, which is the execution's, may join the others."""
    most_tokens = min(group_tokens, *(training.budget.microbatch_tokens for training in trainings))
    return can_join(trainings[-1]) and fits(trainings, most_tokens)


def _evaluated(trainings: Mapping[Execution, Training]) -> dict[Execution, Outcome]:
    """Accumulate the gradients of losses; in company those that fail are missing."""
    try:
        evaluations = training_pass.forward_backward(list(trainings.values()))
    except OperationError as error:
        ((execution, training),) = trainings.items()  # in company none is raised
        if error.code != training_pb2.ERROR_CODE_NON_FINITE or not _loss(execution).skip_nonfinite:
            raise
        return {execution: batches.left_out(execution.run, training, error)}
    outcomes = {}
    for (execution, training), evaluation in zip(trainings.items(), evaluations, strict=True):
        if evaluation is not None:
            outcome = outcomes[execution] = batches.trained(execution.run, training, evaluation)
            if len(trainings) > 1:
                outcome.result.loss.grouped_runs = len(trainings)
    return outcomes


def _rng(run: EngineRun, part: int) -> AbstractContextManager[None]:
    return run.rng()


def _loss(execution: Execution) -> training_pb2.LossCall:
    call = training_call(execution.operation)
    assert call is not None  # the kinds of this module have one
    return call


def _step_error(error: Exception) -> Exception:
    """The error of a ``train_step`` whose step raised one.

    It is no ``MemoryError``: the gradient is there, so that no smaller micro-batch would help, and a second attempt
    would accumulate it twice.
    """
    if not is_out_of_memory(error):
        return error
    return OperationError(
        training_pb2.ERROR_CODE_OUT_OF_MEMORY,
        "the server ran out of memory in the optimizer's step; weights and moments are as they were",
    )


def _with_step(computed: Outcome, step: Outcome) -> Outcome:
    """The outcome of a ``train_step``, of those of its halves."""
    result = training_pb2.TrainStepResult(loss=computed.result.loss, optim_step=step.result.optim_step)
    return Outcome(training_pb2.OperationResult(train_step=result), computed.columns)
