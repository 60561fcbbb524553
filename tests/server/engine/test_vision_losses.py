"""Every loss on rows with images, and the memory of the vision part in the plan of micro-batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.wire.images import to_image_columns
from gradwire_losses.registry import LossSpec, all_losses, get_loss
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.operations import limits
from gradwire_server.engine.scoring.memory import ActivationMeter, measured_image_bytes, measured_token_bytes
from gradwire_server.engine.scoring.planner import Budget, MicroBatch, split
from gradwire_server.engine.step import Step, resolve
from support.engine import LocalEngine, Result, token_rows
from support.vision import picture, vision_model

KIND = "smolvlm"
CAT, DOG, TALL = picture(1, 16, 24), picture(2, 32, 16), picture(3, 40, 8)
WHOLE = Budget(10**6, activation_bytes=1 << 40)
VARIANTS = {
    "a row at a time": Budget(1, activation_bytes=1 << 40),
    "graphs given up": Budget(1, activation_bytes=0),
    "recomputed": Budget(10**6, activation_bytes=1 << 40, kept_tokens=0, whole_tokens=0),
}
TOLERANCE = 2e-4
"""Relative, of float32 sums in another order."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("vision") / KIND, KIND)


@pytest.fixture(scope="module")
def engine(path: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    return LocalEngine({"m": path}, tmp_path_factory.mktemp("state"))


def call_of(loss: LossSpec) -> pb.LossCall:
    kwargs = ['"reference_model": "base"'] if "reference_model" in loss.config.model_fields else []
    kwargs += ['"reduction_divisor": 4.0'] if loss.name == "dr_grpo" else []
    return pb.LossCall(loss_fn=loss.name, loss_kwargs_json=f"{{{', '.join(kwargs)}}}")


def with_marks(columns: dict[str, Column], mark: int, rows: int) -> dict[str, Column]:
    """The first token of each of the rows' texts, and of each prompt, is an image; of the last row there is none."""
    texts = [name for name in columns if name.endswith("input_ids") or name == "prompt_ids"]
    marked = {}
    for name in texts:
        values, lengths = columns[name].values.copy(), columns[name].levels[-1]
        values[(lengths.cumsum() - lengths)[: rows - 1]] = mark
        marked[name] = Column(values, columns[name].levels)
    return columns | marked


def step(engine: LocalEngine, run_id: str, columns: dict[str, Column], call: pb.LossCall, budget: Budget) -> Result:
    """A ``forward_backward`` from an empty accumulation within a budget."""
    engine.do(run_id, zero_grad=pb.ZeroGrad())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.context.memory, "budget", lambda *_: budget)
        return engine.do(run_id, columns, forward_backward=call)


def gradient(engine: LocalEngine, run_id: str) -> dict[str, torch.Tensor]:
    gradients, factor = engine.context.runs[run_id].accumulator.normalised()
    return {name: each * factor for name, each in gradients.items()}


OFTEN = ("causal_lm", "dpo", "grpo", "conservative_ppo", "process_reward", "cross_entropy", "gkd", "kto")
"""One of each layout, head, and way to take scores; the others differ in arithmetic alone."""


@pytest.mark.parametrize(
    "name", [pytest.param(each.name, marks=() if each.name in OFTEN else pytest.mark.slow) for each in all_losses()]
)
def test_every_loss_takes_rows_with_images(engine: LocalEngine, batches: Any, name: str) -> None:
    """The images reach the scores and the vision part's gradient, and no plan of micro-batches changes either."""
    loss, rows, run_id = get_loss(name), 4, f"run-{name.replace('_', '-')}"
    head = loss.head or ("value" if "values" in loss.optional_scores else "")
    engine.create(
        run_id, base_model="m", head=head, num_labels=64 if head == "classification" else 0,
        lora={"rank": 2, "target_modules": ["all-linear", "vision"]}, seed=1,
    )  # fmt: skip
    run = engine.context.runs[run_id]
    with run.rng(), torch.no_grad():  # no gradient is zero because the adapters still are
        for master in run.policy.masters().values():
            master.add_(torch.randn_like(master), alpha=0.05)
    run.policy.sync()
    vision = run.policy.split_model.vision
    assert vision is not None
    columns = with_marks(batches.columns(loss, rows, 3, 9), vision.image_token, rows)
    shown = columns | to_image_columns([[CAT], [DOG], [CAT], []], rows)
    call = call_of(loss)
    whole = step(engine, run_id, shown, call, WHOLE).proto.loss
    expected = gradient(engine, run_id)
    assert any("vision_model" in key and bool(each.any()) for key, each in expected.items())
    assert all(each.isfinite().all() for each in expected.values())
    others = columns | to_image_columns([[TALL], [DOG], [CAT], []], rows)
    step(engine, run_id, others, call, WHOLE)
    changed = gradient(engine, run_id)
    assert any(not torch.equal(changed[key], each) for key, each in expected.items()), "another image changes nothing"
    for case, budget in VARIANTS.items():
        found = step(engine, run_id, shown, call, budget).proto.loss
        assert found.num_microbatches == (1 if case == "recomputed" else rows), case
        assert dict(found.metrics) == pytest.approx(dict(whole.metrics), rel=1e-4, abs=1e-5, nan_ok=True), case
        again = gradient(engine, run_id)
        for key, each in expected.items():
            difference = float((again[key] - each).abs().max())
            assert difference <= TOLERANCE * max(1.0, float(each.abs().max())), (case, key)
    engine.op(run_id, optim_step=pb.OptimStep(learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8))


