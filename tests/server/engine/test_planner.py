"""Micro-batches: within the budget, complete, deterministic, and with indices that lead back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_losses.registry import get_loss
from gradwire_server.engine.model.packing import Packing, arrange
from gradwire_server.engine.scoring.planner import split


def batch_of(lengths: list[int], group_sizes: list[int] | None = None) -> Batch:
    sizes = torch.tensor(lengths)
    scored = torch.ones(int(sizes.sum()), dtype=torch.bool)
    scored[sizes.cumsum(0) - sizes] = False
    groups = torch.tensor(group_sizes or [1] * len(lengths))
    return Batch(torch.arange(int(sizes.sum())), sizes, scored, groups)


@pytest.mark.parametrize("loss", ["causal_lm", "dpo", "grpo"])
@pytest.mark.parametrize("tokens", [1, 20, 60, 10**6])
@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize("packing", list(Packing))
def test_every_example_goes_through_once_and_indices_lead_back(
    batches: Any, loss: str, tokens: int, packing: Packing, lanes: int
) -> None:
    batch = batches.batch(get_loss(loss), rows=11)
    micros = split(batch, tokens, packing, lanes=lanes)
    assert len(micros) >= min(lanes, 11)
    examples = torch.cat([micro.examples for micro in micros])
    assert sorted(examples.tolist()) == list(range(11))
    for micro in micros:
        arranged = arrange(packing, micro.batch.input_ids, micro.batch.lengths, micro.batch.group_sizes)
        assert micro.computed_tokens == arranged.input_ids.numel()
        assert micro.computed_tokens <= tokens or len(micro.examples) == 1
        assert torch.equal(batch.lengths[micro.sequences], micro.batch.lengths)
        scored_ids = batch.input_ids[batch.scored]
        assert torch.equal(scored_ids[micro.tokens], micro.batch.input_ids[micro.batch.scored])


def test_neighbours_have_similar_lengths() -> None:
    micros = split(batch_of([1, 9, 2, 8, 1, 9, 2, 8]), 36, Packing.PADDED)
    assert [sorted(micro.batch.lengths.tolist()) for micro in micros] == [[8, 8, 9, 9], [1, 1, 2, 2]]
    assert [micro.examples.tolist() for micro in micros] == [[1, 5, 3, 7], [2, 6, 0, 4]]


def test_an_example_larger_than_the_budget_goes_alone() -> None:
    micros = split(batch_of([50, 3, 3]), 10, Packing.PACKED)
    assert [micro.batch.lengths.tolist() for micro in micros] == [[50], [3, 3]]


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("tokens", [512, 1024, 10**6])
def test_lanes_compute_about_as_many_tokens(lanes: int, tokens: int) -> None:
    """Otherwise one rank waits for another: with rows as they come, the lanes of this batch differ by a third."""
    lengths = [512, 480, 33, 250, 117, 64, 301, 150, 90, 222, 75, 180, 410, 95, 130, 205]
    micros = split(batch_of(lengths), tokens, Packing.PACKED, lanes=lanes)
    assert len(micros) % lanes == 0
    loads = [sum(micro.computed_tokens for micro in micros[lane::lanes]) for lane in range(lanes)]
    assert max(loads) * lanes < 1.05 * sum(lengths)


def test_padded_lanes_have_as_many_micro_batches_of_similar_rows() -> None:
    micros = split(batch_of([8, 8, 5, 5, 4, 3]), 15, Packing.PADDED, lanes=2)
    assert [micro.batch.lengths.tolist() for micro in micros] == [[5, 5, 4], [8], [3], [8]]
    assert [sum(micro.computed_tokens for micro in micros[lane::2]) for lane in range(2)] == [18, 16]


def test_groups_are_never_split() -> None:
    micros = split(batch_of([4, 2, 3, 3, 1, 1], [2, 1, 3]), 8, Packing.PADDED)
    assert [micro.batch.group_sizes.tolist() for micro in micros] == [[2], [1], [3]]


def test_packed_rows_count_as_they_are_and_common_tokens_once() -> None:
    batch = batch_of([90, 2, 3, 4, 5, 6])
    assert [micro.computed_tokens for micro in split(batch, 100, Packing.PACKED)] == [96, 14]
    assert [micro.computed_tokens for micro in split(batch, 100, Packing.PADDED)] == [90, 30]
    pair = Batch(torch.ones(100, dtype=torch.int64), torch.tensor([50, 50]), batch.scored[:100], torch.tensor([2]))
    assert [micro.computed_tokens for micro in split(pair, 100, Packing.PACKED)] == [100]
    assert [micro.computed_tokens for micro in split(pair, 100, Packing.SHARED)] == [50]
