"""Over a base divided among ranks, runs have the bits, checkpoints and exports of one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire_losses.registry import get_loss
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import Driver, EngineProcess, LocalEngine, token_rows
from support.ranks import CAUSAL, ROWS, STEP, Engines


@pytest.fixture(scope="module")
def divided(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("divided")
    settings = {"microbatch_tokens": 16, "threads": 1}
    group = EngineProcess({"tiny": tiny_model_path}, folder / "group", ranks=2, shard="on", **settings)
    yield Engines(LocalEngine({"tiny": tiny_model_path}, folder / "one", **settings), group, folder)
    group.kill()


def figures_of(engine: Driver, run_id: str, **config: object) -> tuple[list[float], list[object]]:
    """Figures and tokens of two steps, an error between them, samples, a reference, a checkpoint and an export."""
    engine.create(run_id, seed=3, **config)
    numbers: list[float] = []
    exact: list[object] = []
    for _ in range(2):
        numbers.append(engine.do(run_id, ROWS, forward_backward=CAUSAL).proto.loss.loss)
        bad = engine.op(run_id, token_rows([[1, 99999]]), forward_backward=CAUSAL)
        exact.append(bad.proto.error.message)
        numbers.append(engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm)
    engine.do(run_id, update_reference=pb.UpdateReference(ema=0.5))
    call = pb.SampleCall(max_tokens=6, temperature=1.0, n=2, ignore_eos=True, seed=1)
    sampled = engine.do(run_id, token_rows([[1, 20, 30], [1, 5]], "prompt_ids"), sample=call)
    exact.append(sampled.columns["token_ids"].values.tolist())
    for model in ("", "base", "ema"):
        numbers += engine.logprobs(run_id, ROWS, model).tolist()
    engine.do(run_id, ROWS, forward_backward=CAUSAL)
    engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now"))
    engine.do(run_id, export=pb.ExportModel(name="out", format="merged" if "lora" in config else "hf"))
    engine.do(run_id, optim_step=STEP)
    engine.do(run_id, load_checkpoint=pb.LoadCheckpoint(checkpoint="now"))
    numbers.append(engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm)
    return [*numbers, *engine.logprobs(run_id, ROWS).tolist()], exact


@pytest.mark.parametrize(
    "config",
    [{"lora": {"rank": 4, "dropout": 0.1}, "lanes": 2}, {"lora": {"rank": 4}, "head": "value"}, {"lanes": 2}],
    ids=["lora", "head", "full"],
)
def test_a_divided_base_computes_as_a_whole_one(
    divided: Engines, config: dict[str, object], request: pytest.FixtureRequest
) -> None:
    run_id = request.node.callspec.id
    (one, exact), (group, also) = (figures_of(engine, run_id, **config) for engine in (divided.one, divided.group))
    assert exact == also
    if "lora" in config:
        assert group == one
        assert divided.weights("one", run_id) == divided.weights("group", run_id)
    else:
        np.testing.assert_allclose(group, one, atol=1e-5)  # norms are added by parts


def test_checkpoints_are_read_on_another_number_of_ranks(divided: Engines) -> None:
    """A run of all weights goes from two ranks, which hold half of each tensor each, to one process."""
    divided.group.create("run-moved", seed=3)
    divided.group.train("run-moved", ROWS)
    divided.group.do("run-moved", ROWS, forward_backward=CAUSAL)
    divided.group.do("run-moved", save_checkpoint=pb.SaveCheckpoint(name="now"))
    shutil.copytree(divided.folder / "group/runs/run-moved", divided.folder / "one/runs/run-moved")
    divided.one.create("run-moved", seed=3, checkpoint="run-moved/now")
    engines: list[Driver] = [divided.one, divided.group]
    steps = [engine.do("run-moved", optim_step=STEP).proto.optim_step for engine in engines]
    np.testing.assert_allclose(steps[0].grad_norm, steps[1].grad_norm, rtol=1e-6)
    one, group = (engine.logprobs("run-moved", ROWS) for engine in engines)
    np.testing.assert_allclose(one, group, atol=1e-5)


def test_a_quantized_reference_cannot_be_divided(divided: Engines, batches: Any) -> None:
    divided.group.create("run-refused", seed=3, lora=4)
    columns = batches.columns(get_loss("dpo"), rows=2, shortest=3, longest=6)
    kwargs = {"reference_model": {"name": "base", "quantize": "int8"}}
    call = pb.LossCall(loss_fn="dpo", loss_kwargs_json=json.dumps(kwargs))
    found = divided.group.op("run-refused", columns, forward_backward=call)
    assert "--shard off" in found.proto.error.message
