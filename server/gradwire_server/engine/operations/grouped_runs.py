"""Operations of several runs that wait at the same time, carried out at once where that is quicker.

Small ``forward_backward`` of LoRA runs over one base model share a forward and a backward of the trunk
(:mod:`.together`). Each gets what it gets alone, within rounding, and what fails is repeated alone: it costs the
others nothing, and its error is the one that it has alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire_proto.v1 import engine_pb2, training_pb2
from torch import Tensor

from gradwire_server.crash_points import crash_point
from gradwire_server.engine.failures import is_fatal, unless_out_of_memory
from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.operations import loss_operations
from gradwire_server.engine.process.engine import Answer, Engine, succeeded
from gradwire_server.engine.process.loop import LoopRequest
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.threads import suited_threads
from gradwire_server.engine.training.forward_backward import Training
from gradwire_server.engine.training.grouped_forward_backward import can_go_together, fits, forward_backward_together
from gradwire_server.engine.training.loss_report import LossEvaluation

logger = logging.getLogger(__name__)

MOST_TOKENS = {"cpu": 1024, "cuda": 1 << 14}
"""Of operations that go together: with more than that, they are no quicker for it."""


@dataclass(eq=False)
class _Member:
    request: LoopRequest
    run: EngineRun
    training: Training
    generators: dict[str, Tensor]
    seconds: float

    @property
    def call(self) -> training_pb2.LossCall:
        return self.request.message.operation.operation.forward_backward


class GroupedRuns:
    """Chooses what goes together, and answers it.

    Args:
        engine: whose operations they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._most_tokens = MOST_TOKENS[engine.pool.device.type]

    def choose(self, ready: Sequence[LoopRequest]) -> Sequence[LoopRequest]:
        """What to carry out now, of requests whose turn it is, of different runs; the first of them or more.

        A step goes before a ``forward_backward`` of another run, whose companion the next one of its run may be.
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

    def answer(self, requests: Sequence[LoopRequest]) -> Iterator[Answer]:
        """Carries them out, as :meth:`.engine.Engine.answer` would one after another."""
        alone: list[LoopRequest] = []
        members: list[_Member] = []
        for request in requests:
            if not self._engine.begins(request.message):
                empty = training_pb2.Empty()
                yield Answer(engine_pb2.EngineReply(id=request.message.id, not_started=empty), [])
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
            answer = self._engine.carry_out(request.message, request.columns)
            answer.reply.id = request.message.id
            yield answer

    def _fits(self, members: Sequence[_Member]) -> bool:
        trainings = [member.training for member in members]
        return fits(trainings, min(self._most_tokens, *(each.budget.microbatch_tokens for each in trainings)))

    def _trained(self, request: LoopRequest) -> LoraPolicy | None:
        """The policy of a request that may go together with others."""
        asked = request.message.operation
        run = self._engine.runs.get(asked.run_id)
        if run is None or request.error is not None or not asked.operation.HasField("forward_backward"):
            return None
        return run.policy if isinstance(run.policy, LoraPolicy) else None

    def _prepare(self, request: LoopRequest) -> _Member | None:
        """None where it cannot be prepared, and says alone why."""
        engine, asked, start = self._engine, request.message.operation, time.perf_counter()
        run = engine.runs[asked.run_id]
        run.drop_accumulated(asked.dropped_step)
        generators, had_ema, whole = run.rng_tensors(), run.ema is not None, engine.budget
        crash_point("engine.before_operation")
        run.forget_kept(asked.seq)
        engine.budget = engine.memory.budget(run)
        try:
            with run.rng():
                training = loss_operations.prepare(engine, run, asked.operation.forward_backward, request.columns)
        except Exception as error:  # the same is raised where it is carried out alone, and answered there
            if is_fatal(error):
                raise
            if not had_ema:
                run.drop_ema()
            return None
        finally:
            engine.budget = whole
        return _Member(request, run, training, generators, time.perf_counter() - start)

    def _together(self, members: Sequence[_Member]) -> Iterator[tuple[_Member, Answer | None]]:
        """The answer of each; None where it has to be carried out alone."""
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
        except Exception as error:  # whatever it is, it must not cost all of them their operation
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
        asked = member.request.message.operation
        outcome = loss_operations.trained(self._engine, member.run, member.call, member.training, lambda: evaluation)
        outcome.result.loss.grouped_runs = num_runs
        member.run.seq = asked.seq
        answer = succeeded(outcome, asked.seq, seconds)
        answer.reply.id = member.request.message.id
        self._engine.tracing.record(
            "gradwire.engine.forward_backward", asked.traceparent, seconds, run=asked.run_id, seq=asked.seq
        )
        crash_point("engine.before_reply")
        return answer


def _least_tokens(request: LoopRequest) -> int:
    """No more than the tokens of a batch: those of its longest column."""
    return max((len(column.values) for column in request.columns.values()), default=0)
