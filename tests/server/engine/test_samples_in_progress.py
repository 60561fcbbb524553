"""A run's samples under way: their order, their random numbers, and what a failure among them undoes."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.registry import get_loss
from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import EngineSettings
from gradwire_server.engine.operations.lifecycle import Answer
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.operations.samples import SamplesInProgress
from gradwire_server.engine.process.loop import Loop
from gradwire_server.engine.process.ranks import Ranks
from support.engine import LocalEngine, loss_call, token_rows
from support.ranks import STEP

PROMPTS = token_rows([[1, 20, 30], [1, 5]], "prompt_ids")
ROWS = token_rows([[1, 20, 30, 40, 50], [1, 9, 8]])


class Looped(LocalEngine):
    """An engine driven by its loop: everything is handed to it at once."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._numbers = itertools.count(1000)
        self._given: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def give(self, run_id: str, columns: Any = None, *, unless_failed: int = 0, **kind: Any) -> int:
        """Queues an operation of a run, or a SampleRequest where the run is ""; its id."""
        number = next(self._numbers)
        message = engine_pb2.EngineRequest(id=number)
        if run_id:
            self.seqs[run_id] += 1
            message.operation.CopyFrom(
                engine_pb2.EngineOperation(
                    run_id=run_id, seq=self.seqs[run_id], operation=pb.Operation(**kind), unless_failed=unless_failed
                )
            )
        else:
            message.sample.CopyFrom(kind["sample"])
            message.tells_start = True
        self._given.put(Request(message, columns or {}, None))
        return number

    def give_create(self, run_id: str, **config: Any) -> int:
        """Queues the making of a run; its id."""
        settings = pb.RunConfig(base_model="tiny", **config)
        create = engine_pb2.EngineCreateRun(run_id=run_id, config=settings)
        message = engine_pb2.EngineRequest(id=next(self._numbers), create_run=create)
        self._given.put(Request(message, {}, None))
        return message.id

    def work(self) -> dict[int, Answer]:
        """Answers by id, in the order in which they came; beside them the ids of ``started``."""
        self._given.put(Request(engine_pb2.EngineRequest(id=1, shutdown={}), {}, None))
        answers: dict[int, Answer] = {}
        self.started: dict[int, int] = {}

        def take(answer: Answer) -> None:
            if answer.reply.HasField("sample_frame"):
                self.started[answer.reply.id] = len(answers)
            else:
                answers[answer.reply.id] = answer

        Loop(
            self.context.decisions,
            self.engine,
            SamplesInProgress(self.context),
            self._given,
            Ranks(EngineSettings()),
            take,
            nullcontext,
        ).run()
        return answers


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path) -> Iterator[Looped]:
    engine = Looped({"tiny": tiny_model_path}, tmp_path)
    engine.create("run-a", seed=1, lora={"rank": 4, "dropout": 0.2})
    engine.create("run-b", seed=2, lora={"rank": 4})
    yield engine


