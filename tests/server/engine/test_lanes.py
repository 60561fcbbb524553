"""Lanes are added in a fixed binary tree, by whichever process computes them."""

from __future__ import annotations

import pytest
import torch
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.executor import executor_of
from gradwire_server.engine.lanes import LaneTree, Sums


def sums(*numbers: float) -> Sums:
    return {("loss", "tokens"): {str(name): torch.tensor([value]) for name, value in enumerate(numbers)}}


class Rank(Agreement):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks


def test_a_tree_adds_neighbours_first() -> None:
    numbers = [1e8, 1.0, -1e8, 1.0]  # in their order 0 + 1: the first 1 is lost beside 1e8, and the second is not
    tree = LaneTree(0)
    for lane, number in enumerate(numbers):
        tree.add(lane, sums(number))
    left, right = (torch.tensor(numbers[at]) + torch.tensor(numbers[at + 1]) for at in (0, 2))
    assert tree.total(4)["loss", "tokens"]["0"].item() == (left + right).item()


def test_lanes_without_gradients_keep_their_places() -> None:
    tree = LaneTree(4)
    tree.add(5, sums(1.0, 2.0))
    tree.add(7, sums(3.0))
    found = tree.total(8)["loss", "tokens"]
    assert {name: value.item() for name, value in found.items()} == {"0": 4.0, "1": 2.0}
    assert LaneTree(0).total(4) == {}


@pytest.mark.parametrize(("count", "ranks"), [(1, 4), (2, 4), (4, 4), (8, 4), (8, 1)])
def test_every_micro_batch_is_computed_in_the_order_of_its_lanes(count: int, ranks: int) -> None:
    each = [executor_of(count, Rank(rank, ranks)) for rank in range(ranks)]
    repeated = max(1, ranks // count)
    assert [lane for executor in each[::repeated] for lane in executor.own] == list(range(count))
    walks = [[number for number, _ in executor.turns(11)] for executor in each]
    assert sorted(index for walk in walks[::repeated] for index in walk) == list(range(11))
    assert all([index % count for index in walk] == sorted(index % count for index in walk) for walk in walks)


@pytest.mark.parametrize(
    ("count", "ranks", "number"), [(1, 4, 5), (2, 4, 1), (4, 4, 6), (8, 4, 11), (8, 2, 3), (8, 1, 7)]
)
def test_in_lock_step_all_processes_compute_equally_many(count: int, ranks: int, number: int) -> None:
    each = [executor_of(count, Rank(rank, ranks)) for rank in range(ranks)]
    free = [executor.turns(number) for executor in each]
    for executor in each:
        executor.in_step = True
    walks = [executor.turns(number) for executor in each]
    assert [[turn for turn in walk if not turn.repeated] for walk in walks] == free
    assert {len(walk) for walk in walks} == {max(map(len, free))}
