"""Operations of several runs at once: each gets what it gets alone, and nobody else's trouble."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import LossConfig, get_loss
from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.operations.decisions import GROUP_TOKENS
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.scoring import forward as together
from gradwire_server.engine.training import columns as reading
from support.engine import Columns, LocalEngine, Result, token_rows

STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0)
ROWS = [[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60]]


def loss_call(loss_fn: str, *outputs: str, skip_nonfinite: bool = False, **kwargs: Any) -> pb.LossCall:
    kwargs_json = json.dumps(kwargs)
    return pb.LossCall(loss_fn=loss_fn, loss_kwargs_json=kwargs_json, outputs=outputs, skip_nonfinite=skip_nonfinite)


@dataclass(frozen=True)
class Work:
    """What a run is, and what it asks for."""

    config: dict[str, Any]
    call: pb.LossCall
    columns: Columns


PAIRS = token_rows(ROWS, "chosen_input_ids") | token_rows([[1, 3], [1, 4, 5], [1, 6, 7]], "rejected_input_ids")
WORK = {
    "run-sft": Work({"lora": 4}, loss_call("causal_lm", "logprobs", "entropy"), token_rows(ROWS)),
    "run-dpo": Work({"lora": {"rank": 2, "alpha": 3.0}}, loss_call("dpo", "logprobs", reference_model="base"), PAIRS),
    "run-reward": Work({"lora": 8, "head": "reward"}, loss_call("reward_modeling", "rewards"), PAIRS),
    "run-few": Work(
        {"lora": {"rank": 3, "target_modules": ["q_proj", "down_proj"]}},
        loss_call("causal_lm"),
        token_rows([[1, 2, 3]]),
    ),
}


class Engines:
    """The same runs in two engines: one answers together, the other one after another."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.alone = LocalEngine({"tiny": model}, folder / "alone")
        self.together = LocalEngine({"tiny": model}, folder / "together")
        self.group(self.together)

    def group(self, engine: LocalEngine, tokens: int = GROUP_TOKENS["cpu"]) -> None:
        """Let this engine answer together."""
        self.together = engine
        engine.context.decisions.group_tokens = tokens

    def create(self, work: dict[str, Work]) -> None:
        for seed, (run_id, each) in enumerate(work.items()):
            for engine in (self.alone, self.together):
                engine.create(run_id, seed=seed, **each.config)
                engine.train(run_id, token_rows(ROWS))  # so that B of the adapter is not zero

    def ask_alone(self, work: dict[str, Work]) -> dict[str, Result]:
        return {
            run_id: self.alone.op(run_id, each.columns, forward_backward=each.call) for run_id, each in work.items()
        }

    def ask_together(self, work: dict[str, Work]) -> dict[str, Result]:
        requests = [self.request(number, run_id, each) for number, (run_id, each) in enumerate(work.items(), start=1)]
        decision = self.together.context.decisions.execute(requests)
        assert len(decision.requests) == len(requests)
        names, found = dict(enumerate(work, start=1)), {}
        for answer in self.together.engine.execute(decision):
            payload = b"".join(answer.buffers)
            result = answer.reply.result
            found[names[answer.reply.id]] = Result(result, codec.decode(list(result.tensors), payload))
        assert found.keys() == work.keys()
        return found

    def request(self, number: int, run_id: str, work: Work, **kind: Any) -> Request:
        self.together.seqs[run_id] += 1
        operation = pb.Operation(**(kind or {"forward_backward": work.call}))
        asked = engine_pb2.EngineOperation(run_id=run_id, seq=self.together.seqs[run_id], operation=operation)
        return Request(engine_pb2.EngineRequest(id=number, operation=asked), work.columns, None)

    def assert_same_steps(self, run_ids: Any) -> None:
        for run_id in run_ids:
            alone, grouped = (
                engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm for engine in (self.alone, self.together)
            )
            assert grouped == pytest.approx(alone, rel=1e-4), run_id
            logprobs = [engine.logprobs(run_id, token_rows(ROWS)) for engine in (self.alone, self.together)]
            np.testing.assert_allclose(*logprobs, atol=1e-4)


def assert_same(grouped: Result, alone: Result) -> None:
    assert grouped.ok and alone.ok, (grouped.proto.error, alone.proto.error)
    mine, theirs = grouped.proto.loss, alone.proto.loss
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-6)
    assert dict(mine.metrics) == pytest.approx(dict(theirs.metrics), rel=1e-4, abs=1e-5)
    counts = ("num_sequences", "num_tokens", "num_loss_tokens", "num_microbatches", "recomputed", "warnings")
    assert [getattr(mine, name) for name in counts] == [getattr(theirs, name) for name in counts]
    assert grouped.proto.seq == alone.proto.seq
    assert grouped.columns.keys() == alone.columns.keys()
    for name, column in alone.columns.items():
        np.testing.assert_allclose(grouped.columns[name].values, column.values, rtol=1e-4, atol=1e-5)
        assert [list(level) for level in grouped.columns[name].levels] == [list(level) for level in column.levels]


