"""Rows that begin alike, at any depth: losses, metrics and gradients are those of flat rows."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_losses.registry import LossConfig, LossSpec, all_losses, get_loss
from gradwire_server.engine.model.attention import blocks
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Packing, lay_out
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.prefix_tree import distinct_tokens
from gradwire_server.engine.scoring.forward import Scoring, score_batch
from gradwire_server.engine.scoring.planner import Budget, split
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.step import Reference
from gradwire_server.engine.training.loss_report import LossEvaluation
from support.training import train_on
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

VOCAB, CONTEXT = 64, 128
WHOLE = Budget(microbatch_tokens=10**6, activation_bytes=1 << 40)
PARTS = Budget(microbatch_tokens=40, activation_bytes=1 << 40, kept_tokens=60)
RECOMPUTED = Budget(microbatch_tokens=40, activation_bytes=0, kept_tokens=0)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> ModelPool:
    """A model that computes in float64 throughout: norms of others compute in float32 whatever they are given."""
    path = tmp_path_factory.mktemp("neox")
    config = GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, initializer_range=0.2, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPTNeoXForCausalLM(config).save_pretrained(path)
    return ModelPool({"tiny": str(path)}, dtype=torch.float64)


def forest(lengths: list[int], seed: int) -> list[list[int]]:
    """Rows of these lengths, each of which begins as a part of an earlier one, or with tokens of its own."""
    choose, rows = random.Random(seed), list[list[int]]()
    for length in lengths:
        begun = choose.choice(rows) if rows and choose.random() < 0.9 else []
        begun = begun[: choose.choice([len(begun), choose.randint(0, len(begun))])][:length]
        rows.append(begun + [choose.randrange(VOCAB) for _ in range(length - len(begun))])
    return rows


def in_trees(batch: Batch, loss: LossSpec, seed: int) -> Batch:
    """The batch with other tokens, in trees."""
    while True:
        rows = forest(batch.lengths.tolist(), seed)
        if any(field.name == "teacher_input_ids" for field in loss.fields):  # of a student's row the last tokens
            scored = batch.scored.split(batch.lengths.tolist())
            for number in range(0, len(rows), 2):
                first = int(scored[number].nonzero()[0])
                rows[number + 1] = rows[number + 1][:first] + rows[number][first:]
        ids = torch.tensor([token for row in rows for token in row])
        if distinct_tokens(ids, batch.lengths, range(len(rows))) < 0.8 * len(ids):
            return dataclasses.replace(batch, input_ids=ids)
        seed += 1


def config_of(loss: LossSpec) -> LossConfig:
    kwargs: dict[str, Any] = {"reference_model": "base"} if "reference_model" in loss.config.model_fields else {}
    return loss.config(**kwargs, **({"reduction_divisor": 16.0} if loss.name == "dr_grpo" else {}))


def reference_of(run: EngineRun) -> Reference:
    def reference(batch: Batch, temperature: float) -> torch.Tensor:
        base = Policy(run.policy.split_model)
        return score_batch(Scoring(base, batch, ["logprobs"], 1.5 * temperature, None, WHOLE))["logprobs"]

    return reference


def trained(
    run: EngineRun, batch: Batch, loss: LossSpec, budget: Budget
) -> tuple[LossEvaluation, dict[str, torch.Tensor]]:
    run.accumulator.clear()
    report = train_on(
        run.policy, batch, loss, config_of(loss), run.accumulator, reference=reference_of(run),
        teacher=Policy(run.policy.split_model), budget=budget,
    )  # fmt: skip
    sums, factor = run.accumulator.normalised()
    return report, {name: value * factor for name, value in sums.items()}


CORE = ("causal_lm", "dpo", "grpo", "ppo", "reward_modeling")
NAMES = [loss.name for loss in all_losses()]
CASES = [
    pytest.param(name, lora, marks=() if name in CORE else pytest.mark.slow)  # the others take a minute together
    for name in NAMES
    for lora in (None, 4)
    if lora or name in CORE
]


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_a_forest_has_the_loss_metrics_and_gradient_of_flat_rows(
    make_run: Any, pool: ModelPool, batches: Any, seed: int, name: str, lora: int | None
) -> None:
    loss = get_loss(name)
    head = loss.head or ("value" if "values" in loss.optional_scores else "")
    run = make_run(lora=lora, head=head, pool=pool)
    with run.rng(), torch.no_grad():
        for master in run.policy.masters().values():
            master.add_(torch.randn_like(master), alpha=0.02)
        run.policy.sync()
    batch = in_trees(batches.batch(loss, rows=6, shortest=12, longest=31), loss, seed)
    split_model = run.policy.split_model
    assert split_model.packing is Packing.SHARED
    split_model.packing = Packing.PACKED
    try:
        flat, expected = trained(run, batch, loss, WHOLE)
    finally:
        split_model.packing = Packing.SHARED
    assert any(value.any() for value in expected.values())
    together = dataclasses.replace(loss, streams=lambda config, present: False)
    # Scores of several micro-batches, of a reference and of samplers are float32, so a last bit may round differently.
    exact = 1e-12 if name in CORE and "reference_model" not in loss.config.model_fields else 1e-7
    cases = ((loss, WHOLE), (loss, PARTS), (together, RECOMPUTED))
    for variant, budget in cases if name in CORE else cases[1:2]:
        report, found = trained(run, batch, variant, budget)
        assert (report.num_microbatches > 1) == (budget is not WHOLE)
        assert report.num_computed_tokens <= flat.num_computed_tokens == flat.num_tokens == report.num_tokens
        assert budget is not WHOLE or report.num_computed_tokens < 0.8 * flat.num_tokens
        tolerance = exact if budget is WHOLE else 1e-6 if name in CORE else 1e-5
        assert report.metrics == pytest.approx(flat.metrics, rel=1e-5, abs=1e-6, nan_ok=True)
        assert report.loss == pytest.approx(flat.loss, rel=tolerance, abs=tolerance)
        for key, value in expected.items():
            error, size = float((found[key] - value).abs().max()), max(1.0, float(value.abs().max()))
            assert error <= tolerance * size, (key, error)


def test_a_row_a_turn_is_computed_as_one_row_a_conversation(make_run: Any, pool: ModelPool) -> None:
    """Also its output head: a token that several rows score is predicted once."""
    run, rows = make_run(lora=4, pool=pool), list[list[int]]()
    choose = random.Random(0)
    head = [choose.randrange(VOCAB) for _ in range(40)]
    for _ in range(3):
        row = head
        for _ in range(4):
            row = row + [choose.randrange(VOCAB) for _ in range(10)]
            rows.append(row)
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([token for row in rows for token in row])
    scored = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    batch = Batch(ids, lengths, scored, torch.ones_like(lengths))
    assert len(lay_out(ids, lengths, torch.tensor([len(rows)])).input_ids) == 40 + 3 * 40
    scoring = Scoring(run.policy, batch, ["logprobs"], 1.0, None, WHOLE)
    distinct, _ = scoring.arranged(training=True)
    assert len(distinct.positions) == 40 - 1 + 3 * 40 and len(scoring.positions) == batch.num_scored
    assert [micro.computed_tokens for micro in split(batch, 10**6, Packing.SHARED)] == [160]


def turns(conversations: int, head: int, own: int, count: int) -> Batch:
    """One row a turn, in the order of the turns, of conversations that begin alike."""
    choose = random.Random(1)
    begun = [[choose.randrange(1000) for _ in range(head)]] * conversations
    rows = []
    for _ in range(count):
        begun = [row + [choose.randrange(1000) for _ in range(own)] for row in begun]
        rows += begun
    lengths = torch.tensor([len(row) for row in rows])
    scored = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    return Batch(torch.tensor([token for row in rows for token in row]), lengths, scored, torch.ones_like(lengths))


def test_trees_are_cut_where_little_is_computed_again() -> None:
    trees = [turns(4, 60, 10, 3), turns(4, 10, 60, 3)]
    # A head of 60 tokens in a micro-batch of 100 would be computed again in each: it grows, where memory lets it.
    assert [micro.computed_tokens for micro in split(trees[0], 100, Packing.SHARED, tree_tokens=200)] == [180]
    # Where it does not, conversations are not cut, only the head is computed again.
    assert [micro.computed_tokens for micro in split(trees[0], 100, Packing.SHARED, tree_tokens=120)] == [120, 120]
    # One of 10 tokens costs little; two conversations do not share it.
    assert [micro.computed_tokens for micro in split(trees[1], 400, Packing.SHARED)] == [380, 380]


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_get_parts_of_a_tree_of_about_equal_size(lanes: int) -> None:
    batch = turns(8, 40, 20, 4)
    micros = split(batch, 10**6, Packing.SHARED, lanes=lanes)
    assert len(micros) % lanes == 0
    loads = [sum(micro.computed_tokens for micro in micros[lane::lanes]) for lane in range(lanes)]
    assert max(loads) <= 1.3 * min(loads) and sum(loads) < 0.5 * len(batch.input_ids)
    assert sorted(torch.cat([micro.examples for micro in micros]).tolist()) == list(range(batch.num_examples))


@pytest.mark.parametrize("seed", range(3))
def test_every_kernel_attends_from_a_node_to_its_ancestors(seed: int) -> None:
    """The plans of the kernels have the pairs of a query and a key that flat rows have, each once."""
    choose = random.Random(seed)
    rows = forest([choose.randint(1, 150) for _ in range(20)], seed)
    lengths = torch.tensor([len(row) for row in rows])
    layout = lay_out(torch.tensor([token for row in rows for token in row]), lengths, torch.tensor([len(rows)]))
    count = len(layout.input_ids)
    pairs = torch.zeros(count, count, dtype=torch.int64)
    for places in layout.places.split(lengths.tolist()):
        for number, place in enumerate(places):
            pairs[place, places[: number + 1]] = 1
    planned, called, listed, copied = (torch.zeros_like(pairs) for _ in range(4))
    plan = layout.query_blocks
    for _, _, first, last in plan.blocks.tolist():
        for start, stop, key, end in plan.parts[first:last].tolist():
            for query in range(start, stop):
                planned[query, key : min(end, query + 1)] += 1
    for start, stop, key, end in layout.prefix_blocks:
        called[start:stop, key:end] += 1
    for segment, keys in zip(layout.segments, (each.keys for each in layout.masked.segments), strict=True):
        for number in range(segment.length):
            called[segment.start + number, segment.start : segment.start + number + 1] += 1
            listed[segment.start + number, keys[: len(keys) - segment.length + number + 1]] += 1
    queries, offsets, places = layout.on(torch.device("cpu"))  # as kernels of a GPU take them, with copied keys
    assert places is not None
    for (start, stop), (key, end) in zip(pairwise(queries.tolist()), pairwise(offsets.tolist()), strict=True):
        for query in range(start, stop):
            copied[query, places[key : end - stop + query + 1]] += 1
    for found in (planned, called, listed, copied):
        assert torch.equal(found, pairs)


def test_the_kernels_of_the_cpu_are_tried_with_nodes_within_nodes() -> None:
    layout = blocks.tree_layout()
    assert {len(segment.spans) for segment in layout.segments} == {0, 1, 2}
