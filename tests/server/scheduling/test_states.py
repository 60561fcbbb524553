"""The states of operations: what may follow what, and that a run does what a model does that knows no states at all.

The model is a loop over the operations in order of their numbers. The machine drives a real core over an engine without
a model: random kinds, numbers out of order, failures, cancellations, other writers, engines that die, disks that are
full, servers that crash, runs that are deleted.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server import scheduling
from gradwire_server.access.keys import Caller
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.scheduling import results as results_module
from gradwire_server.scheduling.operation import TRANSITIONS, IllegalTransitionError, OperationState, QueuedOperation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from support.fake_engine import FakeEngine
from support.front import describe

T = TypeVar("T")
Transition = tuple[str, str]
ADA = Caller("ada")
KINDS = ("a", "b", "fail", "fail", "die", "step", "step", "save")


def drawn() -> set[Transition]:
    """The transitions in the diagram of docs/architecture.md; "[*]" is where it begins and ends."""
    page = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    diagram = page.partition("stateDiagram-v2")[2].partition("```")[0]
    return set(re.findall(r"^\s*(\w+|\[\*\]) --> (\w+|\[\*\])", diagram, re.MULTILINE))


def allowed() -> set[Transition]:
    return {(state.name, following.name) for state, all_following in TRANSITIONS.items() for following in all_following}


def operation(kind: str, seq: int) -> pb.Operation:
    if kind == "step":
        return pb.Operation(optim_step=pb.OptimStep(learning_rate=0.1))
    if kind == "save":
        return pb.Operation(save_checkpoint=pb.SaveCheckpoint(name=f"s{seq}"))
    return pb.Operation(forward_backward=pb.LossCall(loss_fn=kind))


# ------------------------------------------------------------------ the drawing


def test_the_drawing_shows_what_is_allowed_where_it_begins_and_where_it_ends() -> None:
    ends = {(state.name, "[*]") for state, following in TRANSITIONS.items() if not following}
    assert drawn() == allowed() | ends | {("[*]", "NEW")}
    assert set(TRANSITIONS) == set(OperationState)


@pytest.mark.parametrize("state", OperationState)
def test_a_transition_that_is_not_drawn_raises_and_changes_nothing(state: OperationState) -> None:
    for following in OperationState:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            waiting = QueuedOperation(pb.OperationHeader(seq=3), b"", (), 0.0, loop.create_future())
        waiting.state = state
        if following in TRANSITIONS[state]:
            waiting.enter(following)
            assert waiting.state is following
        else:
            with pytest.raises(IllegalTransitionError, match=f"operation 3 .* {state.name} to {following.name}"):
                waiting.enter(following)
            assert waiting.state is state


QUEUE = ("run_queue.py", "operation.py")


def test_only_the_queue_moves_its_operations() -> None:
    """Others than the queue, and what it calls to apply a result, neither enter states nor set an operation's or a
    queue's attributes."""
    folder = Path(scheduling.__path__[0])
    states = {f"{OperationState.__name__}.{state.name}" for state in OperationState}
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if file.name in QUEUE or not isinstance(node, ast.Call | ast.Assign | ast.AugAssign):
                continue
            if isinstance(node, ast.Call):
                assert not (ast.unparse(node.func).endswith(".enter") and {ast.unparse(a) for a in node.args} & states)
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                assert not re.fullmatch(r"(\w*\.)?(queue|record)\.\w+", ast.unparse(target)), f"{file.name}: {target}"
                assert ast.unparse(target) not in ("operation.state", "operation.retried", "operation.deaths")


# ------------------------------------------------------------------ the model


class Model:
    """A run as a loop: one operation at a time, none of them ever lost, sent twice or early.

    Attributes:
        plan: Kind and newest seen failure of each operation, by number.
        cancelled: Numbers that are cancelled.
    """

    def __init__(self) -> None:
        self.plan: dict[int, tuple[str, int]] = {}
        self.cancelled: set[int] = set()

    def add(self, kind: str, seen: int) -> int:
        seq = len(self.plan) + 1
        self.plan[seq] = (kind, min(seen, seq - 1))
        return seq

    def run(self) -> tuple[list[str], list[str]]:
        """What becomes of each operation, and what the run has done in the end."""
        results, history, failure = list[str](), list[str](), 0
        for seq, (kind, seen) in sorted(self.plan.items()):
            if seq in self.cancelled:
                results.append("cancelled")
            elif failure and seen < failure:
                results.append(f"aborted_predecessor({failure})")
                failure = 0 if kind == "step" else failure
            elif kind in ("fail", "die"):
                results.append("invalid_batch" if kind == "fail" else "quarantined")
                failure = seq
            else:
                results.append("ok")
                failure = 0
                history += [kind] if kind != "save" else []
        return results, history