@pytest.fixture
def engines(tiny_model_path: Path, tmp_path: Path) -> Engines:
    return Engines(tiny_model_path, tmp_path)


@pytest.fixture
def trunk_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each joint forward was for."""
    seen: list[int] = []
    plain = together.hidden_together

    def count(policies: Any, *rest: Any) -> Any:
        seen.append(len(policies))
        return plain(policies, *rest)

    monkeypatch.setattr(together, "hidden_together", count)
    return seen


def test_runs_of_any_rank_loss_and_head_get_what_they_get_alone(engines: Engines, trunk_forwards: list[int]) -> None:
    engines.create(WORK)
    for _ in range(2):  # the second time into buffers that hold something
        alone, grouped = engines.ask_alone(WORK), engines.ask_together(WORK)
        for run_id in WORK:
            assert_same(grouped[run_id], alone[run_id])
            assert grouped[run_id].proto.loss.grouped_runs == len(WORK)
    assert trunk_forwards == [len(WORK)] * 2
    engines.assert_same_steps(WORK)
    for run_id in WORK:
        rng = [engine.context.runs[run_id].rng_tensors()["cpu"] for engine in (engines.alone, engines.together)]
        assert torch.equal(*rng)


def test_train_steps_share_a_forward_and_each_takes_its_own_step(engines: Engines, trunk_forwards: list[int]) -> None:
    engines.create(WORK)
    asked = {run_id: {"train_step": pb.TrainStep(loss=work.call, optim_step=STEP)} for run_id, work in WORK.items()}
    asked["run-few"]["train_step"].optim_step.learning_rate = -1  # refused before its gradient is computed
    alone = {run_id: engines.alone.op(run_id, WORK[run_id].columns, **kind) for run_id, kind in asked.items()}
    requests = [
        engines.request(number, run_id, WORK[run_id], **kind) for number, (run_id, kind) in enumerate(asked.items(), 1)
    ]
    decision = engines.together.context.decisions.execute(requests)
    assert len(decision.requests) == len(WORK)
    found = dict(zip(WORK, engines.together.engine.execute(decision), strict=True))
    assert trunk_forwards == [len(WORK) - 1]
    for run_id, answer in found.items():
        grouped, single = answer.reply.result, alone[run_id].proto
        assert (grouped.seq, grouped.status, grouped.error) == (single.seq, single.status, single.error)
        if run_id == "run-few":
            assert grouped.error.field == "learning_rate"
            assert engines.together.context.runs[run_id].accumulator.empty
            continue
        mine, theirs = grouped.train_step, single.train_step
        assert mine.loss.grouped_runs == len(WORK) - 1
        assert mine.loss.loss == pytest.approx(theirs.loss.loss, rel=1e-5, abs=1e-6)
        assert mine.optim_step.grad_norm == pytest.approx(theirs.optim_step.grad_norm, rel=1e-4)
        assert (mine.optim_step.step, mine.optim_step.num_accumulated) == (2, 1)
        logprobs = [engine.logprobs(run_id, token_rows(ROWS)) for engine in (engines.alone, engines.together)]
        np.testing.assert_allclose(*logprobs, atol=1e-4)


def test_a_loss_with_two_units_takes_two_backward_passes(engines: Engines) -> None:
    work = {
        "run-sft": WORK["run-sft"],
        "run-two": Work({"lora": 4}, loss_call("causal_lm"), token_rows(ROWS)),
    }
    engines.create(work)
    plain = get_loss("causal_lm")

    def two_units(batch: Batch, scores: Scores, config: LossConfig) -> LossOutput:
        output = plain.function(batch, scores, config)
        (term,) = output.terms.values()
        more = replace(term, sum=(scores.logprobs**2).sum(), count=float(batch.num_sequences), unit="rows")
        return replace(output, terms=output.terms | {"more": more})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "get_loss", lambda name: replace(plain, function=two_units))
        alone, grouped = engines.ask_alone(work), engines.ask_together(work)
    for run_id in work:
        assert_same(grouped[run_id], alone[run_id])
    engines.assert_same_steps(work)


def bad_batch(engines: Engines) -> Work:
    return Work(WORK["run-few"].config, loss_call("causal_lm"), token_rows([[1, 2, 3], [1, 10_000]]))


def bad_loss(engines: Engines) -> Work:
    return Work(WORK["run-few"].config, loss_call("causal_lm", no_such_argument=1), token_rows(ROWS))


def non_finite(engines: Engines) -> Work:
    for engine in (engines.alone, engines.together):
        with torch.no_grad():
            next(iter(engine.context.runs["run-few"].policy.trainable_parameters().values()))[0, 0] = torch.nan
    return Work(WORK["run-few"].config, loss_call("causal_lm"), token_rows(ROWS))


@pytest.mark.parametrize("trouble", [bad_batch, bad_loss, non_finite])
def test_the_trouble_of_one_costs_the_others_nothing(engines: Engines, trouble: Callable[[Engines], Work]) -> None:
    engines.create(WORK)
    work = WORK | {"run-few": trouble(engines)}
    alone, grouped = engines.ask_alone(work), engines.ask_together(work)
    mine, theirs = grouped.pop("run-few").proto, alone.pop("run-few").proto
    assert mine.status == pb.STATUS_FAILED
    assert mine.error == theirs.error
    assert engines.together.context.runs["run-few"].accumulator.empty
    assert engines.together.context.runs["run-few"].failed_seq == mine.seq
    for run_id in grouped:
        assert_same(grouped[run_id], alone[run_id])
        assert grouped[run_id].proto.loss.grouped_runs >= 3
    engines.assert_same_steps(grouped)


def test_a_batch_to_be_left_out_is_left_out(engines: Engines) -> None:
    engines.create(WORK)
    work = WORK | {"run-few": replace(non_finite(engines), call=loss_call("causal_lm", skip_nonfinite=True))}
    alone, grouped = engines.ask_alone(work), engines.ask_together(work)
    assert grouped["run-few"].proto.loss.warnings == alone["run-few"].proto.loss.warnings
    assert "left out" in grouped["run-few"].proto.loss.warnings[0]
    assert_same(grouped["run-dpo"], alone["run-dpo"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a fault of the model")])
def test_what_fails_together_is_done_alone(engines: Engines, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    engines.create(WORK)

    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(together, "hidden_together", fail)
    alone, grouped = engines.ask_alone(WORK), engines.ask_together(WORK)
    for run_id in WORK:
        assert_same(grouped[run_id], alone[run_id])
        assert grouped[run_id].proto.loss.grouped_runs == 0
    engines.assert_same_steps(WORK)


def test_who_goes_together(engines: Engines) -> None:
    work = {
        "run-a": WORK["run-sft"],
        "run-full": Work({}, loss_call("causal_lm"), token_rows(ROWS)),
        "run-b": WORK["run-few"],
        "run-dropout": Work({"lora": {"rank": 2, "dropout": 0.1}}, loss_call("causal_lm"), token_rows(ROWS)),
    }
    engines.create(work)
    a, full, b, dropout = (engines.request(number, *each) for number, each in enumerate(work.items()))
    step = engines.request(9, "run-full", work["run-full"], optim_step=STEP)
    checkpoint = engines.request(10, "run-full", work["run-full"], save_checkpoint=pb.SaveCheckpoint())
    decisions = engines.together.context.decisions

    def choose(ready: list[Request]) -> list[Request]:
        return list(decisions.execute(ready).requests)

    assert choose([]) == []
    assert choose([a]) == [a]
    assert choose([a, full, b, dropout]) == [a, b]
    assert choose([full, a, b]) == [full]
    assert choose([checkpoint, a, b]) == [checkpoint]
    assert choose([a, checkpoint, b]) == [a, b]
    assert choose([a, step, b]) == [step]
    decisions.group_tokens = 16
    assert choose([a, b, dropout]) == [a]
    decisions.group_tokens = 0
    assert choose([a, b]) == [a]


def test_no_more_go_together_than_fit_a_micro_batch(
    engines: Engines, tiny_model_path: Path, tmp_path: Path, trunk_forwards: list[int]
) -> None:
    engines.group(LocalEngine({"tiny": tiny_model_path}, tmp_path / "small", microbatch_tokens=20))
    work = {f"run-{number}": Work({"lora": 4}, loss_call("causal_lm"), token_rows([[1] * 8])) for number in range(3)}
    work["run-two"] = Work({"lora": 4}, loss_call("causal_lm"), token_rows([[1, 2] * 7] * 2))
    engines.create(work)
    alone, grouped = engines.ask_alone(work), engines.ask_together(work)
    for run_id in work:
        grouped[run_id].proto.loss.num_microbatches = alone[run_id].proto.loss.num_microbatches
        assert_same(grouped[run_id], alone[run_id])
    assert trunk_forwards == [2]
    assert [grouped[run_id].proto.loss.grouped_runs for run_id in work] == [2, 2, 0, 0]
