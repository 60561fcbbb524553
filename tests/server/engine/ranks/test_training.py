"""Training on several ranks gives the bits that one process gives, and they live and die as one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire_losses.registry import LossSpec, all_losses, get_loss, load_builtin_losses
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.operations.training import COMPARED_STEPS
from gradwire_server.engine.process.pulse import BROKEN
from gradwire_server.engine_link.frames import LinkClosed
from support.child import children
from support.engine import Driver, EngineProcess, LocalEngine, loss_call, token_rows
from support.ranks import CAUSAL, FAILING, ROWS, STEP, Engines
from support.stage import wait_for

pytestmark = pytest.mark.long

load_builtin_losses()
OFTEN = ("causal_lm", "dpo", "grpo", "enhanced_ppo")
"""Losses tried in the short form: with a stream, with a reference, over groups, with a value head."""
LOSSES = [loss.name for loss in all_losses() if loss.function.__module__.startswith("gradwire_losses.")]


def trained(engine: Driver, run_id: str, **config: object) -> list[object]:
    """What an engine says of two steps, a failure between them, samples and a checkpoint."""
    engine.create(run_id, seed=3, **config)
    figures: list[object] = []
    for _ in range(2):
        first = engine.do(run_id, ROWS, forward_backward=CAUSAL)
        figures += [first.proto.loss.loss, first.proto.loss.num_microbatches, first.columns["logprobs"].values.tolist()]
        bad = engine.op(run_id, token_rows([[1, 99999]]), forward_backward=CAUSAL)
        figures += [bad.proto.error.code, bad.proto.error.message]
        engine.do(run_id, token_rows([[1, 33, 34]]), forward_backward=CAUSAL)  # fewer rows than lanes
        done = engine.do(run_id, ROWS, train_step=pb.TrainStep(loss=CAUSAL, optim_step=STEP)).proto.train_step
        figures += [done.loss.loss, done.optim_step]
        scored = engine.do(run_id, ROWS, kept_forward=pb.KeptForward(scores=["logprobs"]))
        given = {"grad_logprobs": scored.columns["logprobs"]}
        engine.do(run_id, given, backward=pb.Backward(forward_seq=scored.proto.seq, weight=2.0, loss=1.0))
        figures.append(engine.do(run_id, optim_step=STEP).proto.optim_step)
    call = pb.SampleCall(max_tokens=6, temperature=1.0, ignore_eos=True)
    sampled = engine.do(run_id, token_rows([[1, 20, 30], [1, 5]], "prompt_ids"), sample=call)
    figures.append(sampled.columns["token_ids"].values.tolist())
    engine.do(run_id, ROWS, forward_backward=CAUSAL)
    engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now"))
    engine.do(run_id, export=pb.ExportModel(name="out"))
    engine.do(run_id, load_checkpoint=pb.LoadCheckpoint(checkpoint="now"))
    for model in ("", "base", "ema"):
        forward = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs", "entropy"], model=model)
        scored = engine.do(run_id, ROWS, forward=forward)
        figures += [scored.proto.loss.loss, scored.proto.loss.num_microbatches]
        figures += [scored.columns[name].values.tolist() for name in ("logprobs", "entropy")]
    return figures


@pytest.mark.parametrize(
    "config",
    [
        {"lora": {"rank": 4}, "lanes": 4},
        {"lora": {"rank": 4, "dropout": 0.2}, "lanes": 2},
        {"lora": {"rank": 2}},
        {"lanes": 4},
    ],
    ids=["lora", "dropout", "one-lane", "full"],
)
def test_ranks_give_the_bits_of_one_process(
    engines: Engines, config: dict[str, object], request: pytest.FixtureRequest
) -> None:
    run_id = request.node.callspec.id
    if "lora" not in config and "weights divided" in engines.group.hello.hello.device:
        pytest.skip("to rounding only: test_divided_models")
    assert trained(engines.one, run_id, **config) == trained(engines.group, run_id, **config)
    assert engines.weights("one", run_id) == engines.weights("group", run_id)


@pytest.mark.parametrize("config", [{"lora": {"rank": 4}}, {}], ids=["lora", "full"])
def test_ranks_give_the_bits_of_one_process_of_rows_in_trees(engines: Engines, config: dict[str, Any]) -> None:
    """In one lane: several would cut these trees into micro-batches of one row."""
    if "lora" not in config and "weights divided" in engines.group.hello.hello.device:
        pytest.skip("to rounding only: test_divided_models")
    run_id, head = f"run-forest-{len(config)}", [1, *range(3, 23)]
    node = [*head, *range(40, 20, -1)]
    forest = [[*node, 5, 6], [*head, 60, 61], node, [*node, 5, 7, 8], [1, 60], [*head, *head], [*head, *head, 9]]
    figures = []
    for engine in (engines.one, engines.group):
        engine.create(run_id, seed=3, **config)
        trained = engine.do(run_id, token_rows(forest), forward_backward=CAUSAL)
        scored = engine.do(run_id, token_rows(forest), forward=CAUSAL)
        done = engine.do(run_id, optim_step=STEP).proto.optim_step
        engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now"))
        figures.append([])
        for each in (trained, scored):
            loss = each.proto.loss
            assert loss.num_computed_tokens < loss.num_tokens == sum(map(len, forest))
            figures[-1] += [loss.loss, loss.num_computed_tokens, each.columns["logprobs"].values.tolist()]
        figures[-1].append(done)
    assert figures[0] == figures[1]
    assert engines.weights("one", run_id) == engines.weights("group", run_id)


def by_loss(engine: Driver, run_id: str, loss: LossSpec, columns: Any, **config: Any) -> list[object]:
    """What an engine says of two steps of a loss."""
    head = loss.head or ("value" if "values" in loss.optional_scores else "")
    labels = {"num_labels": 64} if head == "classification" else {}
    engine.create(run_id, seed=5, head=head, lanes=4, **labels, **config)
    figures: list[object] = []
    for _ in range(2):
        found = engine.do(run_id, columns, forward_backward=loss_call(loss)).proto.loss
        figures += [found.loss, sorted(found.metrics.items()), found.num_microbatches, list(found.warnings)]
        figures.append(engine.do(run_id, optim_step=STEP).proto.optim_step)
    engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="now"))
    return figures


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in LOSSES]
)
def test_every_loss_gives_the_bits_of_one_process(engines: Engines, batches: Any, name: str) -> None:
    loss = get_loss(name)
    columns = batches.columns(loss, rows=9, shortest=2, longest=9)
    one, group = (
        by_loss(engine, f"run-{name}", loss, columns, lora={"rank": 4}) for engine in (engines.one, engines.group)
    )
    assert repr(one) == repr(group)  # NaN is NaN
    assert engines.weights("one", f"run-{name}") == engines.weights("group", f"run-{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains_all_weights(engines: Engines, batches: Any, name: str) -> None:
    """To the bits of one process; divided weights to the same bits again, and to rounding of those of one process."""
    loss = get_loss(name)
    columns = batches.columns(loss, rows=9, shortest=2, longest=9)
    one, group = (by_loss(engine, f"full-{name}", loss, columns) for engine in (engines.one, engines.group))
    if "weights divided" in engines.group.hello.hello.device:
        np.testing.assert_allclose(numbers(group), numbers(one), atol=1e-5, rtol=1e-4)
        assert repr(by_loss(engines.group, f"full-{name}-again", loss, columns)) == repr(group)
        again = engines.weights("group", f"full-{name}-again")
    else:
        assert repr(one) == repr(group)
        again = engines.weights("one", f"full-{name}")
    assert again == engines.weights("group", f"full-{name}")


def numbers(figures: list[object]) -> list[float]:
    """The numbers among what :func:`by_loss` returns."""
    found: list[float] = []
    for each in figures:
        if isinstance(each, pb.OptimStepResult):
            found.append(each.grad_norm)
        elif isinstance(each, list):
            found += [value for item in each if isinstance(item, tuple) for value in item[1:]]
        elif isinstance(each, int | float):
            found.append(each)
    return found


def test_an_error_of_one_rank_is_that_of_the_operation(engines: Engines) -> None:
    """Memory that runs out on one rank halves the micro-batches of all; any other error fails the operation."""
    engines.group.create("run-errors", seed=1, lora={"rank": 2}, lanes=4)
    for name in ("memory", "memory_in_its_part", "fault", "fault_in_its_part"):
        found = engines.group.op("run-errors", ROWS, forward_backward=pb.LossCall(loss_fn=name))
        if "memory" in name:
            assert found.proto.loss.limits.microbatch_tokens == 8
        else:
            assert "ValueError" in found.proto.error.message
    assert engines.group.do("run-errors", optim_step=STEP).proto.optim_step.num_accumulated == 2


@pytest.mark.slow  # a group of its own
def test_eight_ranks_give_the_bits_of_one_process(tiny_model_path: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"microbatch_tokens": 16, "threads": 1}
    models = {"tiny": tiny_model_path}
    group = EngineProcess(models, tmp_path / "group", ranks=8, **settings)
    try:
        engines = Engines(LocalEngine(models, tmp_path / "one", **settings), group, tmp_path)
        config = {"lora": {"rank": 4, "dropout": 0.2}, "lanes": 8}
        assert trained(engines.one, "run-a", **config) == trained(group, "run-a", **config)
        assert engines.weights("one", "run-a") == engines.weights("group", "run-a")
    finally:
        group.kill()


@pytest.mark.slow  # the tests of faults kill ranks, too
def test_a_group_that_loses_a_rank_ends_as_one(tiny_model_path: Path, tmp_path: Path) -> None:
    engine = EngineProcess({"tiny": tiny_model_path}, tmp_path, ranks=2)
    try:
        engine.create("run-a", seed=1, lora=4)
        engine.train("run-a", ROWS)
        (other,) = children(engine.process.pid)
        os.kill(other, signal.SIGKILL)
        with pytest.raises(LinkClosed):
            while True:
                engine.receive()
        assert engine.process.wait(60) == BROKEN
        wait_for("the other rank's end", lambda: not Path(f"/proc/{other}").exists())
    finally:
        engine.kill()


@pytest.mark.slow  # groups of their own
@pytest.mark.parametrize("by", ["a checkpoint", "steps"])
def test_ranks_with_different_weights_end(tiny_model_path: Path, tmp_path: Path, by: str) -> None:
    """Before a checkpoint is written, or within the steps after which the ranks compare their weights."""
    (tmp_path / "losses.py").write_text(FAILING)
    engine = EngineProcess({"tiny": tiny_model_path}, tmp_path, ranks=2, losses=[tmp_path / "losses.py"])
    try:
        engine.create("run-a", seed=1, lora=4)
        engine.do("run-a", ROWS, forward_backward=pb.LossCall(loss_fn="spoils"))
        with pytest.raises(LinkClosed):
            if by == "a checkpoint":
                engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="now"))
            for _ in range(COMPARED_STEPS if by == "steps" else 0):
                engine.train("run-a", ROWS)
        assert not list(tmp_path.rglob("*.safetensors"))
    finally:
        engine.kill()
