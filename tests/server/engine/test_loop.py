"""The engine's loop: who is next, and who waits for whom. The engine here is a list of what it was asked."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import EngineSettings
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.interruption import give_way
from gradwire_server.engine.operations.decisions import Decision, Decisions
from gradwire_server.engine.operations.lifecycle import Answer
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.process.loop import Loop
from gradwire_server.engine.process.ranks import Ranks
from gradwire_server.engine.scoring.memory import Memory


class Stage:
    """An engine whose samples take as many steps as their ``max_tokens``; ``log`` is what happened, in order.

    A step takes a second. Another request takes as many as it has micro-batches, by number of the request; one.
    """

    gives_way = True

    def __init__(self, micro_batches: Mapping[int, int] | None = None) -> None:
        self.micro_batches, self.clock = micro_batches or {}, 0.0
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.log: list[str] = []
        self.arrivals: dict[int, list[Request]] = {}
        self.under_way: list[tuple[engine_pb2.EngineRequest, list[int]]] = []
        self.steps = 0

    # the engine

    def execute(self, decision: Decision) -> Iterator[Answer]:
        for request in decision.requests:
            for _ in range(self.micro_batches.get(request.message.id, 1)):
                give_way()
                self.log.append(f"do {request.message.id}")
                self.clock += 1.0
            yield Answer(engine_pb2.EngineReply(id=request.message.id), [])

    def now(self, *, settled: bool) -> float:
        assert settled == bool(self.under_way)
        return self.clock

    # its samples

    def __len__(self) -> int:
        return len(self.under_way)

    def of(self, run_id: str) -> bool:
        return any(message.operation.run_id == run_id for message, _ in self.under_way)

    def begin(self, decision: Decision, request: Request) -> list[Answer]:
        message = request.message
        self.log.append(f"begin {message.id}")
        call = message.sample.call if message.HasField("sample") else message.operation.operation.sample
        if call.prompt_logprobs:  # which takes seconds, and lets others go on
            self.clock += 1.0
            give_way()
        self.under_way.append((message, [call.max_tokens]))
        return []

    def messages(self) -> list[engine_pb2.EngineRequest]:
        return [message for message, _ in self.under_way]

    def step(self, decision: Decision) -> None:
        self.log.append("step")
        self.steps += 1
        self.clock += 1.0
        for _, left in self.under_way:
            left[0] -= 1
        for request in self.arrivals.pop(self.steps, []):
            self.requests.put(request)

    def finished(self) -> list[Answer]:
        ended = [message for message, left in self.under_way if left[0] <= 0]
        self.under_way = [entry for entry in self.under_way if entry[1][0] > 0]
        return [Answer(engine_pb2.EngineReply(id=message.id), []) for message in ended]

    # the loop

    def run(self, *requests: Request, decisions: Decisions | None = None) -> list[str]:
        for request in requests:
            self.requests.put(request)
        stage: Any = self
        Loop(decisions or First(), stage, stage, self.requests, Ranks(EngineSettings()), self.told, nullcontext).run()
        return self.log

    def told(self, answer: Answer) -> None:
        self.log.append(f"told {answer.reply.id}")


class First(Decisions):
    """The first ready request is executed; those with these numbers are small."""

    def __init__(self, *small: int) -> None:
        super().__init__(Memory(torch.device("cpu")), {}, Agreement())
        self._small = small

    def is_small(self, request: Request) -> bool:
        return request.message.id in self._small


class Pairs(First):
    """Steps of two runs go together, the last first."""

    def execute(self, ready: Sequence[Request]) -> Decision:
        steps = [request for request in ready if request.message.operation.operation.HasField("optim_step")]
        return replace(super().execute(ready), requests=steps[1::-1]) if steps else super().execute(ready)


def ask(number: int, **kind: Any) -> Request:
    return Request(engine_pb2.EngineRequest(id=number, **kind), {}, None)


def operation(number: int, run_id: str, **kind: Any) -> Request:
    return ask(number, operation=engine_pb2.EngineOperation(run_id=run_id, seq=number, operation=pb.Operation(**kind)))


def step(number: int, run_id: str) -> Request:
    return operation(number, run_id, optim_step=pb.OptimStep())


def sample(number: int, run_id: str = "", tokens: int = 3) -> Request:
    call = pb.SampleCall(max_tokens=tokens)
    return operation(number, run_id, sample=call) if run_id else ask(number, sample=pb.SampleRequest(call=call))


END = ask(99, shutdown=engine_pb2.EngineShutdown())


def test_without_samples_requests_go_one_after_another() -> None:
    log = Stage().run(step(1, "a"), step(2, "b"), step(3, "a"), END)
    assert log == [f"{what} {number}" for number in (1, 2, 3, 99) for what in ("do", "told")]


def test_steps_of_samples_alternate_with_other_runs() -> None:
    log = Stage().run(sample(1, "a", tokens=3), step(2, "b"), step(3, "b"), step(4, "b"), step(5, "b"), END)
    assert log == [
        "begin 1", "step", "do 2", "told 2", "step", "do 3", "told 3", "step", "told 1", "do 4", "told 4",
        "do 5", "told 5", "do 99", "told 99",
    ]  # fmt: skip


def test_samples_get_half_of_the_time_of_a_long_operation() -> None:
    log = Stage({2: 4}).run(sample(1, "a", tokens=4), step(2, "b"), END)
    assert log[:8] == ["begin 1", "step", "do 2", "do 2", "step", "do 2", "step", "do 2"]
    assert log[8:] == ["told 2", "step", "told 1", "do 99", "told 99"]


def test_samples_begin_between_the_micro_batches_of_an_operation() -> None:
    stage = Stage({2: 5})
    stage.arrivals = {2: [sample(3, "b"), sample(4, "c", tokens=1), step(5, "c"), sample(6, tokens=2), END]}
    log = stage.run(sample(1, "a", tokens=4), step(2, "b"))
    within = [line for line in log[log.index("do 2") : log.index("told 2")] if line != "do 2"]
    assert within == ["step", "begin 4", "begin 6", "step", "told 4", "step", "told 1", "told 6"]
    assert log.index("told 2") < log.index("begin 3") < log.index("do 99")  # its run waits
    assert log.index("told 2") < log.index("do 5")  # only samples go before


def test_small_operations_of_other_runs_go_between_the_micro_batches_of_a_large_one() -> None:
    given = [step(1, "a"), step(2, "b"), step(3, "a"), step(4, "c"), step(5, "b"), END]
    log = Stage({1: 5}).run(*given, decisions=First(2, 3, 5))
    assert log[:10] == ["do 1", "do 2", "told 2", "do 1", "do 5", "told 5", "do 1", "do 1", "do 1", "told 1"]
    assert log[10:] == ["do 3", "told 3", "do 4", "told 4", "do 99", "told 99"]  # its own run's, and a large one


def test_samples_and_small_operations_share_half_of_the_time() -> None:
    log = Stage({2: 6}).run(
        sample(1, "a", tokens=3), step(2, "b"), step(3, "c"), step(4, "c"), END, decisions=First(3, 4)
    )
    within = [line for line in log[log.index("do 2") : log.index("told 2")] if not line.startswith("told")]
    assert within == ["do 2", "do 2", "step", "do 3", "do 2", "do 2", "step", "do 4", "do 2", "do 2"]


def test_a_request_is_executed_once_where_one_before_it_lets_others_go_on() -> None:
    scored = sample(1, "a", tokens=1)
    scored.message.operation.operation.sample.prompt_logprobs = True
    log = Stage().run(scored, sample(2, "b", tokens=1), sample(3, "c", tokens=1), step(4, "d"), END, decisions=First(4))
    assert log[:4] == ["begin 1", "begin 2", "begin 3", "step"]
    assert {number: log.count(f"told {number}") for number in (1, 2, 3, 4)} == dict.fromkeys((1, 2, 3, 4), 1)


def test_time_that_nobody_wanted_is_not_saved_up() -> None:
    stage = Stage({3: 9})
    stage.arrivals = {5: [step(3, "a"), step(4, "a"), END]}
    log = stage.run(sample(2, "b", tokens=7))
    assert log[:7] == ["begin 2", *["step"] * 5, "do 3"], "an operation owes samples nothing for the time before it"
    assert log[7:12] == ["do 3", "step", "do 3", "step", "told 2"]
    assert log[12:] == [*["do 3"] * 6, "told 3", "do 4", "told 4", "do 99", "told 99"]


def test_a_run_waits_for_its_samples_and_others_do_not() -> None:
    stage = Stage()
    log = stage.run(step(1, "a"), sample(2, "a", tokens=2), sample(3, "a", tokens=3), step(4, "a"), step(5, "b"), END)
    assert log.index("told 1") < log.index("begin 2") < log.index("begin 3") < log.index("told 5")
    assert log.index("told 5") < log.index("told 3") < log.index("do 4") < log.index("do 99")


def test_a_run_whose_images_are_being_read_waits_and_others_do_not() -> None:
    reading: Future[None] = Future()
    stage = Stage()
    told, stage.told = stage.told, lambda answer: (told(answer), answer.reply.id == 4 and reading.set_result(None))
    log = stage.run(replace(step(1, "a"), images=reading), step(2, "a"), sample(3, "b", 1), step(4, "c"), END)
    assert [line for line in log if line.startswith("told")] == ["told 3", "told 4", "told 1", "told 2", "told 99"]


def test_a_sample_behind_another_operation_of_its_run_waits_for_it() -> None:
    log = Stage().run(sample(1, "a", tokens=1), step(2, "a"), sample(3, "a"), sample(4, "b"), END)
    assert log.index("begin 4") < log.index("do 2") < log.index("begin 3")


def test_samples_join_those_under_way() -> None:
    stage = Stage()
    stage.arrivals = {2: [sample(2, "b", tokens=1), sample(3, tokens=9)], 4: [END]}
    log = stage.run(sample(1, tokens=4))
    assert log[:7] == ["begin 1", "step", "step", "begin 2", "begin 3", "step", "told 2"]
    assert log[-3:] == ["told 3", "do 99", "told 99"]


def test_runs_are_made_and_dropped_in_their_order() -> None:
    drop = ask(3, drop_run=engine_pb2.EngineDropRun(run_id="a"))
    make = ask(4, create_run=engine_pb2.EngineCreateRun(run_id="a"))
    log = Stage().run(sample(1, "a", tokens=2), sample(2, "a", tokens=4), drop, make, step(5, "a"), step(6, "b"), END)
    order = [log.index(what) for what in ("told 6", "told 2", "do 3", "do 4", "do 5", "do 99")]
    assert order == sorted(order)


def test_those_that_go_together_are_told_each_as_it_is_done() -> None:
    stage = Stage()
    log = stage.run(step(1, "a"), step(2, "a"), step(3, "b"), sample(4, "b", tokens=1), END, decisions=Pairs())
    assert log[:4] == ["do 3", "told 3", "do 1", "told 1"]
    assert log.index("do 2") > 3 and "begin 4" in log
    assert log[-2:] == ["do 99", "told 99"]
