"""The requests for samples that an engine has begun, and their answers.

A run's samples begin in the order of its operations, each taking its number from the run's generator then. They are
answered in that order too, whichever ends first, and what else the run asks for waits for the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2, training_pb2
from torch import Tensor

from gradwire_server.crash_points import crash_point
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal, to_error
from gradwire_server.engine.operations.outcome import Columns
from gradwire_server.engine.operations.samples import Started, begin_in_run, begin_outside, draw_seed
from gradwire_server.engine.process.engine import Answer, Engine, succeeded
from gradwire_server.engine.state.engine_run import EngineRun


@dataclass(eq=False)
class _Request:
    message: engine_pb2.EngineRequest
    began: float = field(default_factory=time.perf_counter)
    started: Started | None = None
    answer: Answer | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def ended(self) -> bool:
        return self.answer is not None or (self.started is not None and self.started.job.done)


class _OfRun:
    """A run's samples under way, and its generators before the first of them."""

    def __init__(self, run: EngineRun) -> None:
        self.run = run
        self.requests: list[_Request] = []
        self._before: Mapping[str, Tensor] = run.rng_tensors()
        self._draws = 0
        self._undone = False

    def count(self, call: training_pb2.SampleCall, ok: bool) -> None:
        """A sample ended; one that did not succeed draws no number, as a replay does not know of it."""
        self._draws += ok and not call.HasField("seed")
        self._undone = self._undone or not ok

    def settle(self) -> None:
        """All have ended: the generators are where those that succeeded put them."""
        if self._undone:
            self.run.load_rng_tensors(self._before)
            with self.run.rng():
                for _ in range(self._draws):
                    draw_seed()


class SamplesInProgress:
    """Begins requests for samples, brings them on, and answers them.

    Args:
        engine: whose they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outside: list[_Request] = []
        self._runs: dict[str, _OfRun] = {}

    def __len__(self) -> int:
        return len(self._outside) + sum(len(of_run.requests) for of_run in self._runs.values())

    def of(self, run_id: str) -> bool:
        """Whether samples of this run are under way."""
        return run_id in self._runs

    def begin(self, message: engine_pb2.EngineRequest, columns: Columns, error: codec.CodecError | None) -> None:
        """Takes a request over; see :meth:`.engine.Engine.answer`."""
        request = _Request(message)
        run = self._engine.runs.get(message.operation.run_id)
        if run is not None and run.run_id not in self._runs:
            self._runs[run.run_id] = _OfRun(run)
        if run is None:
            self._outside.append(request)
        else:
            self._runs[run.run_id].requests.append(request)
        if not self._engine.begins(message):
            request.answer = _not_started()
            return
        try:
            if error is not None:
                raise error
            request.started = self._begin(message, run, columns)
        except Exception as raised:  # the boundary, as in Engine.answer()
            if is_fatal(raised):
                raise
            request.answer = self._failed(request, raised)

    def turn(self) -> list[int]:
        """The ids of the requests that the next step brings on."""
        jobs = self._engine.sampler.turn()
        return [request.message.id for request in self._all() if request.started and request.started.job in jobs]

    def step(self) -> None:
        """Brings some of them on by a token."""
        if self._engine.sampler.turn():
            self._engine.sampler.step()

    def finished(self) -> list[Answer]:
        """The answers that may go out now."""
        answers = []
        for request in [request for request in self._outside if request.ended]:
            self._outside.remove(request)
            answers.append(self._answer(request))
        for run_id, of_run in list(self._runs.items()):
            while of_run.requests and of_run.requests[0].ended:
                request = of_run.requests.pop(0)
                answers.append(self._answer(request))
                status = answers[-1].reply.result.status
                if answers[-1].reply.HasField("result"):
                    of_run.run.seq = request.message.operation.seq
                of_run.count(request.message.operation.operation.sample, status == training_pb2.STATUS_SUCCEEDED)
                if status == training_pb2.STATUS_FAILED:
                    self._take_back(of_run)
            if not of_run.requests:
                of_run.settle()
                del self._runs[run_id]
        return answers

    def _all(self) -> list[_Request]:
        return [*self._outside, *(request for of_run in self._runs.values() for request in of_run.requests)]

    def _begin(self, message: engine_pb2.EngineRequest, run: EngineRun | None, columns: Columns) -> Started:
        crash_point("engine.before_operation")
        if message.HasField("sample"):
            return begin_outside(self._engine, message.sample)
        asked = message.operation
        if run is None:
            raise OperationError(training_pb2.ERROR_CODE_UNKNOWN_RUN, f"the engine holds no run {asked.run_id!r}")
        run.forget_kept(asked.seq)
        with run.rng():
            return begin_in_run(self._engine, run, asked.operation.sample, columns)

    def _answer(self, request: _Request) -> Answer:
        answer = request.answer
        if answer is None:
            assert request.started is not None
            asked = request.message.operation
            try:
                answer = succeeded(request.started.outcome(), asked.seq, request.seconds)
                self._engine.tracing.record("gradwire.engine.sample", asked.traceparent, request.seconds,
                                            run=asked.run_id, seq=asked.seq)  # fmt: skip
            except Exception as error:  # the boundary, as in Engine.answer()
                if is_fatal(error):
                    raise
                answer = self._failed(request, error)
        crash_point("engine.before_reply")
        answer.reply.id = request.message.id
        return answer

    def _failed(self, request: _Request, error: Exception) -> Answer:
        if request.message.operation.run_id in self._engine.runs:
            return self._engine.failed(request.message.operation, error, request.seconds)
        return Answer(engine_pb2.EngineReply(error=to_error(error, "request sample")), [])

    def _take_back(self, of_run: _OfRun) -> None:
        """One failed: those behind it that were not to be carried out then are as if they had not begun."""
        for request in of_run.requests:
            unless_failed = request.message.operation.unless_failed
            if unless_failed and of_run.run.failed_seq >= unless_failed and request.started is not None:
                self._engine.sampler.cancel(request.started.job)
                request.started, request.answer = None, _not_started()


def _not_started() -> Answer:
    return Answer(engine_pb2.EngineReply(not_started=training_pb2.Empty()), [])
