"""Rows with images in bfloat16, and against references that a run made itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import LocalEngine
from support.vision import vision_model

from tests.server.engine.test_vision import CAT, DOG, OFTEN, ROWS, SCORED, Plain, Row, accumulated, columns_of

BETA = 0.5
ROUNDED = 0.06
"""Of a log-probability, absolute: some roundings to 8 bits of logits of a few units."""
ALIKE = 0.99
"""Cosine of a bfloat16 gradient and the exact one; that of two batches is near 0."""
PAIRS = [
    (Row("IMAGE shows a long prompt: a cat", [CAT]), Row("IMAGE shows a long prompt: a bus", [CAT])),
    (Row("see IMAGE and say: good answer", [DOG]), Row("see IMAGE and say: poor answer", [DOG])),
]
SETTINGS = {"base_model": "m", "lora": {"rank": 4, "target_modules": ["all-linear", "vision"]}, "seed": 3}


@pytest.fixture(scope="module", params=OFTEN)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(request.param, vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "mixed"])
def test_bfloat16_gives_what_transformers_gives_but_for_rounding(plain: Plain, tmp_path: Path, dtype: Any) -> None:
    engine = LocalEngine({"m": plain.path}, tmp_path, dtype=dtype)
    engine.create("run-a", base_model="m")
    batch = columns_of(plain, ROWS)
    call = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])
    found = engine.do("run-a", batch, forward_backward=call).columns["logprobs"].values
    expected = torch.cat([plain.logprobs(row) for row in ROWS])
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=ROUNDED)
    assert found.dtype == np.float32 and not np.allclose(found, expected.detach().numpy(), atol=1e-5)
    assert np.array_equal(engine.logprobs("run-a", batch), found)
    assert_alike(plain, engine, -expected.mean(), ("vis", "lm_head"))  # the vision part, and the output head


def set_head(engine: LocalEngine, run_id: str) -> torch.Tensor:
    """Give a run's head weights of the size that trained ones have, and return them in float64."""
    head = engine.context.runs[run_id].policy.head
    assert head is not None
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(head.weight.shape, generator=generator) / head.weight.shape[1] ** 0.5
    with torch.no_grad():
        head.weight.copy_(weight)
    return weight[0].double()


def hidden(plain: Plain, row: Row) -> torch.Tensor:
    """``[W, H]`` final states of a row's tokens."""
    return plain.model.model(**plain.inputs(row), use_cache=False).last_hidden_state[0]


def assert_alike(plain: Plain, engine: LocalEngine, loss: torch.Tensor, parts: tuple[str, ...]) -> None:
    exact, rounded = plain.gradients(loss), accumulated(engine, "run-a")
    for part in parts:
        names = [name for name in exact if part in name]
        one, other = (torch.cat([each[name].flatten().double() for name in names]) for each in (exact, rounded))
        assert float(torch.cosine_similarity(one, other, dim=0)) > ALIKE, part


@pytest.mark.parametrize("dtype", [torch.bfloat16, "mixed"])
@pytest.mark.parametrize("microbatch_tokens", [None, 1], ids=["together", "row by row"])
def test_values_of_bfloat16_are_exact_but_for_rounding(
    plain: Plain, tmp_path: Path, dtype: Any, microbatch_tokens: int | None
) -> None:
    engine = LocalEngine({"m": plain.path}, tmp_path, dtype=dtype, microbatch_tokens=microbatch_tokens)
    engine.create("run-a", base_model="m", head="value")
    weight = set_head(engine, "run-a")
    batch = columns_of(plain, ROWS)
    expected = torch.cat([hidden(plain, row)[-SCORED - 1 : -1] @ weight for row in ROWS]).detach().numpy()
    result = engine.do("run-a", batch, forward=pb.LossCall(outputs=["values"]))
    found = result.columns["values"].values
    assert result.proto.loss.num_microbatches == (1 if microbatch_tokens is None else len(ROWS))
    np.testing.assert_allclose(found, expected, atol=ROUNDED)
    assert found.dtype == np.float32 and not np.allclose(found, expected, atol=1e-5)
    without = columns_of(plain, [Row(row.text, [DOG for _ in row.images]) for row in ROWS])
    other = engine.do("run-a", without, forward=pb.LossCall(outputs=["values"])).columns["values"].values
    assert np.abs(other - found)[SCORED : 2 * SCORED].max() > 2 * ROUNDED  # the second row has another picture


