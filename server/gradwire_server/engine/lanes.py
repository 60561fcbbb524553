"""Lanes: the fixed order in which the gradients of micro-batches are added, on any number of ranks.

Micro-batch ``i`` belongs to lane ``i % count``. The gradients of a lane are added in the order of its micro-batches,
and the lanes in a fixed binary tree. Each rank computes one block of neighbouring lanes, so the lower levels of the
tree are within a rank, where a binary counter holds one sum a level, and the upper ones are between ranks
(:mod:`.executor`). So the bits depend neither on the number of ranks, nor on which of them computes what.
"""

from __future__ import annotations

import torch
from torch import Tensor

Key = tuple[str, str]
"""A loss and the unit of some of its terms."""
Gradients = dict[str, Tensor]
"""Name of a parameter -> gradient."""
Sums = dict[Key, Gradients]


class LaneTree:
    """Sums of lanes, added in a binary tree as they come."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._held: list[tuple[int, Sums]] = []  # the level of each, falling

    def add(self, lane: int, sums: Sums) -> None:
        """Add a lane's sums, behind those of all lanes before it; those between have none. Takes ownership."""
        while self._next < lane:
            self._push({})
        self._push(sums)

    def total(self, end: int) -> Sums:
        """The sum of all lanes before ``end``."""
        while self._next < end:
            self._push({})
        ((_, sums),) = self._held
        return sums

    def _push(self, sums: Sums) -> None:
        level = 0
        while self._held and self._held[-1][0] == level:
            sums = added(self._held.pop()[1], sums)
            level += 1
        self._held.append((level, sums))
        self._next += 1


def added(left: Sums, right: Sums) -> Sums:
    """The sum of both, in the tensors of the left one where it has them."""
    for key, by_name in right.items():
        mine = left.setdefault(key, {})
        both = [name for name in by_name if name in mine]
        if both:
            torch._foreach_add_([mine[name] for name in both], [by_name[name] for name in both])
        mine |= {name: value for name, value in by_name.items() if name not in mine}
    return left
