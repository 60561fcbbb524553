"""Execution of waiting operations of several runs at once, where that is faster.

Small ``forward_backward`` and ``train_step`` operations of LoRA runs on one base model share a forward and a backward
of the trunk (:mod:`gradwire_server.engine.training.forward_backward`), and the optimizer steps of LoRA runs
share an update (:mod:`gradwire_server.engine.training.optimizer_step`). Each run gets the result it gets alone, up to
rounding. A failed operation is repeated alone, so its error is the one it has alone and the other runs are unaffected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.interruption import interruptible
from gradwire_server.engine.operations import batches, limits
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.lifecycle import Answer, Execution, begins, not_started
from gradwire_server.engine.operations.request import Outcome, Request
from gradwire_server.engine.operations.steps import optim_steps
from gradwire_server.engine.operations.table import carry_out
from gradwire_server.engine.operations.train_steps import step_error, with_step
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training.forward_backward import Training, can_join, fits, forward_backward
from gradwire_server.engine.training.loss_report import LossEvaluation
from gradwire_server.engine.training.optimizer import check_settings
from gradwire_server.operation_kinds import training_call

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Begun:
    """An operation in progress, the engine's seconds on it, and its outcome so far."""

    request: Request
    execution: Execution
    seconds: float = 0.0
    outcome: Outcome | Exception | None = None

    @property
    def run(self) -> EngineRun:
        return self.execution.run

    @property
    def step(self) -> training_pb2.OptimStep | None:
        """The step that the operation is or ends with."""
        operation = self.request.message.operation.operation
        if operation.HasField("train_step"):
            return operation.train_step.optim_step
        return operation.optim_step if operation.HasField("optim_step") else None


@dataclass(eq=False, kw_only=True)
class _Member(_Begun):
    """An operation on a batch."""

    budget: Budget
    training: Training
    generators: dict[str, Tensor]

    @property
    def tokens(self) -> int:
        return len(self.training.loss.batch.input_ids)


