"""A batch in parts: every loss gives what it gives on the whole, bit for bit; without parts, if its batch matters, it
says that several calls were not one batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.registry import LossSpec, all_losses, get_loss, load_builtin_losses
from gradwire_proto.codec import Column
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import LocalEngine, loss_call, token_rows

load_builtin_losses()
LOSSES = [loss.name for loss in all_losses() if loss.function.__module__.startswith("gradwire_losses.")]
STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8)
CUTS = (0, 2, 5, 9)
STATISTICS: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {"loss_type": "aot"}),
    ("dpo", {"loss_type": "aot_unpaired"}),
    ("grpo", {"scale_rewards": "batch"}),
    ("grpo", {"whiten_advantages": True}),
    ("grpo", {"top_entropy_quantile": 0.5}),
    ("grpo", {"advantage_scale": "nonzero"}),
    ("grpo", {"surrogate": "clip_cov", "cov_share": 0.3, "cov_min": -9.0}),
    ("grpo", {"surrogate": "kl_cov", "cov_share": 0.3}),
    ("kto", {"loss_type": "apo_zero_unpaired"}),
    ("value_only", {"whiten_rewards": True}),
    ("enhanced_ppo", {"whiten_advantages": False}),
]
"""Arguments by which a loss takes a statistic of its batch, or takes none."""

Columns = dict[str, Column]


@pytest.fixture(scope="module")
def shared(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    return LocalEngine({"tiny": model_path}, tmp_path_factory.mktemp("engine"))


@pytest.fixture
def engine(shared: LocalEngine) -> Iterator[LocalEngine]:
    yield shared
    for run in list(shared.context.runs):
        shared.request(drop_run=engine_pb2.EngineDropRun(run_id=run))


def rows_of(columns: Columns, first: int, last: int) -> Columns:
    """Rows ``first`` to ``last - 1`` of a batch."""
    found = {}
    for name, column in columns.items():
        begin, end, levels = first, last, []
        for level in column.levels:
            levels.append(level[begin:end])
            begin, end = int(level[:begin].sum()), int(level[:end].sum())
        found[name] = Column(column.values[begin:end], tuple(levels))
    return found


def create(engine: LocalEngine, run: str, loss: LossSpec) -> None:
    head = loss.head or ("value" if "values" in loss.optional_scores else "")
    labels = {"num_labels": 64} if head == "classification" else {}
    engine.create(run, lora=4, head=head, seed=3, **labels)
    policy = engine.context.runs[run].policy
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # ratios to the reference other than 1
        for master in policy.masters().values():
            master.add_(torch.randn(master.shape, generator=generator), alpha=0.05)
    policy.sync()


def gradient(engine: LocalEngine, run: str) -> dict[str, torch.Tensor]:
    gradients, factor = engine.context.runs[run].accumulator.normalised()
    return {name: value * factor for name, value in gradients.items()}


@pytest.mark.parametrize(("name", "kwargs"), [*((name, {}) for name in LOSSES), *STATISTICS])
def test_parts_are_the_whole_and_calls_are_where_the_loss_says_so(
    engine: LocalEngine, batches: Any, name: str, kwargs: dict[str, Any]
) -> None:
    loss = get_loss(name)
    call = partial(loss_call, loss, kwargs)
    columns = batches.columns(loss, rows=9, shortest=2, longest=9)
    parts = [rows_of(columns, first, last) for first, last in itertools.pairwise(CUTS)]
    for run in ("run-whole", "run-parts", "run-calls"):
        create(engine, run, loss)
    whole = engine.do("run-whole", columns, forward_backward=call()).proto.loss
    expected = gradient(engine, "run-whole")
    assert any(value.any() for value in expected.values())

    for part in parts[:-1]:
        held = engine.do("run-parts", part, forward_backward=call(accumulate=True)).proto.loss
        assert not held.HasField("loss") and held.num_tokens == 0
    assert engine.context.runs["run-parts"].accumulator.empty
    found = engine.do("run-parts", parts[-1], forward_backward=call()).proto.loss
    assert (found.loss, found.num_tokens, found.num_loss_tokens) == (
        whole.loss,
        whole.num_tokens,
        whole.num_loss_tokens,
    )
    assert dict(found.metrics) == pytest.approx(dict(whole.metrics), rel=0, abs=0, nan_ok=True)
    mine = gradient(engine, "run-parts")
    assert all(torch.equal(mine[name], value) for name, value in expected.items())
    assert engine.do("run-parts", optim_step=STEP).proto.optim_step.num_accumulated == 1

    for part in parts:
        last = engine.do("run-calls", part, forward_backward=call()).proto.loss
    said = [warning for warning in last.warnings if "accumulate=True" in warning]
    if not said:
        apart = gradient(engine, "run-calls")
        for name, value in expected.items():
            torch.testing.assert_close(apart[name], value, atol=1e-5, rtol=1e-4)
    else:
        assert loss.whole_batch in said[0] and loss.whole_batch


def test_parts_leave_the_memory_with_their_run_and_come_back(model_path: Path, tmp_path: Path, batches: Any) -> None:
    loss = get_loss("bco")
    columns = batches.columns(loss, rows=9, shortest=2, longest=9)
    engine = LocalEngine({"tiny": model_path}, tmp_path, run_memory=0, run_host_memory=0)
    held, residency = engine.context.runs, engine.context.residency
    for run in ("run-whole", "run-parts"):
        engine.create(run, lora=4, seed=3)
    engine.do("run-whole", columns, forward_backward=loss_call(loss))
    for first, last in ((0, 2), (2, 5)):
        part = rows_of(columns, first, last)
        before = sum(each.nbytes for each in residency.held().values())
        engine.do("run-parts", part, forward_backward=loss_call(loss, accumulate=True))
        residency._mover.submit(lambda: None).result(60)
        size = sum(each.nbytes for column in part.values() for each in (column.values, *column.levels))
        assert residency.place("run-parts") == "disk" and not held["run-parts"].accumulator.parts._parts
        assert sum(each.nbytes for each in residency.held().values()) >= before + size
    lengths = held["run-parts"].accumulator.parts.row_lengths("input_ids")  # read before the run comes back
    assert np.concatenate(lengths).tolist() == columns["input_ids"].levels[-1][:5].tolist()
    engine.do("run-parts", rows_of(columns, 5, 9), forward_backward=loss_call(loss))
    weights = []
    for run in ("run-whole", "run-parts"):
        engine.do(run, optim_step=STEP)
        residency.use(held[run])
        weights.append({name: each.detach().clone() for name, each in held[run].policy.masters().items()})
    assert weights[0] and all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


def test_parts_survive_a_checkpoint_and_end_with_their_accumulation(engine: LocalEngine, batches: Any) -> None:
    loss = get_loss("bco")
    columns = batches.columns(loss, rows=9, shortest=2, longest=9)
    for run in ("run-a", "run-b"):
        create(engine, run, loss)
    engine.do("run-a", columns, forward_backward=loss_call(loss))
    expected = gradient(engine, "run-a")

    part = rows_of(columns, 0, 5)
    engine.do("run-b", part, forward_backward=loss_call(loss, accumulate=True))
    engine.do("run-b", save_checkpoint=pb.SaveCheckpoint(name="between"))
    for ending in (pb.Operation(zero_grad=pb.ZeroGrad()), pb.Operation(optim_step=STEP)):
        kind = ending.WhichOneof("kind")
        done = engine.op("run-b", **{kind: getattr(ending, kind)})
        assert done.ok == (kind == "zero_grad")
        assert not engine.context.runs["run-b"].accumulator.parts
        engine.do("run-b", load_checkpoint=pb.LoadCheckpoint(checkpoint="run-b/between"))
        assert len(engine.context.runs["run-b"].accumulator.parts) == 1
    assert done.proto.error.code == pb.ERROR_CODE_NOTHING_TO_STEP and "last part" in done.proto.error.message
    step = pb.TrainStep(loss=loss_call(loss), optim_step=STEP)
    with_step = engine.do("run-b", rows_of(columns, 5, 9), train_step=step).proto.train_step
    assert not engine.context.runs["run-b"].accumulator.parts
    engine.do("run-a", optim_step=STEP)
    assert with_step.optim_step.num_accumulated == 1
    mine, theirs = (engine.context.runs[run].policy.masters() for run in ("run-a", "run-b"))
    assert expected and all(torch.equal(mine[name], theirs[name]) for name in mine)


ROWS = token_rows([[1, 20, 30, 40], [1, 9, 8]])
LABELLED = ROWS | {"label": Column(np.array([1.0, 0.0], np.float32))}


def bco(kwargs: str = '{"reference_model": "base"}', **more: Any) -> pb.LossCall:
    return pb.LossCall(loss_fn="bco", loss_kwargs_json=kwargs, **more)


REFUSED = [
    (bco(accumulate=True, outputs=["logprobs"]), LABELLED, "outputs", "last part"),
    (bco(accumulate=True), token_rows([[1, 99]]) | {"label": Column(np.ones(1, np.float32))}, "input_ids", "99"),
    (bco('{"beta": 0.2}'), LABELLED, "loss_kwargs", "zero_grad"),
    (pb.LossCall(loss_fn="causal_lm"), ROWS, "loss_fn", "'bco'"),
    (bco(), LABELLED | {"weights": Column(np.ones(2, np.float32))}, "weights", "part 2"),
    (bco(accumulate=True), LABELLED | {"loss_mask": ROWS["input_ids"]}, "loss_mask", "first part has not"),
]


@pytest.mark.parametrize(("wrong", "columns", "field", "said"), REFUSED)
def test_what_is_no_part_of_this_batch_is_refused_and_leaves_its_parts(
    engine: LocalEngine, wrong: pb.LossCall, columns: Columns, field: str, said: str
) -> None:
    engine.create("run-a", lora=4)
    engine.do("run-a", LABELLED, forward_backward=bco(accumulate=True))
    error = engine.op("run-a", columns, forward_backward=wrong).proto.error
    assert error.field == field and said in error.message
    assert len(engine.context.runs["run-a"].accumulator.parts) == 1
    assert engine.do("run-a", LABELLED, forward_backward=bco()).proto.loss.num_sequences == 4


@pytest.mark.parametrize("kind", ["forward", "train_step"])
def test_only_forward_backward_takes_parts(engine: LocalEngine, kind: str) -> None:
    engine.create("run-a", lora=4)
    part = bco(accumulate=True)
    message = part if kind == "forward" else pb.TrainStep(loss=part, optim_step=STEP)
    error = engine.op("run-a", LABELLED, **{kind: message}).proto.error
    assert (error.code, error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "accumulate")


def test_smaller_micro_batches_are_planned_for_all_parts(engine: LocalEngine) -> None:
    engine.create("run-a", lora=4)
    for _ in range(3):
        engine.do("run-a", ROWS, forward_backward=pb.LossCall(loss_fn="causal_lm", accumulate=True))
    run = engine.context.runs["run-a"]
    smaller = engine.context.decisions.after_out_of_memory(run, ROWS, engine.context.memory.most)
    assert smaller is not None and smaller.microbatch_tokens == 8 * 4 // 2  # half of eight rows of four tokens