# ------------------------------------------------------------------ the machine


class Machine(RuleBasedStateMachine):
    """A core and a client that sends again whatever was not acknowledged, beside the model."""

    taken: set[Transition]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root, self.folders = Path(tempfile.mkdtemp()), itertools.count()
        self.do(self.start(self.root / str(next(self.folders))))
        self.do(self.begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def start(self, folder: Path) -> None:
        self.engine = FakeEngine(folder)
        self.core = Core(ServerConfig(state_dir=folder, models={"tiny": "/tiny"}, grace=0), [self.engine])
        await self.core.start()

    async def begin(self) -> None:
        """A new run."""
        self.model, self.acks = Model(), dict[int, "asyncio.Future[pb.SubmitAck]"]()
        self.in_doubt = set[int]()
        self.run_id = (await self.core.runs.create(ADA, pb.RunConfig(base_model="tiny"))).run_id
        self.epoch = (await self.core.open_run(ADA, self.run_id, "ada")).epoch

    def send(self, seq: int) -> None:
        kind, seen = self.model.plan[seq]
        header = pb.OperationHeader(
            run_id=self.run_id, epoch=self.epoch, seq=seq, operation=operation(kind, seq), failure_seen=seen
        )
        self.acks[seq] = self.core.submit(ADA, self.core.receive(ADA, header))
        self.acks[seq].add_done_callback(lambda ack: ack.cancelled() or ack.exception())

    async def cancel(self, seq: int) -> None:
        acknowledged = self.acks[seq].done()
        if (await self.core.cancel(ADA, self.run_id, seq, self.epoch)).cancelled:
            self.model.cancelled.add(seq)
            self.in_doubt |= set() if acknowledged else {seq}

    async def send_again(self) -> None:
        """Sends what was not sent or was refused. Refused operations are not cancelled any more."""
        while True:
            pending = [ack for ack in self.acks.values() if not ack.done() and not self.waits_for_a_gap]
            if pending:
                await asyncio.wait(pending)
            refused = {seq for seq, ack in self.acks.items() if ack.done() and ack.exception() is not None}
            missing = sorted(refused | (set(self.model.plan) - set(self.acks)))
            if not missing:
                return
            self.model.cancelled -= refused
            self.in_doubt -= refused
            for seq in missing:
                self.send(seq)

    @property
    def waits_for_a_gap(self) -> bool:
        return bool(set(self.model.plan) - set(self.acks))

    async def pause(self, moments: int) -> None:
        for _ in range(moments):
            await asyncio.sleep(0)
        if moments > 5:
            await asyncio.sleep(0.005)

    # ---- what a client does

    @rule(
        plan=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40)), min_size=1, max_size=6),
        shuffled=st.randoms(use_true_random=False),
        cancelled=st.lists(st.integers(0, 5), max_size=2),
        moments=st.integers(0, 8),
    )
    def submit(self, plan: list[tuple[str, int]], shuffled: Any, cancelled: list[int], moments: int) -> None:
        """In any order, and cancels some of them at once or soon."""

        async def work() -> None:
            seqs = [self.model.add(kind, seen) for kind, seen in plan]
            order = [*seqs]
            if moments % 2:
                shuffled.shuffle(order)
            for count, seq in enumerate(order):
                self.send(seq)
                if count in cancelled and moments < 4:
                    await self.cancel(seq)
            await self.pause(moments)
            for index in cancelled:
                if index < len(seqs):
                    await self.cancel(seqs[index])

        self.do(work())

    @rule(kind=st.sampled_from(KINDS), cancel=st.booleans())
    def submit_ahead_of_a_number_that_is_missing(self, kind: str, cancel: bool) -> None:
        async def work() -> None:
            self.model.add("a", 0)
            seq = self.model.add(kind, 0)
            self.send(seq)
            if cancel:
                await self.cancel(seq)

        self.do(work())

    @rule()
    def fill_the_gaps(self) -> None:
        self.do(self.send_again())

    @rule(ahead=st.booleans())
    def another_writer_opens(self, ahead: bool) -> None:
        """Perhaps while an operation waits for a number that is missing."""

        async def work() -> None:
            if ahead:
                self.model.add("a", 0)
                self.send(self.model.add("a", 0))
            self.epoch = (await self.core.open_run(ADA, self.run_id, "another", takeover=True)).epoch
            await self.send_again()

        self.do(work())

    # ---- what goes wrong

    @rule(held=st.booleans())
    def hold_the_engine(self, held: bool) -> None:
        (self.engine.gate.clear if held else self.engine.gate.set)()

    @rule(suspect=st.booleans())
    def the_engine_dies(self, suspect: bool) -> None:
        self.engine.die()

    @rule(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), cancel=st.booleans())
    def the_disk_is_full(self, kinds: list[str], cancel: bool) -> None:
        def full() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        async def work() -> None:
            await self.send_again()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.core.storage.journal.segments, "sync", full)
                for kind in kinds:
                    self.send(self.model.add(kind, 0))
                if cancel:
                    await self.cancel(max(self.model.plan))
                await asyncio.wait([self.acks[max(self.model.plan)]])
            await self.send_again()

        self.do(work())

    @rule()
    def the_server_crashes(self) -> None:
        """What is on its disk goes on; the folder is copied by the thread that writes to it, between two commits."""

        async def work() -> None:
            old, folder = self.core, self.root / str(next(self.folders))
            acknowledged = {seq: ack for seq, ack in self.acks.items() if ack.done() and ack.exception() is None}
            state = old.config.state_dir
            ignored = shutil.ignore_patterns("lock", "*-shm")
            await old.storage.journal.store.write(lambda _: shutil.copytree(state, folder, ignore=ignored))
            await old.stop()
            await self.engine.close()
            await self.start(folder)
            self.acks = acknowledged
            self.epoch = (await self.core.open_run(ADA, self.run_id, "ada", takeover=True)).epoch
            await self.send_again()

        self.do(work())

    @rule(
        plan=st.lists(st.sampled_from(KINDS), max_size=5),
        missing=st.integers(0, 5),
        held=st.booleans(),
        moments=st.integers(0, 8),
        cancel=st.booleans(),
    )
    def the_run_is_deleted(self, plan: list[str], missing: int, held: bool, moments: int, cancel: bool) -> None:
        """With operations in every state; another run begins."""

        async def work() -> None:
            self.hold_the_engine(held)
            for count, kind in enumerate(plan):
                seq = self.model.add(kind, 0)
                if count != missing:
                    self.send(seq)
                await self.pause(moments)
            if cancel and self.acks:
                await self.cancel(max(self.acks))
            deleting = asyncio.ensure_future(self.core.runs.delete(ADA, self.run_id))
            await asyncio.sleep(0)
            self.engine.gate.set()
            await deleting
            await self.begin()

        self.do(work())

    # ---- what comes out

    @precondition(lambda self: self.model.plan)
    @rule()
    def everything_is_as_the_model_says(self) -> None:
        async def work() -> list[str]:
            self.engine.gate.set()
            await self.send_again()
            found = list[str]()
            async for results in self.core.results(ADA, self.run_id, 1):
                found += [describe(result.header) for result in results]
                if len(found) == len(self.model.plan):
                    return found
            raise AssertionError("the results ended")

        found = self.do(work())
        self.model.cancelled -= {seq for seq in self.in_doubt if found[seq - 1] != "cancelled"}
        results, history = self.model.run()
        assert found == results
        run = self.engine.runs.get(self.run_id)
        assert run is None or run.history == history

    def teardown(self) -> None:
        if self.model.plan:
            self.everything_is_as_the_model_says()
        self.do(self.core.stop())
        self.do(self.engine.close())
        self.loop.close()
        shutil.rmtree(self.root)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Transition]]:
    """Every transition that an operation goes through."""
    seen: set[Transition] = set()
    enter = QueuedOperation.enter

    def recorded(self: QueuedOperation, state: OperationState) -> None:
        before = self.state
        enter(self, state)
        seen.add((before.name, state.name))

    monkeypatch.setattr(QueuedOperation, "enter", recorded)
    monkeypatch.setattr(results_module, "STORE_AGAIN_S", 0.02)
    yield seen


def play(machine: Callable[[], Machine], examples: int, steps: int) -> None:
    """Play with a machine; what is drawn depends on its seed, or else on chance."""
    calm = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=False, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=calm)


@pytest.mark.long
def test_a_run_is_what_its_model_says_and_goes_through_exactly_what_is_drawn(taken: set[Transition], seed: int) -> None:
    for number in range(10):  # one round takes all transitions nearly always
        play(hypothesis.seed(100 * seed + number)(lambda: Machine()), 25, 25)
        if taken >= allowed():
            break
    assert taken == allowed()


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_run_is_what_its_model_says_for_a_long_time(taken: set[Transition]) -> None:
    play(Machine, 500, 60)
    assert taken == allowed()
