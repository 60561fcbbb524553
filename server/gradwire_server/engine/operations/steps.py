"""Operations on a run's accumulation and weights: ``optim_step``, ``zero_grad``, ``update_reference``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.lifecycle import Execution
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.threads import STEP_TOKENS, suited_threads
from gradwire_server.engine.training.optimizer import StepOutcome
from gradwire_server.engine.training.optimizer_step import RunStep, take_steps

LEARNING_RATE, RL_LEARNING_RATE = 1e-4, 1e-5
"""Learning rates of steps without one, for runs in general and for reinforcement learning."""
COMPARED_STEPS = 8
"""The ranks' copies of a run's weights are compared each time after so many steps."""


def for_rl(config: training_pb2.RunConfig) -> bool:
    """Whether a run was created for reinforcement learning."""
    return config.kind == "rl" or config.head == "value"


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
    settings = [_settings(each.run, each.step) for each in executions if each.step is not None]
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


def _settings(run: EngineRun, call: training_pb2.OptimStep) -> training_pb2.OptimStep:
    """The settings of a step, with the learning rate of one that has none."""
    if not call.default_learning_rate:
        return call
    settings = training_pb2.OptimStep()
    settings.CopyFrom(call)
    settings.learning_rate = RL_LEARNING_RATE if for_rl(run.config) else LEARNING_RATE
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
