"""Sampling requests in progress, and their answers.

A run's samples begin in the order of its operations. They are answered in the same order, whichever ends first, and the
run's other requests wait for the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.crash_points import crash_point
from gradwire_server.engine.errors import panics_as_errors
from gradwire_server.engine.failures import is_fatal, to_error
from gradwire_server.engine.interruption import interruptible
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.lifecycle import (
    Answer,
    Execution,
    begins,
    failure,
    not_started,
    plain_answer,
    success,
)
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.operations.samples import Started, begin_in_run, begin_outside
from gradwire_server.engine.state.engine_run import EngineRun


@dataclass(eq=False)
class _Sampling:
    """A sampling request. ``execution`` is None outside a run, and if the request could not begin.

    Attributes:
        used_s: Seconds of computing, of those that it shared its share.
        told: Whether the front knows, or need not know, that it is being computed.
    """

    message: engine_pb2.EngineRequest
    began: float = field(default_factory=time.perf_counter)
    execution: Execution | None = None
    started: Started | None = None
    answer: Answer | None = None
    used_s: float = 0.0
    told: bool = False

    @property
    def ended(self) -> bool:
        return self.answer is not None or (self.started is not None and self.started.job.done)


class SamplesInProgress:
    """Begin, advance and answer sampling requests.

    Args:
        context: The engine's parts.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._outside: list[_Sampling] = []
        self._runs: dict[str, list[_Sampling]] = {}

    def __len__(self) -> int:
        return len(self._outside) + sum(map(len, self._runs.values()))

    def of(self, run_id: str) -> bool:
        """Whether samples of this run are in progress, also those outside its queue, which read its weights."""
        return run_id in self._runs or any(sampling.message.sampled_run == run_id for sampling in self._outside)

    def begin(self, decision: Decision, request: Request) -> Iterator[Answer]:
        """Begin a request of a decision; an error becomes its answer. Yields that prompts are about to be scored."""
        message = request.message
        sampling = _Sampling(message, told=not message.tells_start)
        run = self._context.runs.get(message.operation.run_id)
        if run is None:
            self._outside.append(sampling)
        else:
            self._runs.setdefault(run.run_id, []).append(sampling)
        if not begins(self._context, decision, message):
            sampling.answer = not_started()
            return
        if not sampling.told and message.sample.call.prompt_logprobs:
            yield _start(sampling)
        try:
            if request.error is not None:
                raise request.error
            self._begin(sampling, request)
        except Exception as error:  # the boundary: the caller receives any error
            sampling.answer = self._failed(sampling, error)
        sampling.used_s = time.perf_counter() - sampling.began

    def step(self, decision: Decision) -> None:
        """Advance some of the samples by a token; end those that the decision ends."""
        for sampling in self._all():
            error = decision.stopped.get(sampling.message.id)
            if error is not None and sampling.started is not None and not sampling.ended:
                sampling.answer = self._stopped(sampling, sampling.started, error)
                sampling.started = None
        if self._context.sampler.turn():
            together = [(each, each.started.num_samples) for each in self._all() if each.started and not each.ended]
            began = time.perf_counter()
            self._context.sampler.step()
            of_one_s = (time.perf_counter() - began) / max(1, sum(num_samples for _, num_samples in together))
            for sampling, num_samples in together:
                sampling.used_s += of_one_s * num_samples

    def messages(self) -> list[engine_pb2.EngineRequest]:
        """The requests of the samples in progress that have not ended."""
        return [sampling.message for sampling in self._all() if not sampling.ended]

    def finished(self) -> list[Answer]:
        """Take the answers that can be sent now, behind the new tokens of samples that stream."""
        answers = [_start(each) for each in self._all() if not each.told and each.started and each.started.job.begun]
        answers += [frame for sampling in self._all() if sampling.message.streams for frame in _new_tokens(sampling)]
        for sampling in [sampling for sampling in self._outside if sampling.ended]:
            self._outside.remove(sampling)
            answers.append(self._answer(sampling))
        for run_id, samplings in list(self._runs.items()):
            while samplings and samplings[0].ended:
                answers.append(self._answer(samplings.pop(0)))
                if answers[-1].reply.result.status == training_pb2.STATUS_FAILED:
                    self._take_back(self._context.runs[run_id], samplings)
            if not samplings:
                del self._runs[run_id]
        return answers

    def _all(self) -> list[_Sampling]:
        return [*self._outside, *chain.from_iterable(self._runs.values())]

    def _begin(self, sampling: _Sampling, request: Request) -> None:
        context, message = self._context, request.message
        if message.HasField("sample"):
            crash_point("engine.before_operation")
            with panics_as_errors(), interruptible(lambda: context.agreement.check(message)):
                sampling.started = begin_outside(context, message)
            return
        execution = sampling.execution = Execution(context, request)
        call = message.operation.operation.sample
        with panics_as_errors(), interruptible(lambda: context.agreement.check(message)):
            sampling.started = begin_in_run(
                context, execution.run, message.operation.seq, call, request.columns, message.owner
            )

    def _answer(self, sampling: _Sampling) -> Answer:
        answer = sampling.answer
        if answer is None:
            try:
                answer = self._succeeded(sampling)
            except Exception as error:  # the boundary, as in begin()
                answer = self._failed(sampling, error)
        answer.reply.id = sampling.message.id
        if answer.reply.HasField("result"):
            answer.reply.result.timings.used_s = sampling.used_s
        self._context.agreement.confirm(answer.reply)
        return answer

    def _succeeded(self, sampling: _Sampling) -> Answer:
        assert sampling.started is not None
        outcome = sampling.started.outcome()
        if sampling.execution is not None:
            return sampling.execution.succeeded(outcome)
        seconds = time.perf_counter() - sampling.began
        self._context.tracing.record("gradwire.engine.sample", "", seconds)
        answer = success(outcome, 0, seconds)
        crash_point("engine.before_reply")
        return answer

    def _stopped(self, sampling: _Sampling, started: Started, error: Exception) -> Answer:
        """Make the answer to a request that was stopped: outside a run, what was computed for it."""
        tokens = self._context.sampler.cancel(started.job)
        if not sampling.message.HasField("sample"):
            return self._failed(sampling, error)
        if not started.job.begun:
            return not_started()
        everywhere = self._context.agreement.gathered(str(tokens).encode())
        result = training_pb2.OperationResult(status=training_pb2.STATUS_CANCELLED)
        result.timings.engine_s = time.perf_counter() - sampling.began
        result.sample.num_prompt_tokens = started.num_prompt_tokens
        result.sample.num_sampled_tokens = sum(map(int, everywhere))
        return plain_answer(result=result)

    def _failed(self, sampling: _Sampling, error: Exception) -> Answer:
        if sampling.execution is not None:
            return sampling.execution.failed(error)
        if is_fatal(error):
            raise error
        asked = sampling.message.operation
        if asked.run_id in self._context.runs:
            return failure(self._context, asked, error)
        return plain_answer(error=to_error(error, "request sample"))

    def _take_back(self, run: EngineRun, samplings: Iterable[_Sampling]) -> None:
        """Cancel the samples of a run that must not be executed after the failure of one before them."""
        for sampling in samplings:
            unless_failed = sampling.message.operation.unless_failed
            if unless_failed and run.failed_seq >= unless_failed and sampling.started is not None:
                self._context.sampler.cancel(sampling.started.job)
                sampling.started, sampling.answer = None, not_started()


def _start(sampling: _Sampling) -> Answer:
    sampling.told = True
    return Answer(engine_pb2.EngineReply(id=sampling.message.id, sample_frame=training_pb2.SampleFrame()), [])


def _new_tokens(sampling: _Sampling) -> list[Answer]:
    deltas = sampling.started.job.new_tokens() if sampling.started is not None else []
    if not deltas:
        return []
    frame = training_pb2.SampleFrame(deltas=deltas)
    return [Answer(engine_pb2.EngineReply(id=sampling.message.id, sample_frame=frame), [])]
