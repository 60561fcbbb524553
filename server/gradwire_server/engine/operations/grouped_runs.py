"""Execution of waiting operations of several runs at once, where that is faster.

Small ``forward_backward`` and ``train_step`` operations of LoRA runs on one base model share a forward and a backward
of the trunk (:mod:`gradwire_server.engine.training.grouped_forward_backward`). Each run gets the result it gets alone,
up to rounding. A failed operation is repeated alone, so its error is the one it has alone and the other runs are
unaffected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.failures import is_fatal, unless_out_of_memory
from gradwire_server.engine.interruption import interruptible
from gradwire_server.engine.operations import batches, limits
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.lifecycle import Answer, Execution, begins, check, not_started
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.operations.table import carry_out
from gradwire_server.engine.operations.train_steps import stepped
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.threads import suited_threads
from gradwire_server.engine.training.forward_backward import Training
from gradwire_server.engine.training.grouped_forward_backward import fits, forward_backward_together
from gradwire_server.engine.training.loss_report import LossEvaluation
from gradwire_server.engine.training.optimizer import check_settings
from gradwire_server.operation_kinds import training_call

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    request: Request
    budget: Budget
    execution: Execution
    training: Training
    generators: dict[str, Tensor]
    seconds: float

    @property
    def run(self) -> EngineRun:
        return self.execution.run


class GroupedRuns:
    """Execute the requests of a decision at once.

    Args:
        context: The engine's parts.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def answer(self, decision: Decision) -> Iterator[Answer]:
        """Execute the decision's requests; answers equal those of each alone, up to rounding."""
        alone: list[tuple[Request, Budget]] = []
        members: list[_Member] = []
        for request, budget in zip(decision.requests, decision.budgets, strict=True):
            if not begins(self._context, request.message):
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
        return _Member(request, budget, execution, training, generators, execution.seconds)

    def _together(self, members: Sequence[_Member]) -> Iterator[tuple[_Member, Answer | None]]:
        """Execute the members at once; yields None instead of an answer for each that must be executed alone."""
        start = time.perf_counter()
        trainings = [member.training for member in members]
        tokens = sum(len(training.batch.input_ids) for training in trainings)
        policy = trainings[0].policy
        found: Sequence[LossEvaluation | None] | None = None
        try:
            with (
                suited_threads(policy.device, tokens, policy.facts.num_parameters),
                interruptible(lambda: self._check(members)),
            ):
                found = unless_out_of_memory(
                    lambda: forward_backward_together(trainings, [member.run.rng for member in members])
                )
        except Exception as error:  # whatever the error, the members' operations are repeated alone
            if is_fatal(error):
                raise
            logger.warning("%d operations failed together and are carried out alone", len(members), exc_info=error)
        seconds = time.perf_counter() - start
        for member, evaluation in zip(members, found or [None] * len(members), strict=True):
            if evaluation is None:
                member.run.load_rng_tensors(member.generators)
                yield member, None
            else:
                share = seconds * len(member.training.batch.input_ids) / tokens
                yield member, self._succeeded(member, evaluation, member.seconds + share, len(members))

    def _check(self, members: Sequence[_Member]) -> None:
        for member in members:
            check(self._context, member.request.message)

    def _succeeded(self, member: _Member, evaluation: LossEvaluation, seconds: float, num_runs: int) -> Answer:
        outcome = batches.trained(member.run, _call(member.request), member.training, lambda: evaluation)
        outcome.result.loss.grouped_runs = num_runs
        limits.record(outcome.result.loss, member.run, member.budget)
        asked = member.request.message.operation
        if asked.operation.HasField("train_step"):
            began = time.perf_counter()
            try:
                with interruptible(lambda: check(self._context, member.request.message)):
                    outcome = stepped(self._context, member.run, asked.seq, asked.operation.train_step, outcome)
            except Exception as error:  # the boundary: the error becomes the operation's result
                member.run.load_rng_tensors(member.generators)
                return _to(member.request, member.execution.failed(error))
            seconds += time.perf_counter() - began
        return _to(member.request, member.execution.succeeded(outcome, seconds))


def _call(request: Request) -> training_pb2.LossCall:
    call = training_call(request.message.operation.operation)
    assert call is not None  # the decision groups no other operations
    return call


def _fits(members: Sequence[_Member], most_tokens: int) -> bool:
    return fits(
        [member.training for member in members],
        min(most_tokens, *(member.budget.microbatch_tokens for member in members)),
    )


def _to(request: Request, answer: Answer) -> Answer:
    answer.reply.id = request.message.id
    return answer