def test_a_forest_of_rows_with_images_has_the_gradient_of_flat_rows(engine: LocalEngine) -> None:
    """Rows share up to where their texts or their images differ."""
    run_id, words = "run-forest", list(range(5, 35))
    lora = {"rank": 2, "target_modules": ["all-linear", "vision"]}
    engine.create(run_id, base_model="m", lora=lora, seed=1)
    run = engine.context.runs[run_id]
    with run.rng(), torch.no_grad():
        for master in run.policy.masters().values():
            master.add_(torch.randn_like(master), alpha=0.05)
    run.policy.sync()
    split_model = run.policy.split_model
    assert split_model.vision is not None and split_model.packing is Packing.SHARED
    mark = split_model.vision.image_token
    begun = [*words, mark, *words]
    rows = [[*begun, 7, 8], [*begun, 7, 9, mark, 3], [*begun, 7, 8], begun, [*words, 1], [*begun, 7, 9, mark, *words]]
    images = [[CAT], [CAT, DOG], [TALL], [CAT], [], [CAT, DOG]]
    columns, call = token_rows(rows) | to_image_columns(images, len(rows)), call_of(get_loss("causal_lm"))
    split_model.packing = Packing.PACKED
    flat = step(engine, run_id, columns, call, WHOLE).proto.loss
    expected = gradient(engine, run_id)
    split_model.packing = Packing.SHARED
    for case, budget in {"whole": WHOLE, **VARIANTS, "parts": Budget(120, activation_bytes=1 << 40)}.items():
        found = step(engine, run_id, columns, call, budget).proto.loss
        assert budget is not WHOLE or found.num_computed_tokens < 0.7 * flat.num_computed_tokens
        assert found.loss == pytest.approx(flat.loss, rel=1e-5), case
        for key, each in gradient(engine, run_id).items():
            difference = float((each - expected[key]).abs().max())
            assert difference <= TOLERANCE * max(1.0, float(expected[key].abs().max())), (case, key)


# ------------------------------------------------------------------ memory


def step_of(engine: LocalEngine, run_id: str, images: list[np.ndarray], budget: Budget) -> Step:
    run = engine.context.runs[run_id]
    assert run.policy.split_model.vision is not None
    mark = run.policy.split_model.vision.image_token
    columns = token_rows([[mark, 5, 6, 7]] * len(images)) | to_image_columns([[each] for each in images], len(images))
    call = pb.LossCall(loss_fn="causal_lm")
    with run.rng():
        return resolve(run, call, columns, references=engine.context.references, budget=budget)


def saved_bytes(planned: Step, micro: MicroBatch) -> int:
    """Bytes that autograd saves of the trunk and the vision part for a micro-batch."""
    batch, meter = micro.batch, ActivationMeter(planned.policy)
    with meter:
        planned.policy.hidden(
            batch.input_ids, batch.lengths, training=True, activations=micro.activations, images=batch.images
        )
    return meter.bytes


@pytest.mark.parametrize("trained", ["all weights", "vision", "language"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_of_large_images_stay_within_the_memory_of_their_plan(
    engine: LocalEngine, trained: str, checkpointing: bool
) -> None:
    run_id = f"run-{trained.split()[0]}-{checkpointing}".lower()
    lora = {"vision": {"rank": 2, "target_modules": ["vision"]}, "language": {"rank": 2}}.get(trained)
    engine.create(run_id, base_model="m", lora=lora, gradient_checkpointing=checkpointing)
    run = engine.context.runs[run_id]
    planned = engine.context.memory.budget(run)
    of_token = measured_token_bytes(run.policy)
    each = of_token.recomputed if checkpointing else of_token.kept
    of_image = measured_image_bytes(run.policy, recompute=checkpointing)
    assert planned.image_cost == of_image / each
    images = [picture(number, 32, 32) for number in range(32)]
    tokens = len(step_of(engine, run_id, images, WHOLE).batch.input_ids)
    tight = dataclasses.replace(planned, microbatch_tokens=tokens)
    training = step_of(engine, run_id, images, tight)
    assert len(training.micros) > 1, "the images count for nothing"
    for micro in training.micros:
        assert micro.computed_tokens <= tokens
        assert saved_bytes(training, micro) <= tokens * each
    (unaware,) = step_of(engine, run_id, images, dataclasses.replace(tight, image_cost=0.0)).micros
    if trained == "all weights" and not checkpointing:  # the limit is one: as a whole they take more
        assert saved_bytes(training, unaware) > tokens * each


def test_an_image_counts_once_in_a_micro_batch_however_many_rows_show_it(engine: LocalEngine) -> None:
    engine.create("run-shared", base_model="m", lora=2)
    alike = step_of(engine, "run-shared", [CAT] * 8, WHOLE).batch
    different = step_of(engine, "run-shared", [picture(number, 16, 24) for number in range(8)], WHOLE).batch
    assert len(alike.input_ids) == len(different.input_ids)
    tokens, packing = len(alike.input_ids), engine.context.runs["run-shared"].policy.packing()
    assert alike.images is not None
    of_one = alike.images.pictures[0].count
    (once,) = split(alike, 10**6, packing, image_cost=2.0)
    assert once.computed_tokens == tokens // 8 + 2 * of_one  # rows with one image and one text are one
    (whole,) = split(different, 10**6, packing, image_cost=2.0)
    assert whole.computed_tokens == tokens + 2 * of_one * 8
    for batch, count in ((alike, 1), (different, 8)):
        assert len(split(batch, tokens + 2 * of_one, packing, image_cost=2.0)) >= min(count, 2)
    assert len(split(alike, tokens + 2 * of_one, packing, image_cost=2.0)) == 1


def test_what_images_count_as_is_in_the_recorded_limits() -> None:
    budget = Budget(7, image_cost=2.5, beyond=Activations.RECOMPUTE)
    assert limits.from_wire(limits.to_wire(budget)) == budget