@pytest.mark.parametrize("dtype", [torch.bfloat16, "mixed"])
def test_rewards_of_bfloat16_and_their_gradients_are_exact_but_for_rounding(
    plain: Plain, tmp_path: Path, dtype: Any
) -> None:
    """Of sequences, of each token, and of pairs in a loss that streams, a pair at a time."""
    engine = LocalEngine({"m": plain.path}, tmp_path, dtype=dtype, microbatch_tokens=1)
    engine.create("run-a", base_model="m", head="reward")
    weight = set_head(engine, "run-a")
    states = [hidden(plain, row) for row in ROWS]
    expected = (
        torch.stack([each[-1] @ weight for each in states]),
        torch.cat([each[-SCORED:] @ weight for each in states]),
    )
    outputs = ["rewards", "token_rewards"]
    found = engine.do("run-a", columns_of(plain, ROWS), forward=pb.LossCall(outputs=outputs)).columns
    for name, exact in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(found[name].values, exact.detach().numpy(), atol=ROUNDED)
    pairs = {name: column for name, column in of_pairs(plain).items() if not name.endswith("loss_mask")}
    loss = engine.do("run-a", pairs, forward_backward=pb.LossCall(loss_fn="reward_modeling")).proto.loss
    margins = torch.stack(
        [(hidden(plain, chosen)[-1] - hidden(plain, rejected)[-1]) @ weight for chosen, rejected in PAIRS]
    )
    exact = -torch.nn.functional.logsigmoid(margins).mean()
    assert loss.num_microbatches == len(PAIRS)
    assert loss.loss == pytest.approx(float(exact.detach()), abs=ROUNDED)
    assert_alike(plain, engine, exact, ("vis", "mlp"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "mixed"])
def test_a_loss_that_streams_in_bfloat16_is_exact_but_for_rounding(plain: Plain, tmp_path: Path, dtype: Any) -> None:
    """Row by row, in ``forward`` and in ``forward_backward``."""
    engine = LocalEngine({"m": plain.path}, tmp_path, dtype=dtype, microbatch_tokens=1)
    engine.create("run-a", base_model="m")
    batch, call = columns_of(plain, ROWS), pb.LossCall(loss_fn="causal_lm", outputs=["logprobs", "entropy"])
    read = engine.do("run-a", batch, forward=call)
    trained = engine.do("run-a", batch, forward_backward=call)
    expected = torch.cat([plain.logprobs(row) for row in ROWS])
    assert read.proto.loss.num_microbatches == trained.proto.loss.num_microbatches == len(ROWS)
    for result in (read, trained):
        assert result.proto.loss.loss == pytest.approx(float(-expected.detach().mean()), abs=ROUNDED)
        np.testing.assert_allclose(result.columns["logprobs"].values, expected.detach().numpy(), atol=ROUNDED)
    np.testing.assert_allclose(read.columns["entropy"].values, trained.columns["entropy"].values, atol=ROUNDED)
    assert_alike(plain, engine, -expected.mean(), ("vis", "lm_head"))


def of_pairs(plain: Plain) -> dict[str, Column]:
    chosen, rejected = ([pair[side] for pair in PAIRS] for side in (0, 1))
    return columns_of(plain, chosen, "chosen_") | columns_of(plain, rejected, "rejected_")


