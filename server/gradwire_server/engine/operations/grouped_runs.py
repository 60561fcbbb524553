"""Execution of waiting operations of several runs at once, where that is faster.

Small ``forward_backward`` operations of LoRA runs on one base model share a forward and a backward of the trunk
(:mod:`gradwire_server.engine.training.grouped_forward_backward`). Each run gets the result it gets alone, up to
rounding. A failed operation is repeated alone, so its error is the one it has alone and the other runs are unaffected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.failures import is_fatal, unless_out_of_memory
from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.operations import batches
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.lifecycle import Answer, Execution, begins, not_started
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.operations.table import carry_out
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.threads import suited_threads
from gradwire_server.engine.training.forward_backward import Training
from gradwire_server.engine.training.grouped_forward_backward import can_go_together, fits, forward_backward_together
from gradwire_server.engine.training.loss_report import LossEvaluation

logger = logging.getLogger(__name__)

MOST_TOKENS = {"cpu": 1024, "cuda": 1 << 14}
"""Maximum tokens of a group by device type; above it, grouping is not faster."""


@dataclass(eq=False)
class _Member:
    request: Request
    execution: Execution
    training: Training
    generators: dict[str, Tensor]
    seconds: float

    @property
    def call(self) -> training_pb2.LossCall:
        return self.request.message.operation.operation.forward_backward

    @property
    def run(self) -> EngineRun:
        return self.execution.run


class GroupedRuns:
    """Choose operations to group, and answer them.

    Args:
        context: The engine's parts.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._most_tokens = MOST_TOKENS[context.pool.device.type]

    def choose(self, ready: Sequence[Request]) -> Sequence[Request]:
        """Choose the requests to execute now from ready requests of different runs: the first, or several of them.

        If the first one could be grouped, a ready step goes before it, because the next ``forward_backward`` of the
        step's run may then join the group.
        """
        first = self._trained(ready[0]) if ready else None
        if first is None:
            return ready[:1]
        steps = [request for request in ready if request.message.operation.operation.HasField("optim_step")]
        if steps:
            return steps[:1]
        chosen, tokens = [ready[0]], _least_tokens(ready[0])
        for request in ready[1:]:
            other, more = self._trained(request), _least_tokens(request)
            if other is not None and tokens + more <= self._most_tokens and can_go_together(first, other):
                chosen.append(request)
                tokens += more
        return chosen

    def answer(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Execute the requests; answers equal those of each alone, up to rounding."""
        alone: list[Request] = []
        members: list[_Member] = []
        for request in requests:
            if not begins(self._context, request.message):
                yield _to(request, not_started())
                continue
            member = self._prepare(request)
            if member is not None and self._fits([*members, member]):
                members.append(member)
            else:
                alone.append(request)
        if len(members) > 1:
            for member, answer in self._together(members):
                if answer is None:
                    alone.append(member.request)
                else:
                    yield answer
        else:
            alone += [member.request for member in members]
        for request in alone:
            yield _to(request, carry_out(self._context, request.message.operation, request.columns))

    def _fits(self, members: Sequence[_Member]) -> bool:
        trainings = [member.training for member in members]
        return fits(trainings, min(self._most_tokens, *(each.budget.microbatch_tokens for each in trainings)))

    def _trained(self, request: Request) -> LoraPolicy | None:
        """The policy of a request that may be grouped; None for any other request."""
        asked = request.message.operation
        run = self._context.runs.get(asked.run_id)
        if run is None or request.error is not None or not asked.operation.HasField("forward_backward"):
            return None
        return run.policy if isinstance(run.policy, LoraPolicy) else None

    def _prepare(self, request: Request) -> _Member | None:
        """Prepare a request for the group; None if that fails, and executing it alone then reports the error."""
        context, asked = self._context, request.message.operation
        execution = Execution(context, asked)
        run, whole = execution.run, context.budget
        generators, had_ema = run.rng_tensors(), run.ema is not None
        context.budget = context.memory.budget(run)
        try:
            with run.rng():
                training = batches.prepare(context, run, asked.operation.forward_backward, request.columns)
        except Exception as error:  # raised again, and answered, when the request is executed alone
            if is_fatal(error):
                raise
            if not had_ema:
                run.drop_ema()
            return None
        finally:
            context.budget = whole
        return _Member(request, execution, training, generators, execution.seconds)

    def _together(self, members: Sequence[_Member]) -> Iterator[tuple[_Member, Answer | None]]:
        """Execute the members at once; yields None instead of an answer for each that must be executed alone."""
        start = time.perf_counter()
        trainings = [member.training for member in members]
        tokens = sum(len(training.batch.input_ids) for training in trainings)
        policy = trainings[0].policy
        found: Sequence[LossEvaluation | None] | None = None
        try:
            with suited_threads(policy.device, tokens, policy.facts.num_parameters):
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

    def _succeeded(self, member: _Member, evaluation: LossEvaluation, seconds: float, num_runs: int) -> Answer:
        outcome = batches.trained(self._context, member.run, member.call, member.training, lambda: evaluation)
        outcome.result.loss.grouped_runs = num_runs
        return _to(member.request, member.execution.succeeded(outcome, seconds))


def _to(request: Request, answer: Answer) -> Answer:
    answer.reply.id = request.message.id
    return answer


def _least_tokens(request: Request) -> int:
    """A lower bound of the tokens in a batch: the length of its longest column."""
    return max((len(column.values) for column in request.columns.values()), default=0)
