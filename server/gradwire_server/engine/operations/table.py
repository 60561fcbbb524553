"""The handler of each kind of operation, and the execution of operations: of one run, or of several at once."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from gradwire_server.engine.errors import invalid, panics_as_errors
from gradwire_server.engine.failures import is_fatal, to_error
from gradwire_server.engine.interruption import given_s, interruptible
from gradwire_server.engine.operations import checkpoints, limits, scores, training
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.lifecycle import Answer, Execution, answer_to, plain_answer
from gradwire_server.engine.operations.request import Columns, Outcome, Request
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.operation_kinds import KINDS, kind_of, loss_result

logger = logging.getLogger(__name__)

Handler = Callable[[EngineContext, EngineRun, int, Any, Columns], Outcome]
"""Executes one operation, given the engine's parts, the run, the operation's number, its message and its tensors."""
SharedHandler = Callable[[EngineContext, Sequence[Execution], int], Sequence[Outcome | Exception | None]]
"""Executes operations of one run or of several, within so many tokens at once.

It returns for each the outcome, an error that is final, or None if the operation is to be repeated alone. It raises
only while nothing is changed."""

HANDLERS: Mapping[str, Handler] = {
    "forward": scores.forward,
    "kept_forward": scores.kept_forward,
    "backward": scores.backward,
    "zero_grad": training.zero_grad,
    "save_checkpoint": checkpoints.save_checkpoint,
    "load_checkpoint": checkpoints.load_checkpoint,
    "update_reference": training.update_reference,
    "export": checkpoints.export,
}
"""Handlers by kind, except samples, which are generated one token at a time: see :mod:`.samples`."""
SHARED_HANDLERS: Mapping[str, SharedHandler] = {
    "forward_backward": training.train,
    "train_step": training.train,
    "optim_step": training.optim_steps,
}
"""Handlers of the kinds that several runs may share."""


def carry_out(
    context: EngineContext, decision: Decision, operations: Sequence[tuple[Request, Budget]]
) -> Iterator[Answer]:
    """Execute begun operations of different runs, at once where that goes. One that raises leaves its run unchanged.

    A run alone is a group of one. What fails in company is repeated alone, so that its error is the one it has alone,
    and the other runs are unaffected.

    Args:
        operations: One operation, or several that the decision puts together, and the memory limits of each, if it is
            divisible. If memory runs out all the same, it is repeated within the limits decided then.

    Raises:
        torch.AcceleratorError: The device is lost, and the process with it.
    """
    groups = deque([operations])
    while groups:
        group = groups.popleft()
        if len(group) > 1 and not _brought(context, [request.run_id for request, _ in group]):
            groups.extend([each] for each in group)
            continue
        began = time.perf_counter() - given_s()
        executions = []
        for request, budget in group:
            try:
                executions.append(Execution(context, request, budget))
            except Exception as error:  # the boundary: its run is not here
                yield answer_to(request, plain_answer(error=to_error(_not_fatal(error), "request operation")))
        outcomes = _outcomes(context, decision, executions)
        seconds = (time.perf_counter() - given_s() - began) / max(
            1, sum(execution.request.tokens for execution in executions)
        )
        for execution, outcome in zip(executions, outcomes, strict=True):
            if outcome is None:
                execution.drop_added_ema()
                groups.append([(execution.request, execution.budget)])
            else:
                yield answer_to(execution.request, execution.ended(outcome, seconds * execution.request.tokens))


def _brought(context: EngineContext, run_ids: Sequence[str]) -> bool:
    """Whether these runs fit onto the device at once, where they are then."""

    def bring() -> bool:
        for run_id in run_ids:
            context.residency.use(context.held(run_id))
        return True

    return context.agreement.unless_out_of_memory(bring) is not None


def _outcomes(
    context: EngineContext, decision: Decision, executions: Sequence[Execution]
) -> Sequence[Outcome | Exception | None]:
    """The outcome or the error of each; None for one that failed in company, and is as it was before."""
    if not executions:
        return []
    alone = len(executions) == 1
    generators = [execution.run.rng_tensors() for execution in executions]

    def check() -> None:
        for execution in executions:
            context.agreement.check(execution.request.message)

    outcomes: Sequence[Outcome | Exception | None]
    try:
        with executions[0].span() if alone else nullcontext(), panics_as_errors(), interruptible(check):
            for execution in executions:
                if (error := decision.stopped.get(execution.request.message.id)) is not None:
                    raise error
            outcomes = _within_memory(context, executions, decision.group_tokens)
    except Exception as error:  # the boundary: the error becomes the operation's result
        if alone:
            return [_not_fatal(error)]
        logger.warning(
            "%d operations failed together and are carried out alone", len(executions), exc_info=_not_fatal(error)
        )
        outcomes = [None] * len(executions)
    if not alone:
        for execution, outcome, states in zip(executions, outcomes, generators, strict=True):
            if not isinstance(outcome, Outcome):
                execution.run.load_rng_tensors(states)
    return outcomes


def _within_memory(
    context: EngineContext, executions: Sequence[Execution], group_tokens: int
) -> Sequence[Outcome | Exception | None]:
    """Execute operations; of one alone, repeat it within smaller limits while memory runs out."""
    first, alone = executions[0], len(executions) == 1
    kind = kind_of(first.operation)
    if kind.name not in KINDS:
        raise invalid("this server does not know this kind of operation; it may be older than the client", "kind")

    def attempt() -> Sequence[Outcome | Exception | None]:
        if not alone:
            return SHARED_HANDLERS[kind.name](context, executions, group_tokens)
        with nullcontext() if kind.swaps_generators else first.within():
            if kind.name not in SHARED_HANDLERS:
                return [HANDLERS[kind.name](context, first.run, first.seq, first.call, first.request.columns)]
            (outcome,) = SHARED_HANDLERS[kind.name](context, executions, group_tokens)
            if isinstance(outcome, Exception):
                raise outcome
            return [outcome]

    if not kind.divisible:
        return attempt()
    while (outcomes := context.agreement.unless_out_of_memory(attempt)) is None:
        if not alone:
            return [None] * len(executions)
        smaller = context.decisions.after_out_of_memory(first.run, first.request.columns, first.budget)
        if smaller is None:
            raise torch.OutOfMemoryError("the longest row does not fit into memory")
        first.budget = smaller
    if kind.changes_state:
        for execution, outcome in zip(executions, outcomes, strict=True):
            if isinstance(outcome, Outcome):
                limits.record(loss_result(outcome.result), execution.run, execution.budget)
    return outcomes


def _not_fatal(error: Exception) -> Exception:
    """The error; raises it if the process cannot continue after it."""
    if is_fatal(error):
        raise error
    return error
