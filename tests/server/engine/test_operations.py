"""Operations on an engine in this process: what they do, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.codec import Column
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.operations import training
from support.engine import LocalEngine, token_rows

ROWS = [[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60]]
BATCH = token_rows(ROWS)
STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8)


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"tiny": tiny_model_path}, tmp_path)


def call(loss_fn: str, **kwargs: Any) -> pb.LossCall:
    return pb.LossCall(loss_fn=loss_fn, loss_kwargs_json=json.dumps(kwargs))


def pairs() -> dict[str, Column]:
    return token_rows(ROWS, "chosen_input_ids") | token_rows([[1, 3], [1, 4, 5], [1, 6, 7]], "rejected_input_ids")


def test_custom_halves_give_the_gradients_of_the_builtin_loss(engine: LocalEngine) -> None:
    for run in ("run-builtin", "run-custom"):
        engine.create(run, seed=3)
    engine.train("run-builtin", BATCH)
    scores = engine.do("run-custom", BATCH, kept_forward=pb.KeptForward(scores=["logprobs"]))
    logprobs = scores.columns["logprobs"]
    assert [len(row) for row in logprobs.rows()] == [4, 6, 1]
    count = len(logprobs.values)
    gradient = Column(np.full(count, -1 / count, np.float32), logprobs.levels)
    backward = pb.Backward(forward_seq=1, weight=count, loss=-float(logprobs.values.mean()))
    done = engine.do("run-custom", {"grad_logprobs": gradient}, backward=backward)
    assert done.proto.loss.loss == pytest.approx(-logprobs.values.mean())
    step = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1)
    engine.do("run-custom", optim_step=step)
    assert np.allclose(engine.logprobs("run-custom", BATCH), engine.logprobs("run-builtin", BATCH), atol=1e-5)


def test_an_abandoned_or_lost_second_half_leaves_nothing_behind(engine: LocalEngine) -> None:
    engine.create("run-a", lora=4)
    engine.do("run-a", BATCH, kept_forward=pb.KeptForward())
    abandoned = engine.op("run-a", backward=pb.Backward(forward_seq=1, abandoned="ZeroDivisionError in fn"))
    assert abandoned.proto.error.code == pb.ERROR_CODE_ABANDONED
    assert "ZeroDivisionError" in abandoned.proto.error.message
    engine.do("run-a", BATCH, kept_forward=pb.KeptForward())
    engine.do("run-a", BATCH, forward=pb.LossCall(outputs=["logprobs"]), seq=5)
    assert not engine.context.runs["run-a"].kept
    assert engine.op("run-a", optim_step=STEP).proto.error.code == pb.ERROR_CODE_NOTHING_TO_STEP


ARGUMENT = pb.ERROR_CODE_INVALID_ARGUMENT
NOT_AN_OBJECT = pb.LossCall(loss_fn="dpo", loss_kwargs_json="[1]")
FAILURES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"forward_backward": call("no_such")}, pb.ERROR_CODE_UNKNOWN_LOSS, "loss_fn", "causal_lm"),
    ({"forward_backward": call("dpo", betta=1)}, ARGUMENT, "betta", "beta"),
    ({"forward_backward": call("dpo", beta=-1)}, ARGUMENT, "beta", "beta >"),
    ({"forward_backward": call("dpo", beta="x")}, ARGUMENT, "beta", "number"),
    ({"forward_backward": NOT_AN_OBJECT}, ARGUMENT, "loss_kwargs", "object"),
    ({"forward_backward": pb.LossCall(loss_fn="causal_lm", outputs=["zeal"])}, ARGUMENT, "outputs", "zeal"),
    ({"forward_backward": pb.LossCall(loss_fn="causal_lm", model="base")}, ARGUMENT, "model", "forward"),
    ({"forward": pb.LossCall(outputs=["values"])}, pb.ERROR_CODE_UNSUPPORTED, "head", "value head"),
    ({"forward": pb.LossCall(model="gpt-9")}, pb.ERROR_CODE_UNKNOWN_MODEL, "model", "tiny"),
    ({"forward": pb.LossCall(model="Some/Model")}, pb.ERROR_CODE_UNKNOWN_MODEL, "model", "Some/Model"),
    ({"forward": pb.LossCall(model="run-z/x")}, pb.ERROR_CODE_UNKNOWN_CHECKPOINT, "model", "run-z/x"),
    ({"optim_step": STEP}, pb.ERROR_CODE_NOTHING_TO_STEP, "", "forward_backward"),
    ({"backward": pb.Backward(forward_seq=77, weight=1)}, ARGUMENT, "forward_seq", "77"),
    ({"update_reference": pb.UpdateReference(ema=2)}, ARGUMENT, "ema", "0 to 1"),
    (
        {"load_checkpoint": pb.LoadCheckpoint(checkpoint="../../e")},
        pb.ERROR_CODE_UNKNOWN_CHECKPOINT,
        "checkpoint",
        "RUN_ID",
    ),
    ({"save_checkpoint": pb.SaveCheckpoint(name="../../x")}, ARGUMENT, "name", "letters"),
    ({"export": pb.ExportModel(name="..", format="hf")}, ARGUMENT, "name", "letters"),
    ({"export": pb.ExportModel(format="onnx")}, ARGUMENT, "format", "peft"),
    ({"sample": pb.SampleCall(max_tokens=3)}, pb.ERROR_CODE_INVALID_BATCH, "prompts", "at least one"),
    ({"sample": pb.SampleCall(prompts=["a"])}, ARGUMENT, "max_tokens", ">= 1"),
    ({}, ARGUMENT, "kind", "older"),
]


@pytest.mark.parametrize(("kind", "code", "field", "words"), FAILURES, ids=range(len(FAILURES)))
def test_what_is_refused_says_why_and_the_run_goes_on(
    engine: LocalEngine, tmp_path: Path, kind: dict[str, Any], code: int, field: str, words: str
) -> None:
    engine.create("run-a", lora={"rank": 4, "dropout": 0.3}, seed=1)
    engine.create("run-b", lora={"rank": 4, "dropout": 0.3}, seed=1)
    columns = {} if kind.keys() & {"optim_step", "backward", "sample"} else BATCH
    failed = engine.op("run-a", columns, **kind).proto
    assert failed.status == pb.STATUS_FAILED
    assert (failed.error.code, failed.error.field) == (code, field)
    assert words in failed.error.message
    assert engine.train("run-a", BATCH) == engine.train("run-b", BATCH)
    assert not [path for path in tmp_path.parent.glob("x*") if path.is_dir()]


def test_a_bad_batch_is_named_by_field_row_and_rule(engine: LocalEngine) -> None:
    engine.create("run-a", lora=4)
    error = engine.op("run-a", token_rows([[1, 2], [1, 500]]), forward_backward=call("causal_lm")).proto.error
    assert (error.code, error.field, error.row) == (pb.ERROR_CODE_INVALID_BATCH, "input_ids", 1)
    assert error.rule.startswith("0 <= id <")


def test_a_fault_of_ours_is_reported_by_number_only_and_undone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.create("run-a", lora={"rank": 4, "dropout": 0.3}, seed=1)
    engine.create("run-b", lora={"rank": 4, "dropout": 0.3}, seed=1)
    with monkeypatch.context() as patch:

        def fault(*_: object, **__: object) -> None:
            torch.rand(3)
            raise ZeroDivisionError("a secret")

        patch.setattr(training, "pass_over", fault)
        error = engine.op("run-a", BATCH, forward_backward=call("causal_lm")).proto.error
        patch.setattr(training, "pass_over", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("x")))
        memory = engine.op("run-a", BATCH, forward_backward=call("causal_lm")).proto.error
    assert error.code == pb.ERROR_CODE_INTERNAL
    assert "secret" not in error.message and error.request_id in error.message
    assert "a secret" in caplog.text and error.request_id in caplog.text
    assert (memory.code, "--microbatch-tokens" in memory.message) == (pb.ERROR_CODE_OUT_OF_MEMORY, True)
    assert engine.train("run-a", BATCH) == engine.train("run-b", BATCH)


def test_requests_outside_runs(engine: LocalEngine) -> None:
    reply, _ = engine.request(operation=engine_pb2.EngineOperation(run_id="run-none", seq=1))
    assert reply.error.code == pb.ERROR_CODE_UNKNOWN_RUN
    asked = pb.SampleRequest(
        model="tiny", call=pb.SampleCall(max_tokens=6, n=2, temperature=1, seed=4), prompt_ids=[pb.TokenIds(ids=[1, 9])]
    )
    first, payload = engine.request(sample=asked)
    _, same = engine.request(sample=asked)
    assert payload == same
    assert len(first.result.sample.stop_reasons) == len(first.result.sample.texts) == 2
    asked.model = "nothing"
    assert engine.request(sample=asked)[0].error.code == pb.ERROR_CODE_UNKNOWN_MODEL
    reply, _ = engine.request(verify_checkpoint=engine_pb2.EngineVerifyCheckpoint(checkpoint="run-a/none"))
    assert reply.error.code == pb.ERROR_CODE_UNKNOWN_CHECKPOINT


def test_a_damaged_tokenizer_is_named_where_it_is_needed(
    tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "damaged")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    engine = LocalEngine({"tiny": folder}, tmp_path)
    sentence = f"model 'tiny': the tokenizer {file} cannot be read: EOF"
    call = pb.SampleCall(max_tokens=3, ignore_eos=True)
    asked = pb.SampleRequest(model="tiny", call=call, prompt_ids=[pb.TokenIds(ids=[1, 9])])
    reply, _ = engine.request(sample=asked)
    assert reply.result.sample.num_sampled_tokens == 3 and not reply.result.sample.texts
    assert sentence in caplog.text
    asked.call.stop.append("a")
    error = engine.request(sample=asked)[0].error
    assert error.code == pb.ERROR_CODE_UNSUPPORTED and error.message.startswith(sentence)


def test_sampled_logprobs_are_the_scored_ones_and_text_prompts_are_encoded(engine: LocalEngine) -> None:
    engine.create("run-a", lora=4, seed=2)
    for _ in range(3):
        engine.train("run-a", BATCH, learning_rate=0.1)
    settings = pb.SampleCall(prompts=["ab c", "hello"], n=3, max_tokens=7, temperature=1, ignore_eos=True)
    result = engine.do("run-a", sample=settings)
    tokens, logprobs = result.columns["token_ids"], result.columns["logprobs"]
    assert [level.tolist() for level in tokens.levels] == [[3, 3], [7] * 6]
    assert result.proto.sample.num_sampled_tokens == 42
    tokenizer = engine.context.tokenizer("tiny")
    assert tokenizer is not None
    prompts = tokenizer.encode(settings.prompts)
    assert prompts[0][0] == 1 and result.proto.sample.num_prompt_tokens == sum(map(len, prompts))
    drawn = tokens.values.reshape(2, 3, 7).tolist()
    assert list(result.proto.sample.texts) == tokenizer.decode([ids for of in drawn for ids in of])
    rows = [prompt + ids for prompt, of in zip(prompts, drawn, strict=True) for ids in of]
    mask = Column.from_rows([np.arange(len(row)) >= len(row) - 7 for row in rows])
    scored = engine.logprobs("run-a", token_rows(rows) | {"loss_mask": mask})
    assert np.allclose(scored, logprobs.values, atol=1e-4)
    again = engine.do("run-a", sample=settings)
    assert again.columns["token_ids"].values.tolist() != tokens.values.tolist()  # the run's generator has moved on


def test_adapters_checkpointed_midway_do_not_disturb_each_other(engine: LocalEngine) -> None:
    """Two runs on one base, interleaved, are what each is alone."""
    alone = []
    for run in ("run-a", "run-b"):
        engine.create(run, lora=4, seed=len(run), head="reward" if run == "run-b" else "")
        alone.append([engine.train(run, BATCH) for _ in range(3)])
    for run in ("run-a", "run-b"):
        engine.create(run, lora=4, seed=len(run), head="reward" if run == "run-b" else "")
    together: list[list[tuple[float, float]]] = [[], []]
    for _ in range(3):
        for run, told in zip(("run-a", "run-b"), together, strict=True):
            told.append(engine.train(run, BATCH))
            engine.do(run, sample=pb.SampleCall(prompts=["x"], max_tokens=2, temperature=1))
            engine.do(run, save_checkpoint=pb.SaveCheckpoint(name="latest", overwrite=True))
    assert together == alone


def test_an_error_takes_back_the_value_head_that_its_operation_added(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the pass and of the optimizer's step behind it; a second attempt adds it again."""
    engine.create("run-a", lora=4, seed=1)
    run = engine.context.runs["run-a"]
    logprobs = Column.from_rows([np.full(len(row), -1, np.float32) for row in ROWS])
    columns = BATCH | {"old_log_probs": logprobs, "rewards": Column(np.ones(len(ROWS), np.float32), ())}
    masters = set(run.policy.masters())
    step = pb.TrainStep(loss=call("enhanced_ppo"), optim_step=STEP)
    for name in ("pass_over", "take_steps"):
        with monkeypatch.context() as patch:
            patch.setattr(training, name, lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
            assert engine.op("run-a", columns, train_step=step).proto.error.code == pb.ERROR_CODE_INTERNAL
        assert (run.policy.head, run.config.head, run.accumulator.empty) == (None, "", True)
        assert set(run.policy.masters()) == masters
    loss = engine.do("run-a", columns, train_step=step).proto.train_step.loss
    assert (loss.added_head.kind, run.config.head) == ("value", "value")
    assert "no value head" in loss.warnings[0]
