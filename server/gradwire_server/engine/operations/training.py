"""Operations that train: ``forward_backward``, ``optim_step``, ``train_step``, ``zero_grad`` and ``update_reference``.

Several LoRA runs on one base model share a forward and a backward of the trunk, and the update of their steps. Each
gets the result that it gets alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from gradwire_proto import rates
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal, is_out_of_memory, tried
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.lifecycle import Execution
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.operations.scores import loss_outcome
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.step import Step, commit, commit_nothing, fit, head_added, hold, pass_over, resolve
from gradwire_server.engine.threads import STEP_TOKENS, suited_threads
from gradwire_server.engine.training.columns import refuse_part
from gradwire_server.engine.training.optimizer import StepOutcome, check_settings
from gradwire_server.engine.training.optimizer_step import RunStep, take_steps
from gradwire_server.operation_kinds import training_call

COMPARED_STEPS = 8
"""The ranks' copies of a run's weights are compared each time after so many steps."""


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
    alone, first = len(executions) == 1, executions[0]
    if alone and _call(first).accumulate and first.step is None:
        warnings = hold(first.run, _call(first), first.request.columns)
        return [Outcome(training_pb2.OperationResult(loss=training_pb2.LossResult(warnings=warnings)))]
    resolved = _resolved(context, executions, group_tokens)
    if not alone and len(resolved) < 2:
        return [None] * len(executions)
    with head_added(first.run, resolved[first]) if alone else nullcontext():
        outcomes: dict[Execution, Outcome | Exception] = {**_committed(resolved)}
        stepping = [execution for execution in outcomes if execution.step is not None]
        for execution, step in zip(stepping, optim_steps(context, stepping, group_tokens), strict=True):
            computed = outcomes[execution]
            assert isinstance(computed, Outcome)
            if isinstance(step, Exception) and alone:
                raise _step_error(step)
            outcomes[execution] = _step_error(step) if isinstance(step, Exception) else _with_step(computed, step)
    return [outcomes.get(execution) for execution in executions]


def _resolved(context: EngineContext, executions: Sequence[Execution], group_tokens: int) -> Mapping[Execution, Step]:
    """The step of an operation alone, or those of several that can be computed at once."""
    alone = len(executions) == 1
    resolved: dict[Execution, Step] = {}

    def resolve_one(execution: Execution) -> Step:
        with nullcontext() if alone else execution.within():
            call, columns = _call(execution), execution.request.columns
            if execution.step is not None:
                check_settings(execution.step)  # before a gradient is computed that no step could take
                refuse_part(call)
            return resolve(
                execution.run, call, columns, references=context.references, budget=context.budget,
                agreement=context.agreement,
            )  # fmt: skip

    for execution in executions:
        step = tried(partial(resolve_one, execution), alone=alone)
        if step is None:
            continue
        if not alone:
            step.rng = partial(_rng, execution.run)
            others = [*resolved.values(), step]
            most_tokens = min(group_tokens, *(each.scoring.budget.microbatch_tokens for each in others))
            if not (step.can_join and fit(others, most_tokens)):
                continue
        resolved[execution] = step
    return resolved


def _committed(resolved: Mapping[Execution, Step]) -> dict[Execution, Outcome]:
    """Pass over steps, and keep what they give; in company those that fail are missing."""
    alone = len(resolved) == 1
    try:
        passes = pass_over(list(resolved.values()))
    except OperationError as error:
        ((execution, step),) = resolved.items()  # in company none is raised
        if error.code != training_pb2.ERROR_CODE_NON_FINITE or not _call(execution).skip_nonfinite:
            raise
        return {execution: _outcome(execution.run, step, loss_outcome(commit_nothing(execution.run, step, error)))}
    outcomes = {}
    for (execution, step), passed in zip(resolved.items(), passes, strict=True):
        if passed is None:
            continue
        report = tried(partial(commit, execution.run, step, passed), alone=alone)
        if report is not None:
            outcome = outcomes[execution] = _outcome(execution.run, step, loss_outcome(report))
            if not alone:
                outcome.result.loss.grouped_runs = len(resolved)
    return outcomes


def _outcome(run: EngineRun, step: Step, outcome: Outcome) -> Outcome:
    """The outcome of a loss, which tells of the value head that its step added."""
    if step.adds_head:
        result = outcome.result.loss
        result.added_head.kind = run.config.head
        result.added_head.num_trainable_parameters = run.policy.num_trainable_parameters
        result.warnings.insert(
            0,
            "the run had no value head and was given one. It starts at zero, so that advantages are returns until it "
            "has learned, and stays with the run; optim_step without a learning rate takes a policy's from now on. "
            "With values or advantages in the batch none is needed",
        )
    return outcome


def _rng(run: EngineRun, part: int) -> AbstractContextManager[None]:
    return run.rng()


def _call(execution: Execution) -> training_pb2.LossCall:
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


def optim_steps(
    context: EngineContext, executions: Sequence[Execution], group_tokens: int
) -> list[Outcome | Exception]:
    """Divide the accumulated gradients by their counts, clip the result, and take one optimizer step.

    The accumulation is cleared even if the step fails.

    Args:
        executions: Operations of one or several runs that are steps, or end with one.
        group_tokens: Unused: steps have no tokens.

    Returns:
        For each its outcome, or the error that it has alone.
    """
    done: dict[Execution, Outcome | Exception] = {}
    for execution in executions:
        try:
            context.agreement.check(execution.request.message)  # the last moment to cancel it
        except OperationError as error:
            done[execution] = error
    ready = [execution for execution in executions if execution not in done]
    try:
        done |= zip(ready, _taken_steps(context, ready), strict=True)
    except Exception as error:  # it concerns all of them
        if is_fatal(error):
            raise
        done |= dict.fromkeys(ready, error)
    return [done[execution] for execution in executions]


def _taken_steps(context: EngineContext, executions: Sequence[Execution]) -> list[Outcome | Exception]:
    if not executions:
        return []
    runs = [execution.run for execution in executions]
    settings = [_settings(context, each.run, each.step) for each in executions if each.step is not None]
    sizes = sum(run.policy.num_trainable_parameters for run in runs)
    with (
        context.tracing.span("gradwire.optimizer.step") if len(runs) == 1 else nullcontext(),
        suited_threads(context.pool.device, STEP_TOKENS, sizes),
    ):
        done = take_steps(
            [RunStep(run.optimizer, run.accumulator, own) for run, own in zip(runs, settings, strict=True)]
        )
    return [
        each if isinstance(each, Exception) else _taken(context, run, own, each)
        for run, own, each in zip(runs, settings, done, strict=True)
    ]


def _settings(context: EngineContext, run: EngineRun, call: training_pb2.OptimStep) -> training_pb2.OptimStep:
    """The settings of a step, with the learning rate of one that has none."""
    if not call.default_learning_rate:
        return call
    settings = training_pb2.OptimStep()
    settings.CopyFrom(call)
    config = run.config
    settings.learning_rate = rates.learning_rate(
        rates.learned_by(kind=config.kind, head=config.head),
        context.pool.facts(config.base_model).hidden_size,
        adapter=config.HasField("lora"),
    )
    return settings


def _taken(context: EngineContext, run: EngineRun, settings: training_pb2.OptimStep, done: StepOutcome) -> Outcome:
    run.step += not done.skipped
    if run.step % COMPARED_STEPS == 0:
        context.agreement.alike(f"weights of {run.run_id}", run.digest)
    result = training_pb2.OptimStepResult(
        grad_norm=done.grad_norm,
        learning_rate=settings.learning_rate,
        step=run.step,
        skipped=done.skipped,
        num_accumulated=done.num_accumulated,
    )
    return Outcome(training_pb2.OperationResult(optim_step=result))


def zero_grad(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.ZeroGrad, columns: Columns
) -> Outcome:
    """Clear the gradients accumulated since the last step."""
    run.accumulator.clear()
    return Outcome(training_pb2.OperationResult(empty=training_pb2.Empty()))


def update_reference(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.UpdateReference, columns: Columns
) -> Outcome:
    """Update the moving average of the weights, which the name "ema" refers to."""
    if not 0 <= call.ema <= 1:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"ema is {call.ema}; it is the share of the old reference that stays, from 0 to 1",
            field="ema",
            rule="0 <= ema <= 1",
        )
    run.move_ema(call.ema)
    return Outcome(training_pb2.OperationResult(empty=training_pb2.Empty()))
