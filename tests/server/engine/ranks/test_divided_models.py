"""Over a base divided among ranks, runs have the bits, checkpoints and exports of one process."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire_losses.registry import get_loss
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.process.pulse import BROKEN
from gradwire_server.engine_link.frames import LinkClosed
from support.engine import Driver, EngineProcess, LocalEngine, loss_call, token_rows
from support.ranks import CAUSAL, FAILING, ROWS, STEP, Engines

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def divided(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("divided")
    settings = {"microbatch_tokens": 16, "threads": 1}
    (folder / "losses.py").write_text(FAILING)
    losses = {"ranks": 2, "shard": "on", "losses": [folder / "losses.py"]}
    group = EngineProcess({"tiny": tiny_model_path}, folder / "group", **settings, **losses)
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
    [
        {"lora": {"rank": 4, "dropout": 0.1}, "lanes": 2},
        {"lora": {"rank": 4}, "head": "value", "gradient_checkpointing": True, "lanes": 4},
        {"lanes": 2},
    ],
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
        np.testing.assert_allclose(group, one, atol=1e-5)  # gradients are added rank by rank
        assert figures_of(divided.group, f"{run_id}-again", **config) == (group, also)


def stepped(engine: Driver, run_id: str, columns: Any, call: pb.LossCall, **config: Any) -> list[Any]:
    """What an engine says of two steps."""
    engine.create(run_id, seed=5, **config)
    figures: list[Any] = []
    for _ in range(2):
        loss = engine.do(run_id, columns, forward_backward=call).proto.loss
        figures += [loss.loss, *(value for _, value in sorted(loss.metrics.items()))]
        figures.append(engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm)
    return [*figures, *engine.logprobs(run_id, ROWS)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("causal_lm", "dpo", "grpo", "kto")] + ["enhanced_ppo"],
)
def test_losses_train_all_divided_weights_with_fewer_lanes_than_ranks(
    divided: Engines, batches: Any, name: str
) -> None:
    """Also with rows of which no token is scored."""
    loss, run_id = get_loss(name), f"full-{name}"
    head = "value" if "values" in loss.optional_scores else ""
    columns = batches.columns(loss, rows=5, shortest=2, longest=9)
    one, group = (
        stepped(engine, run_id, columns, loss_call(loss), head=head, lanes=1) for engine in (divided.one, divided.group)
    )
    np.testing.assert_allclose(group, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_rows_of_which_no_token_is_scored(divided: Engines, config: dict[str, Any]) -> None:
    run_id = f"unscored-{'lora' in config}"
    unscored = dict(ROWS)
    tokens, levels = ROWS["input_ids"].values, ROWS["input_ids"].levels
    unscored["loss_mask"] = Column(np.arange(len(tokens)) < 6, levels)  # of the first row, and a token of the second
    one, group = (
        stepped(engine, run_id, unscored, CAUSAL, lanes=2, **config) for engine in (divided.one, divided.group)
    )
    np.testing.assert_allclose(group, one, atol=1e-5)
    if config:
        assert group == one


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


@pytest.mark.slow  # a group of its own
def test_checkpoints_go_from_two_ranks_to_one_process_to_four_ranks(divided: Engines, tiny_model_path: Path) -> None:
    """With weights, moments and an accumulation in progress; each writes the same files."""
    divided.group.create("run-far", seed=3)
    divided.group.train("run-far", ROWS)
    divided.group.do("run-far", ROWS, forward_backward=CAUSAL)
    divided.group.do("run-far", save_checkpoint=pb.SaveCheckpoint(name="now"))
    four = EngineProcess({"tiny": tiny_model_path}, divided.folder / "four", threads=1, ranks=4, shard="on")
    try:
        homes: list[tuple[Driver, str]] = [(divided.group, "group"), (divided.one, "one"), (four, "four")]
        for (_, before), (engine, name) in itertools.pairwise(homes):
            shutil.copytree(divided.folder / before / "runs/run-far", divided.folder / name / "runs/run-far")
            engine.create("run-far", seed=3, checkpoint="run-far/now")
            engine.do("run-far", save_checkpoint=pb.SaveCheckpoint(name="now", overwrite=True))
        assert len({divided.weights(name, "run-far") for _, name in homes}) == 1
        norms = [engine.do("run-far", optim_step=STEP).proto.optim_step.grad_norm for engine, _ in homes]
        np.testing.assert_allclose(norms, norms[0], rtol=1e-6)
        for engine, _ in homes[1:]:
            np.testing.assert_allclose(
                engine.logprobs("run-far", ROWS), divided.group.logprobs("run-far", ROWS), atol=1e-5
            )
    finally:
        four.kill()


def test_a_quantized_reference_cannot_be_divided(divided: Engines, batches: Any) -> None:
    divided.group.create("run-refused", seed=3, lora=4)
    columns = batches.columns(get_loss("dpo"), rows=2, shortest=3, longest=6)
    kwargs = {"reference_model": {"name": "base", "quantize": "int8"}}
    call = pb.LossCall(loss_fn="dpo", loss_kwargs_json=json.dumps(kwargs))
    found = divided.group.op("run-refused", columns, forward_backward=call)
    assert "--shard off" in found.proto.error.message


LORA = {"lora": {"rank": 4}, "lanes": 2}


@pytest.mark.parametrize(
    ("where", "config"), [("forward", LORA), ("forward", {}), ("backward", LORA)], ids=["lora", "full", "backward"]
)
def test_memory_that_runs_out_in_a_layer_of_one_rank_halves_the_micro_batches_of_all(
    divided: Engines, where: str, config: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """In a backward, if the others have all that they need of this rank by then."""
    run_id = f"memory-{request.node.callspec.id}"
    found = []
    for engine in (divided.one, divided.group):
        engine.create(run_id, seed=3, **config)
        if engine is divided.group:
            (divided.folder / "armed").write_text(where)
        loss = engine.do(run_id, ROWS, forward_backward=CAUSAL).proto.loss
        assert loss.limits.microbatch_tokens == (8 if engine is divided.group else 16)
        again = engine.do(run_id, ROWS, forward_backward=CAUSAL).proto.loss
        norm = engine.do(run_id, optim_step=STEP).proto.optim_step.grad_norm
        found.append([loss.loss, again.loss, norm, *engine.logprobs(run_id, ROWS)])
    assert not (divided.folder / "armed").exists()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_an_error_in_the_loss_of_one_rank_is_that_of_all(divided: Engines) -> None:
    divided.group.create("run-errors", seed=3, lora={"rank": 4}, lanes=2)
    for name in ("memory", "memory_in_its_part", "fault", "fault_in_its_part"):
        found = divided.group.op("run-errors", ROWS, forward_backward=pb.LossCall(loss_fn=name)).proto
        if "memory" in name:
            assert found.loss.limits.microbatch_tokens == 8
        else:
            assert "ValueError" in found.error.message
    assert divided.group.do("run-errors", optim_step=STEP).proto.optim_step.num_accumulated == 2


@pytest.mark.slow  # a group of its own
def test_a_backward_that_runs_out_of_memory_on_one_rank_ends_the_group(tiny_model_path: Path, tmp_path: Path) -> None:
    """The others wait for its part of a gradient, but not for the ten minutes that a layer may take."""
    (tmp_path / "losses.py").write_text(FAILING)
    engine = EngineProcess({"tiny": tiny_model_path}, tmp_path, ranks=2, shard="on", losses=[tmp_path / "losses.py"])
    try:
        engine.create("run-a", seed=1)
        (tmp_path / "armed").write_text("backward")
        with pytest.raises(LinkClosed):
            engine.do("run-a", ROWS, forward_backward=CAUSAL)
        assert engine.process.wait(60) == BROKEN
    finally:
        engine.kill()