class GroupedRuns:
    """Execute the requests of a decision at once.

    Args:
        context: The engine's parts.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def answer(self, decision: Decision) -> Iterator[Answer]:
        """Execute the decision's requests, all of them steps or all on batches; see the module."""
        if all(request.message.operation.operation.HasField("optim_step") for request in decision.requests):
            yield from self._steps(decision)
            return
        alone: list[tuple[Request, Budget]] = []
        members: list[_Member] = []
        for request, budget in zip(decision.requests, decision.budgets, strict=True):
            if not begins(self._context, decision, request.message):
                yield _to(request, not_started())
                continue
            member = self._prepare(request, budget)
            if member is not None and _fits([*members, member], decision.group_tokens):
                members.append(member)
            else:
                alone.append((request, budget))
        if len(members) > 1:
            for member, answer in self._together(members):
                if answer is None:
                    alone.append((member.request, member.budget))
                else:
                    yield answer
        else:
            alone += [(member.request, member.budget) for member in members]
        for request, budget in alone:
            yield _to(request, carry_out(self._context, request.message, request.columns, budget))

    def _prepare(self, request: Request, budget: Budget) -> _Member | None:
        """Prepare a request for the group; None if that fails, and executing it alone then reports the error."""
        context, asked = self._context, request.message.operation
        execution = Execution(context, asked)
        run, generators = execution.run, execution.run.rng_tensors()
        try:
            with context.within(budget), run.rng():
                if asked.operation.HasField("train_step"):
                    check_settings(asked.operation.train_step.optim_step)
                training = batches.prepare(context, run, _call(request), request.columns)
        except Exception as error:  # raised again, and answered, when the request is executed alone
            execution.undo(error)
            return None
        if execution.head_was_added:  # only the result of an operation alone says so
            execution.drop_added()
            run.load_rng_tensors(generators)
            return None
        training.rng = run.rng
        return _Member(
            request=request,
            execution=execution,
            seconds=execution.seconds,
            budget=budget,
            training=training,
            generators=generators,
        )

    def _steps(self, decision: Decision) -> Iterator[Answer]:
        """Execute the ``optim_step`` operations of several runs."""
        begun = []
        for request in decision.requests:
            if begins(self._context, decision, request.message):
                begun.append(_Begun(request, Execution(self._context, request.message.operation)))
            else:
                yield _to(request, not_started())
        self._take_steps(begun)
        for each in begun:
            yield self._answer(each)

    def _together(self, members: Sequence[_Member]) -> Iterator[tuple[_Member, Answer | None]]:
        """Execute the members at once; yields None instead of an answer for each that must be executed alone."""
        start = time.perf_counter()
        trainings = [member.training for member in members]
        found: Sequence[LossEvaluation | None] | None = None
        try:
            with interruptible(lambda: self._check(members)):
                found = self._context.agreement.unless_out_of_memory(lambda: forward_backward(trainings))
        except Exception as error:  # whatever the error, the members' operations are repeated alone
            if is_fatal(error):
                raise
            logger.warning("%d operations failed together and are carried out alone", len(members), exc_info=error)
        seconds = time.perf_counter() - start
        for member, evaluation in zip(members, found or [None] * len(members), strict=True):
            if evaluation is None:
                member.run.load_rng_tensors(member.generators)
                yield member, None
                continue
            member.seconds += seconds * member.tokens / sum(each.tokens for each in members)
            member.outcome = _evaluated(member, evaluation)
            member.outcome.result.loss.grouped_runs = len(members)
            limits.record(member.outcome.result.loss, member.run, member.budget)
        computed = [member for member in members if member.outcome is not None]
        self._take_steps([member for member in computed if member.step is not None])
        for member in computed:
            if isinstance(member.outcome, Exception):
                member.run.load_rng_tensors(member.generators)
            yield member, self._answer(member)

    def _check(self, members: Sequence[_Member]) -> None:
        for member in members:
            self._context.agreement.check(member.request.message)

    def _take_steps(self, begun: Sequence[_Begun]) -> None:
        """Take the steps of operations whose gradients are accumulated."""
        start = time.perf_counter()
        ready: list[_Begun] = []
        for each in begun:
            try:
                self._context.agreement.check(each.request.message)  # the last moment to cancel it
                ready.append(each)
            except OperationError as error:
                each.outcome = error
        calls = [each.step for each in ready if each.step is not None]
        done: Sequence[Outcome | Exception]
        try:
            done = optim_steps(self._context, [each.run for each in ready], calls)
        except Exception as error:  # it concerns all of them
            done = [error] * len(ready)
        seconds = (time.perf_counter() - start) / max(1, len(ready))
        for each, step in zip(ready, done, strict=True):
            each.seconds += seconds
            computed = each.outcome
            if not isinstance(computed, Outcome):
                each.outcome = step
            else:
                each.outcome = step_error(step) if isinstance(step, Exception) else with_step(computed, step)

    def _answer(self, begun: _Begun) -> Answer:
        if isinstance(begun.outcome, Outcome):
            return _to(begun.request, begun.execution.succeeded(begun.outcome, begun.seconds))
        assert begun.outcome is not None
        return _to(begun.request, begun.execution.failed(begun.outcome))


def _evaluated(member: _Member, evaluation: LossEvaluation) -> Outcome:
    return batches.trained(member.run, _call(member.request), member.training, lambda: evaluation)


def _call(request: Request) -> training_pb2.LossCall:
    call = training_call(request.message.operation.operation)
    assert call is not None  # the decision groups no other operations
    return call


def _fits(members: Sequence[_Member], most_tokens: int) -> bool:
    """Whether the last of these may join the others."""
    return can_join(members[-1].training) and fits(
        [member.training for member in members],
        min(most_tokens, *(member.budget.microbatch_tokens for member in members)),
    )


def _to(request: Request, answer: Answer) -> Answer:
    answer.reply.id = request.message.id
    return answer
