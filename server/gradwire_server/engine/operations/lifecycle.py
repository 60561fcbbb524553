"""The lifecycle of an operation in the engine, from its beginning to its answer, shared by all kinds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.crash_points import crash_point
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.failures import is_fatal, to_error
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.request import Outcome, Request
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.observability import logs
from gradwire_server.operation_kinds import kind_of, step_call


@dataclass(frozen=True)
class Answer:
    """A reply and the buffers of its payload."""

    reply: engine_pb2.EngineReply
    buffers: list[memoryview]


def plain_answer(**kind: object) -> Answer:
    """Make an answer without a payload; ``kind`` is one of the reply's kinds."""
    return Answer(engine_pb2.EngineReply(**kind), [])  # type: ignore[arg-type]  # one of the reply's kinds


def not_started() -> Answer:
    """Make the answer to a request that was withdrawn or is not executed after an earlier failure."""
    return plain_answer(not_started=training_pb2.Empty())


def answer_to(request: Request, answer: Answer) -> Answer:
    """Address an answer to a request."""
    answer.reply.id = request.message.id
    return answer


def begins(context: EngineContext, decision: Decision, request: engine_pb2.EngineRequest) -> bool:
    """Whether a request of a decision begins; if not, answer :func:`not_started`.

    It does not if the decision says so, or if an operation of its run with a number of at least its ``unless_failed``
    has failed.
    """
    run = context.runs.get(request.operation.run_id)
    unless_failed = request.operation.unless_failed
    if unless_failed and run is not None and run.failed_seq >= unless_failed:
        return False
    return request.id not in decision.withdrawn


class Execution:
    """One begun operation of a run. End it with :meth:`succeeded` or :meth:`failed`, or drop it.

    Args:
        budget: Its memory limits; by default as large as possible.

    Attributes:
        budget: The limits that it is executed within at present.

    Raises:
        DamagedFile: The run's file is damaged; a new process restores the run.
    """

    def __init__(self, context: EngineContext, request: Request, budget: Budget | None = None) -> None:
        asked = request.message.operation
        run = context.held(asked.run_id)
        context.residency.use(run)
        run.drop_accumulated(asked.dropped_step)
        crash_point("engine.before_operation")
        self.run, self.request, self.budget = run, request, budget or context.memory.most
        self._context, self._asked = context, asked
        self._began = time.perf_counter()
        self._had_ema = run.ema is not None
        self._traced = False
        run.forget_kept(asked.seq)

    @property
    def operation(self) -> training_pb2.Operation:
        """The operation itself."""
        return self._asked.operation

    @property
    def seq(self) -> int:
        """The operation's number."""
        return self._asked.seq

    @property
    def call(self) -> Any:
        """The operation's message of its kind."""
        return getattr(self.operation, kind_of(self.operation).name)

    @property
    def step(self) -> training_pb2.OptimStep | None:
        """The step that the operation is or ends with."""
        return step_call(self.operation)

    @property
    def seconds(self) -> float:
        """Seconds since the operation began."""
        return time.perf_counter() - self._began

    @property
    def _span_name(self) -> str:
        return f"gradwire.engine.{self._asked.operation.WhichOneof('kind') or 'unknown'}"

    @contextmanager
    def span(self) -> Iterator[None]:
        """Trace the body as the operation's span, for an operation that is computed without interruption."""
        self._traced = True
        asked = self._asked
        with (
            logs.about(asked.run_id, asked.seq),
            self._context.tracing.span(self._span_name, asked.traceparent, run=asked.run_id, seq=asked.seq),
        ):
            yield

    @contextmanager
    def within(self) -> Iterator[None]:
        """Execute the body within the operation's memory limits, and with the run's random generators."""
        with self._context.within(self.budget), self.run.rng():
            yield

    def ended(self, outcome: Outcome | Exception, seconds: float) -> Answer:
        """Make the answer; see :meth:`succeeded` and :meth:`failed`."""
        return self.failed(outcome, seconds) if isinstance(outcome, Exception) else self.succeeded(outcome, seconds)

    def succeeded(self, outcome: Outcome, seconds: float | None = None) -> Answer:
        """Make the answer to a successful operation.

        Args:
            seconds: The engine's time on it; by default the time since it began.
        """
        asked, seconds = self._asked, self.seconds if seconds is None else seconds
        answer = success(outcome, asked.seq, seconds)
        self.run.seq = asked.seq
        if not self._traced:
            self._context.tracing.record(self._span_name, asked.traceparent, seconds, run=asked.run_id, seq=asked.seq)
        crash_point("engine.before_reply")
        return answer

    def drop_added_ema(self) -> None:
        """Drop the moving average that the operation has added to its run, if it has."""
        if not self._had_ema:
            self.run.drop_ema()

    def failed(self, error: Exception, seconds: float | None = None) -> Answer:
        """Make the answer to an operation that raised, and record its failure.

        Its run is otherwise unchanged, except that a step ends its accumulation.

        Args:
            seconds: See :meth:`succeeded`.

        Raises:
            Exception: The error itself, if the process cannot continue after it.
        """
        if is_fatal(error):
            raise error
        self.drop_added_ema()
        if kind_of(self._asked.operation).ends_accumulation:
            self.run.accumulator.clear()
        self.run.seq = self._asked.seq
        return failure(self._context, self._asked, error, self.seconds if seconds is None else seconds)


def success(outcome: Outcome, seq: int, seconds: float) -> Answer:
    """Make the answer to a successful request; ``seq`` is the operation's number, or 0 outside a run."""
    specs, buffers = codec.encode(outcome.columns)
    result = outcome.result
    result.seq = seq
    result.status = training_pb2.STATUS_SUCCEEDED
    result.timings.engine_s = seconds
    result.tensors.extend(specs)
    result.payload_bytes = sum(buffer.nbytes for buffer in buffers)
    return Answer(engine_pb2.EngineReply(result=result), buffers)


def failure(
    context: EngineContext, asked: engine_pb2.EngineOperation, error: Exception, seconds: float = 0.0
) -> Answer:
    """Make the answer to a failed operation, also one that could not begin, and record the failure in its run.

    A cancelled operation is no failure: those behind it are executed.
    """
    cancelled = isinstance(error, OperationError) and error.code == training_pb2.ERROR_CODE_CANCELLED
    if asked.run_id in context.runs and not cancelled:
        context.runs[asked.run_id].failed_seq = asked.seq
    what = f"{asked.operation.WhichOneof('kind')} {asked.seq} of {asked.run_id}"
    result = training_pb2.OperationResult(
        seq=asked.seq,
        status=training_pb2.STATUS_CANCELLED if cancelled else training_pb2.STATUS_FAILED,
        error=to_error(error, what),
        timings=training_pb2.Timings(engine_s=seconds),
    )
    return Answer(engine_pb2.EngineReply(result=result), [])