def sums(engine: LocalEngine, plain: Plain, run_id: str) -> np.ndarray:
    """``[2, pairs]`` log-probabilities of the chosen and the rejected answers, from ``forward``."""
    rows = [pair[side] for side in (0, 1) for pair in PAIRS]
    return engine.logprobs(run_id, columns_of(plain, rows)).reshape(2, len(PAIRS), SCORED).sum(-1, dtype=np.float64)


def dpo(engine: LocalEngine, plain: Plain, reference: str, ok: bool = True) -> pb.OperationResult:
    kwargs = json.dumps({"beta": BETA, "reference_model": reference})
    call = pb.LossCall(loss_fn="dpo", loss_kwargs_json=kwargs)
    do = engine.do if ok else engine.op
    return do("run-a", of_pairs(plain), forward_backward=call).proto


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_that_a_run_made_score_the_images_as_the_run_did(plain: Plain, tmp_path: Path, dtype: Any) -> None:
    """A checkpoint, a checkpoint of another run, and the moving average, each against the run's own earlier scores."""
    engine = LocalEngine({"m": plain.path}, tmp_path, dtype=dtype)
    engine.create("run-a", **SETTINGS)
    batch = columns_of(plain, ROWS)
    for _ in range(4):
        engine.train("run-a", batch, learning_rate=2e-2)
    then = sums(engine, plain, "run-a")
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="then"))
    engine.do("run-a", update_reference=pb.UpdateReference(ema=0.0))  # the weights of now
    engine.create("run-b", checkpoint="run-a/then", **SETTINGS)
    engine.do("run-b", save_checkpoint=pb.SaveCheckpoint(name="alike"))
    for _ in range(2):
        engine.train("run-a", batch)
    now = sums(engine, plain, "run-a")
    assert np.abs(now - then).max() > 0.1
    margin = BETA * ((now[0] - now[1]) - (then[0] - then[1]))
    expected = np.log1p(np.exp(-margin)).mean()
    # In bfloat16 the two sides of a pair, which share the computation of their prompt, are not rounded as alone.
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    for reference in ("run-a/then", "run-b/alike", "ema"):
        assert dpo(engine, plain, reference).loss.loss == pytest.approx(expected, abs=tolerance), reference
    assert abs(dpo(engine, plain, "base").loss.loss - expected) > 2 * tolerance


def test_the_average_moves_by_its_share(plain: Plain, tmp_path: Path) -> None:
    engine = LocalEngine({"m": plain.path}, tmp_path)
    engine.create("run-a", **SETTINGS)
    batch = columns_of(plain, ROWS)
    engine.do("run-a", update_reference=pb.UpdateReference(ema=1.0))
    start = {name: each.clone() for name, each in engine.context.runs["run-a"].policy.masters().items()}
    engine.train("run-a", batch)
    engine.do("run-a", update_reference=pb.UpdateReference(ema=0.25))
    run = engine.context.runs["run-a"]
    assert run.ema is not None
    for name, average in run.ema.masters().items():
        torch.testing.assert_close(average, 0.25 * start[name] + 0.75 * run.policy.masters()[name])
    assert any("vis" in name for name in start)
    first = dpo(engine, plain, "ema").loss.loss
    engine.do("run-a", update_reference=pb.UpdateReference(ema=0.0))
    assert dpo(engine, plain, "ema").loss.loss == pytest.approx(np.log(2), abs=1e-5) != first


def test_a_reference_with_another_model_is_refused_before_anything_is_computed(plain: Plain, tmp_path: Path) -> None:
    other = vision_model(tmp_path / "other", plain.kind)
    engine = LocalEngine({"m": plain.path, "other": other}, tmp_path / "state")
    engine.create("run-a", **SETTINGS)
    engine.create("run-b", **SETTINGS | {"base_model": "other"})
    engine.do("run-b", save_checkpoint=pb.SaveCheckpoint(name="there"))
    for reference in ("other", "run-b/there"):
        error = dpo(engine, plain, reference, ok=False).error
        assert (error.code, error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "reference_model"), error
        assert engine.context.runs["run-a"].accumulator.empty