def call(tokens: int = 6, **settings: Any) -> pb.SampleCall:
    return pb.SampleCall(**{"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True} | settings)


def told(answer: Answer) -> list[list[float]]:
    payload = b"".join(answer.buffers)
    columns = codec.decode(list(answer.reply.result.tensors), payload)
    return [columns[name].values.tolist() for name in ("token_ids", "logprobs")]


def generator(engine: LocalEngine, run_id: str) -> torch.Tensor:
    return engine.context.runs[run_id].rng_tensors()["cpu"]


def rows_of(loss: str) -> tuple[dict[str, codec.Column], pb.LossCall]:
    """150 rows and a call of their loss; "bco" is one of the whole batch, and has a reference."""
    rows = token_rows([[1, 20 + row % 40, 30, 5 + row % 20, 9, 8] for row in range(150)])
    if loss == "bco":
        rows["label"] = codec.Column(np.arange(150, dtype=np.float32) % 2)
        return rows, loss_call(get_loss(loss), {"reference_model": "base"})
    return rows, pb.LossCall(loss_fn=loss)


@pytest.mark.long
@pytest.mark.parametrize("loss", [pytest.param("causal_lm", marks=pytest.mark.slow), "bco"])
def test_samples_go_on_between_the_micro_batches_of_a_batch(loss: str, tiny_model_path: Path, tmp_path: Path) -> None:
    engine = Looped({"tiny": tiny_model_path}, tmp_path, microbatch_tokens=8)
    rows, asked_loss = rows_of(loss)
    asked = pb.SampleRequest(model="tiny", call=call(20, seed=1), prompt_ids=[pb.TokenIds(ids=[1, 2])])
    told_of: list[Any] = []
    for name in ("alone", "beside"):
        engine.create(name, seed=1, lora={"rank": 4, "dropout": 0.2})
        ids = [engine.give(name, rows, forward_backward=asked_loss)]
        if name == "beside":
            ids.insert(0, engine.give("", sample=asked))
        answers = engine.work()
        assert list(answers) == [*ids, 1], "20 tokens are there before 150 micro-batches"
        result = answers[ids[-1]].reply.result
        assert result.loss.num_microbatches > 100
        told_of.append((result.loss, engine.do(name, optim_step=STEP).proto.optim_step))
    assert told_of[0] == told_of[1]


@pytest.mark.long
def test_drafts_between_micro_batches_change_no_bit(tiny_model_path: Path, tmp_path: Path) -> None:
    rows, asked_loss = rows_of("causal_lm")
    # With these biases a random model repeats itself.
    bias = [pb.LogitBias(token_id=token, bias=30.0) for token in range(5, 9)]
    asked = pb.SampleRequest(
        model="tiny", call=call(50, seed=1, n=2, temperature=0.3, logit_bias=bias),
        prompt_ids=[pb.TokenIds(ids=[1, 5, 6, 7, 8, 5, 6])],
    )  # fmt: skip
    found = []
    for speculate in ("auto", "off"):
        engine = Looped({"tiny": tiny_model_path}, tmp_path / speculate, microbatch_tokens=8, speculate=speculate)
        engine.create("run-a", seed=1, lora={"rank": 4})
        ids = [engine.give("", sample=asked), engine.give("run-a", rows, forward_backward=asked_loss)]
        answers = engine.work()
        assert next(iter(answers)) == ids[0], "the samples are there before the micro-batches"
        assert (answers[ids[0]].reply.result.sample.num_accepted_tokens > 3) == (speculate == "auto")
        found.append((told(answers[ids[0]]), answers[ids[1]].reply.result.loss))
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("loss", [pytest.param("causal_lm", marks=pytest.mark.slow), "bco"])
def test_small_operations_go_between_the_micro_batches_of_a_large_one(
    loss: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    engine = Looped({"tiny": tiny_model_path}, tmp_path, microbatch_tokens=8)
    rows, asked_loss = rows_of(loss)
    large, causal = {"forward_backward": asked_loss}, {"forward_backward": pb.LossCall(loss_fn="causal_lm")}
    small: list[dict[str, Any]] = [causal, {"optim_step": STEP}, causal, {"optim_step": STEP}]
    told_of = []
    for together in (True, False):
        names = [f"{name}-{together}" for name in ("large", "small")]
        for name in names:
            engine.create(name, seed=1, lora={"rank": 4, "dropout": 0.2})
        ids = [engine.give(names[0], rows, **large)]
        answers = {} if together else engine.work()
        others = [engine.give(names[1], ROWS if "optim_step" not in each else None, **each) for each in small]
        answers |= engine.work()
        assert list(answers)[:5] == ([*others, *ids] if together else [ids[0], 1, *others[:3]])
        results = [answers[number].reply.result for number in (*ids, *others)]
        figures: list[Any] = [(result.status, result.loss, result.optim_step) for result in results]
        figures.append(engine.do(names[0], optim_step=STEP).proto.optim_step)
        told_of.append([*figures, *(engine.logprobs(name, ROWS).tolist() for name in names)])
    assert told_of[0] == told_of[1]


@pytest.mark.long
def test_a_run_is_made_between_the_micro_batches_of_a_large_operation(tiny_model_path: Path, tmp_path: Path) -> None:
    engine = Looped({"tiny": tiny_model_path}, tmp_path, microbatch_tokens=8)
    rows, asked_loss = rows_of("causal_lm")
    told_of = []
    for together in (True, False):
        first, made = f"first-{together}", f"made-{together}"
        engine.create(first, seed=1, lora={"rank": 4, "dropout": 0.2})
        large = engine.give(first, rows, forward_backward=asked_loss)
        answers = {} if together else engine.work()
        create = engine.give_create(made, seed=5, lora=pb.LoraSettings(rank=3))
        answers |= engine.work()
        assert (list(answers).index(create) < list(answers).index(large)) == together
        engine.seqs[made] = 0
        steps = [engine.train(made, ROWS), engine.do(first, optim_step=STEP).proto.optim_step.grad_norm]
        told_of.append([answers[large].reply.result.loss, *steps, engine.logprobs(made, ROWS).tolist()])
    assert told_of[0] == told_of[1]


def test_samples_among_others_are_what_they_are_alone(engine: Looped) -> None:
    alone = [engine.do("run-a", PROMPTS, sample=call(tokens)) for tokens in (9, 4, 12)]
    before = generator(engine, "run-a")
    engine.create("run-a", seed=1, lora={"rank": 4, "dropout": 0.2})
    ids = [engine.give("run-a", PROMPTS, sample=call(tokens)) for tokens in (9, 4, 12)]
    step = engine.give("run-a", zero_grad=pb.ZeroGrad())
    for _ in range(4):
        engine.give("run-b", ROWS, forward_backward=pb.LossCall(loss_fn="causal_lm"))
    engine.give("", sample=pb.SampleRequest(model="tiny", call=call(20), prompt_ids=[pb.TokenIds(ids=[1, 2])]))
    answers = engine.work()
    assert {answer.reply.result.status for answer in list(answers.values())[:-1]} == {pb.STATUS_SUCCEEDED}
    assert [told(answers[number]) for number in ids] == [
        [result.columns[name].values.tolist() for name in ("token_ids", "logprobs")] for result in alone
    ]
    assert [number for number in answers if number in ids or number == step] == [*ids, step]
    assert torch.equal(generator(engine, "run-a"), before)


def test_samples_outside_runs_share_their_steps(engine: Looped) -> None:
    asked = [
        pb.SampleRequest(model="tiny", call=call(tokens, seed=tokens), prompt_ids=[pb.TokenIds(ids=[1, tokens])])
        for tokens in (5, 9, 7)
    ]
    steps = []
    sampler = engine.context.sampler
    step = sampler.step
    sampler.step = lambda: (steps.append(len(sampler.turn())), step())  # type: ignore[method-assign]
    ids = [engine.give("", sample=request) for request in asked]
    answers = engine.work()
    assert steps == [3] * 5 + [2] * 2 + [1] * 2
    sampler.step = step  # type: ignore[method-assign]
    for number, request in zip(ids, asked, strict=True):
        reply, payload = engine.request(sample=request)
        alone = codec.decode(list(reply.result.tensors), payload)
        tokens, logprobs = told(answers[number])
        assert alone["token_ids"].values.tolist() == tokens
        assert alone["logprobs"].values.tolist() == pytest.approx(logprobs, abs=1e-4)


def test_a_request_is_said_to_start_when_it_has_room(tiny_model_path: Path, tmp_path: Path) -> None:
    engine = Looped({"tiny": tiny_model_path}, tmp_path, sampling_cache=1)
    prompt = [pb.TokenIds(ids=[1, 2])]
    waiting = [pb.SampleRequest(model="tiny", call=call(tokens, seed=1), prompt_ids=prompt) for tokens in (9, 5, 7)]
    scored = pb.SampleRequest(model="tiny", call=call(prompt_logprobs=True, max_tokens=0), prompt_ids=prompt)
    ids = [engine.give("", sample=request) for request in (*waiting, scored)]
    answered = list(engine.work())
    assert engine.started == {ids[3]: 0, ids[1]: 0, ids[2]: 2, ids[0]: 3}, "behind so many answers of others"
    assert answered[:4] == [ids[3], ids[1], ids[2], ids[0]]


def test_a_checkpoint_that_is_sampled_from_stays_in_memory(tiny_model_path: Path, tmp_path: Path) -> None:
    engine = Looped({"tiny": tiny_model_path}, tmp_path, reference_cache_gib=2**-30)
    requests = []
    for run_id in ("run-a", "run-b"):
        engine.create(run_id, seed=1, lora={"rank": 4})
        engine.train(run_id, ROWS)
        engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now"))
        prompt = [pb.TokenIds(ids=[1, 2, 3])]
        requests.append(pb.SampleRequest(model=f"{run_id}/now", call=call(8, seed=3), prompt_ids=prompt))
    alone = []
    for request in requests:
        reply, payload = engine.request(sample=request)
        alone.append(codec.decode(list(reply.result.tensors), payload)["token_ids"].values.tolist())
    ids = [engine.give("", sample=request) for request in requests]
    answers = engine.work()
    assert [told(answers[number])[0] for number in ids] == alone


def test_a_sample_without_a_seed_depends_on_its_number_and_moves_no_generator(engine: Looped) -> None:
    before = generator(engine, "run-a")
    first, second = (engine.do("run-a", PROMPTS, sample=call()) for _ in range(2))
    assert torch.equal(generator(engine, "run-a"), before)
    engine.create("run-c", seed=1, lora={"rank": 4, "dropout": 0.2})
    engine.do("run-c", zero_grad=pb.ZeroGrad())  # in the first one's place, as in a recovery that leaves it out
    again = engine.do("run-c", PROMPTS, sample=call())
    tokens = [each.columns["token_ids"].values.tolist() for each in (first, second, again)]
    assert tokens[1] == tokens[2] != tokens[0]


def test_a_failed_sample_leaves_those_around_it_alone(engine: Looped) -> None:
    ids = [
        engine.give("run-a", PROMPTS, sample=call(9)),
        engine.give("run-a", token_rows([[1, 9999]], "prompt_ids"), sample=call()),
        engine.give("run-a", PROMPTS, sample=call(3, seed=5)),
        engine.give("run-a", PROMPTS, sample=call()),
    ]
    answers = engine.work()
    statuses = [answers[number].reply.result.status for number in ids]
    assert statuses == [pb.STATUS_SUCCEEDED, pb.STATUS_FAILED, pb.STATUS_SUCCEEDED, pb.STATUS_SUCCEEDED]
    assert [number for number in answers if number in ids] == ids


def test_a_failure_takes_back_what_was_not_to_begin_then(engine: Looped, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.do("run-a", PROMPTS, sample=call())
    expected = generator(engine, "run-a")
    engine.create("run-a", seed=1, lora={"rank": 4, "dropout": 0.2})
    begin = engine.context.sampler.begin
    count = itertools.count(1)

    def second_breaks(*args: Any, **kwargs: Any) -> Any:
        job = begin(*args, **kwargs)
        if next(count) == 2:
            job.prompts = [()]  # the prefill cannot take an empty prompt
        return job

    monkeypatch.setattr(engine.context.sampler, "begin", second_breaks)
    first = engine.give("run-a", PROMPTS, sample=call())
    broken = engine.give("run-a", token_rows([[1, 2]], "prompt_ids"), sample=call())
    dependent = engine.give("run-a", PROMPTS, unless_failed=1, sample=call())
    regardless = engine.give("run-a", PROMPTS, sample=call(seed=1))
    also_dependent = engine.give("run-a", unless_failed=2, zero_grad=pb.ZeroGrad())
    answers = engine.work()
    assert answers[first].reply.result.status == pb.STATUS_SUCCEEDED
    assert answers[broken].reply.result.status == pb.STATUS_FAILED
    assert answers[dependent].reply.HasField("not_started")
    assert answers[regardless].reply.result.status == pb.STATUS_SUCCEEDED
    assert answers[also_dependent].reply.HasField("not_started")
    assert torch.equal(generator(engine, "run-a"), expected)
