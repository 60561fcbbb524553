"""The journal and the order of operations against models of a few lines, with what hypothesis thinks of."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import Quota
from gradwire_server.access.quotas import Usage
from gradwire_server.errors import ServiceError
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.rows import RunMarks, identity
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Segments
from gradwire_server.limits import Limits
from gradwire_server.scheduling.operation import QueuedOperation, verdict_on
from gradwire_server.scheduling.run_queue import RunQueue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.server.journal.test_journal import append, new_run, operation

T = TypeVar("T")
MARKS = RunMarks(step=0, failure_seq=0, failure="")
sizes = st.integers(0, 400)


class JournalMachine(RuleBasedStateMachine):
    """A journal of small segments beside dictionaries that say what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.generation = 0
        self.open(self.root / "0")
        self.run_id = self.do(new_run(self.journal, self.root / "0"))
        self.payloads: dict[int, bytes] = {}
        self.kept: set[int] = set()
        self.answers: dict[int, bytes] = {}
        self.answered: set[int] = set()
        self.known: set[int] = set()
        self.accepted = self.released = 0

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def open(self, folder: Path) -> None:
        async def make() -> Journal:
            bring_up_to_date(folder / "gradwire.db", Segments(folder / "journal"))
            return await Journal.open(folder, segment_bytes=500)

        self.journal = self.do(make())

    @property
    def applied(self) -> int:
        return next((seq - 1 for seq in range(1, self.accepted + 2) if seq not in self.answered), self.accepted)

    @rule(size=sizes)
    def accept(self, size: int) -> None:
        seq = self.accepted + 1
        payload = bytes([seq % 256]) * size
        self.do(append(self.journal, operation(self.run_id, seq, size=size), payload))
        self.payloads[seq], self.accepted = payload, seq
        self.known.add(seq)
        if size:
            self.kept.add(seq)

    @rule(ahead=st.integers(2, 5))
    def a_gap_is_refused(self, ahead: int) -> None:
        with pytest.raises(LookupError):
            self.do(append(self.journal, operation(self.run_id, self.accepted + ahead, size=3), b"abc"))

    @rule()
    def a_full_disk_refuses(self) -> None:
        def full(segments: Segments) -> None:
            raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Segments, "sync", full)
            with pytest.raises(ServiceError, match="disk is full"):
                self.do(append(self.journal, operation(self.run_id, self.accepted + 1, size=3), b"abc"))

    @precondition(lambda self: len(self.answered) < self.accepted)
    @rule(size=sizes)
    def answer(self, size: int) -> None:
        seq = self.applied + 1
        self.do(self.put(seq, bytes([255 - seq % 256]) * size))
        self.answers[seq] = bytes([255 - seq % 256]) * size
        self.answered.add(seq)

    @precondition(lambda self: self.applied + 1 < self.accepted)
    @rule(data=st.data())
    def a_result_before_its_turn_is_refused(self, data: st.DataObject) -> None:
        with pytest.raises(LookupError, match="has no result"):
            self.do(self.put(data.draw(st.integers(self.applied + 2, self.accepted)), b"early"))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer_again(self, data: st.DataObject) -> None:
        self.do(self.put(data.draw(st.sampled_from(sorted(self.answers))), b"another"))

    async def put(self, seq: int, payload: bytes) -> None:
        await self.journal.put_result(
            self.run_id, pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED), [payload], MARKS
        )

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        up_to = data.draw(st.integers(0, self.applied))
        self.do(self.wait(self.journal.release(self.run_id, up_to)))
        self.released = max(self.released, up_to)
        self.answers = {seq: payload for seq, payload in self.answers.items() if seq > up_to}

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        up_to = data.draw(st.integers(0, self.applied))
        self.do(self.wait(self.journal.retention.trim(self.run_id, up_to)))
        self.kept = {seq for seq in self.kept if seq > up_to}
        self.known = {seq for seq in self.known if seq > min(up_to, self.released)}

    async def wait(self, future: asyncio.Future[T]) -> T:
        return await future

    @rule()
    def collect(self) -> None:
        self.do(self.journal.retention.collect())

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        """A crash is a copy of the files as they are, without a word of farewell."""
        self.generation += 1
        old, new = self.root / str(self.generation - 1), self.root / str(self.generation)
        if cleanly:
            self.do(self.journal.close())
        shutil.copytree(old, new, ignore=shutil.ignore_patterns("*-shm"))
        if not cleanly:
            self.do(self.journal.close())
        shutil.rmtree(old)
        self.open(new)

    @invariant()
    def everything_is_there(self) -> None:
        entries = {entry.header.seq: entry for entry in self.do(self.journal.entries(self.run_id, 0, 10**6))}
        assert set(entries) == self.known
        for seq, entry in entries.items():
            assert not entry.damaged and (entry.status != 0) == (seq in self.answered)
            assert (entry.location is not None) == (seq in self.kept)
            if entry.location is not None:
                assert self.do(self.journal.payload(entry.location)) == self.payloads[seq]
        results = self.do(self.journal.results(self.run_id, 1, 10**6, limit=10**6))
        assert {result.header.seq: bytes(result.payload) for result in results} == self.answers
        assert all(result.header.status == pb.STATUS_SUCCEEDED for result in results)

    def teardown(self) -> None:
        self.do(self.journal.close())
        self.loop.close()
        shutil.rmtree(self.root)


CALM = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.long
def test_the_journal_is_what_its_model_says() -> None:
    run_state_machine_as_test(
        JournalMachine,
        settings=settings(max_examples=15, stateful_step_count=25, **CALM),  # type: ignore[arg-type]
    )


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_the_journal_is_what_its_model_says_for_a_long_time() -> None:
    run_state_machine_as_test(
        JournalMachine,
        settings=settings(max_examples=300, stateful_step_count=60, **CALM),  # type: ignore[arg-type]
    )


# ------------------------------------------------------------------ order, failures, what follows them

KINDS = ("fine", "fails", "step", "failing step")
Plan = list[tuple[str, int]]
plans = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30)), min_size=1, max_size=30)


def expected(plan: Plan) -> list[str]:
    """What becomes of each operation (kind, newest failure that its submitter had seen)."""
    results, failure = [], 0
    for seq, (kind, seen) in enumerate(plan, 1):
        if failure and seen < failure:
            results.append(f"aborted by {failure}")
            failure = 0 if "step" in kind else failure
        elif kind.startswith("fail"):
            results.append("failed")
            failure = seq
        else:
            results.append("ok")
            failure = 0
    return results


def pending(loop: asyncio.AbstractEventLoop, seq: int, kind: str, seen: int, content: str = "") -> QueuedOperation:
    operation = pb.Operation(forward_backward=pb.LossCall(loss_fn=content or kind))
    if "step" in kind:
        operation = pb.Operation(optim_step=pb.OptimStep(learning_rate=0.5 if content else 0.1))
    header = pb.OperationHeader(run_id="run-a", seq=seq, operation=operation, failure_seen=seen, epoch=1)
    return QueuedOperation(header, identity(header), (), 0.0, loop.create_future())


async def test_behind_an_operation_that_could_not_be_written_nothing_goes_to_the_engine() -> None:
    """Else it would wait for the result of a number that is free again, and keep that number from the engine."""
    loop, limits = asyncio.get_running_loop(), Limits()
    record = RunRecord("run-a", "", pb.RunConfig(), 0.0, engine_pb2.EngineCreateRun(), epoch=1)
    queue = RunQueue(record, limits, Usage("", limits, lambda owner: Quota()), lambda: None)
    first, second = pending(loop, 1, "fb", 0), pending(loop, 2, "fb", 0)
    for each in (first, second):
        queue.offer(each)
    for each in queue.admit():
        each.may_be_early = True
        queue.send(each)
    assert queue.is_next(first) and queue.is_next(second)
    queue.refuse(first, OSError("full"))
    assert queue.is_first(second) and not queue.is_next(second)
    assert isinstance(first.ack.exception(), OSError)
    again = pending(loop, 1, "fb", 0)
    queue.offer(again)
    queue.admit()
    assert not queue.is_next(second)


def carried_out(
    plan: Plan, arrivals: list[int], window: int, data: st.DataObject, loop: asyncio.AbstractEventLoop
) -> list[str]:
    """Operations that arrive in this order, with repetitions, some with another content, and are carried out in
    between; what becomes of each."""
    limits = Limits(max_window=window)
    usage = Usage("", limits, lambda owner: Quota())
    record = RunRecord("run-a", "", pb.RunConfig(), 0.0, engine_pb2.EngineCreateRun(), epoch=1)
    queue = RunQueue(record, limits, usage, lambda: None)
    results: dict[int, str] = {}
    offered: set[int] = set()
    todo = list(arrivals)

    def work() -> None:
        while (head := queue.head) is not None:
            result = verdict_on(record, head)
            if result is None:
                failed = plan[head.seq - 1][0].startswith("fail")
                result = pb.OperationResult(seq=head.seq, status=pb.STATUS_FAILED if failed else pb.STATUS_SUCCEEDED)
            cause = result.error.cause_seq
            ok = "ok" if result.status == pb.STATUS_SUCCEEDED else "failed"
            assert head.seq not in results, "carried out twice"
            results[head.seq] = f"aborted by {cause}" if cause else ok
            queue.finish(head, result)

    while todo or len(results) < len(plan):
        seq = todo.pop(0) if todo else queue.next_seq
        if seq > len(plan):
            work()
            continue
        if seq < queue.next_seq and seq not in queue.pending:
            continue  # the scheduler answers from the journal
        kind, seen = plan[seq - 1]
        if seq in offered and data.draw(st.booleans()):
            with pytest.raises(ServiceError) as caught:
                queue.offer(pending(loop, seq, kind, seen, "another"))
            assert caught.value.code == pb.ERROR_CODE_SEQ_REUSED
            continue
        try:
            again = queue.offer(pending(loop, seq, kind, seen))
        except ServiceError as error:
            assert error.code == pb.ERROR_CODE_SEQ_GAP and seq >= queue.next_seq + window
            continue
        assert (again is not None) == (seq in offered)
        offered.add(seq)
        for admitted in queue.admit():
            assert admitted.seq == record.accepted_seq + 1
            assert queue.journaled(admitted, None)
        if data.draw(st.booleans()):
            work()
    work()
    assert (usage.operations, queue.held.bytes) == (0, 0)
    return [results[seq] for seq in range(1, len(plan) + 1)]


@settings(max_examples=150, **CALM)  # type: ignore[arg-type]
@given(plan=plans, window=st.integers(1, 10), data=st.data())
def test_operations_in_any_order_are_carried_out_in_theirs(plan: Plan, window: int, data: st.DataObject) -> None:
    arrivals = data.draw(st.lists(st.integers(1, len(plan)), max_size=60))
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        assert carried_out(plan, arrivals, window, data, loop) == expected(plan)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@settings(max_examples=5000, **CALM)  # type: ignore[arg-type]
@given(plan=plans, window=st.integers(1, 10), data=st.data())
def test_operations_in_any_order_are_carried_out_in_theirs_for_a_long_time(
    plan: Plan, window: int, data: st.DataObject
) -> None:
    arrivals = data.draw(st.lists(st.integers(1, len(plan)), max_size=200))
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        assert carried_out(plan, arrivals, window, data, loop) == expected(plan)
