"""Trees of the prefixes that sequences have in common.

Sorted by their tokens, sequences that begin alike are neighbours, and how much neighbours have in common gives the
tree. A node that would save little is left out: its tokens are computed by each sequence that has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

MIN_SAVED = 16
"""Minimum number of tokens that a node must save; below it the extra attention calls cost more."""
MIN_PART = 32
"""A node must also save one in this many of the tokens that its sequences have from its start on."""


class Branch(NamedTuple):
    """The nodes of a tree that one sequence holds.

    Attributes:
        sequence: Its number.
        own: Number of its last tokens that it holds itself.
        nodes: For each node that holds tokens before these: the sequence that holds it, and the first and last of that
            sequence's own tokens; a last one is the one after.
        holder: The sequence that holds all of its tokens; None for one that holds any itself.
    """

    sequence: int
    length: int
    own: int
    nodes: tuple[tuple[int, int, int], ...] = ()
    holder: int | None = None


class Neighbours(NamedTuple):
    """Sequences in the order of their tokens.

    Attributes:
        order: Their numbers; a sequence stands before those that begin with the whole of it.
        common: Number of leading tokens that each has in common with the one before; 0 for the first.
    """

    order: list[int]
    common: list[int]


def neighbours(keys: Tensor, lengths: Tensor, sequences: Sequence[int]) -> Neighbours:
    """Sort sequences by their tokens.

    Args:
        keys: ``[N]`` numbers that are equal where tokens are, below 2^31.
        sequences: The sequences to sort.
    """
    numbers = keys.numpy().astype(np.int32)
    stops: list[int] = lengths.cumsum(0).tolist()
    rows = {each: numbers[stops[each - 1] if each else 0 : stops[each]] for each in sequences}
    order = sorted(sequences, key=lambda each: (rows[each].tobytes(), -each))
    common = [0]
    for before, after in pairwise(order):
        shorter = min(len(rows[before]), len(rows[after]))
        apart = rows[before][:shorter] != rows[after][:shorter]
        first = int(apart.argmax())
        common.append(first if apart[first] else shorter)
    return Neighbours(order, common)


@dataclass(eq=False)
class _Node:
    """A node of the tree with all that begin with it; a leaf is a sequence.

    Attributes:
        depth: Number of tokens from the root to its end.
        first: The first sequence below.
        leaves, tokens: Number of sequences below, and of their tokens from the root.
    """

    depth: int
    first: int
    leaves: int
    tokens: int
    children: list[_Node] = field(default_factory=list)

    def adopt(self, child: _Node) -> None:
        self.children.append(child)
        self.first = min(self.first, child.first)
        self.leaves += child.leaves
        self.tokens += child.tokens


@dataclass(eq=False)
class _Shared:
    """A node that is held once; ``holders`` are those of its ancestors and its own, once a sequence holds it."""

    depth: int
    parent: _Shared | None = None
    holders: tuple[tuple[int, int, int], ...] | None = None


def branches(keys: Tensor, lengths: Tensor, sequences: Sequence[int]) -> Iterator[Branch]:
    """Divide what sequences hold, in an order in which those that attend to a node follow it, and each other.

    Args:
        keys, lengths, sequences: See :func:`neighbours`.
    """
    sizes: list[int] = lengths.tolist()
    if len(sequences) < 2:
        yield from (Branch(each, sizes[each], sizes[each]) for each in sequences)
        return
    order, common = neighbours(keys, lengths, sequences)
    within: dict[int, int] = {}  # sequences that are the beginning of another
    for number in range(len(order) - 2, -1, -1):
        if common[number + 1] == sizes[order[number]]:
            within[order[number]] = within.get(order[number + 1], order[number + 1])
    root = _tree(order, common, sizes, within)
    waiting = [(root, _Shared(0, None, ()))]
    while waiting:
        node, shared = waiting.pop()
        if node.children:
            saved = (node.depth - shared.depth) * (node.leaves - 1)
            if saved >= MIN_SAVED and saved * MIN_PART >= node.tokens - node.leaves * shared.depth:
                shared = _Shared(node.depth, shared)
            ordered = sorted(node.children, key=lambda each: -each.first)
            waiting += [(child, shared) for child in ordered]
        else:
            yield _branch(node, shared)
    yield from (Branch(each, sizes[each], 0, holder=within[each]) for each in sorted(within))


def _branch(leaf: _Node, shared: _Shared) -> Branch:
    """Make a sequence's branch: it also takes all nodes above it that nobody holds yet."""
    new = []
    while shared.holders is None:
        new.append(shared)
        assert shared.parent is not None  # the root holds nothing
        shared = shared.parent
    held, begin = shared.holders, shared.depth
    above = held
    for node in reversed(new):
        assert node.parent is not None
        node.holders = above = (*above, (leaf.first, node.parent.depth - begin, node.depth - begin))
    return Branch(leaf.first, leaf.depth, leaf.depth - begin, held)


def _tree(order: Sequence[int], common: Sequence[int], sizes: Sequence[int], within: dict[int, int]) -> _Node:
    """The tree of those sequences that are not the beginning of another; returns its root."""
    root = _Node(0, len(sizes), 0, 0)
    path, least = [root], 0
    for sequence, of_both in zip(order, common, strict=True):
        least = min(least, of_both)
        if sequence in within:
            continue
        _close(path, least)
        path.append(_Node(sizes[sequence], sequence, 1, sizes[sequence]))
        least = sizes[sequence]
    _close(path, 0)
    return root


def _close(path: list[_Node], depth: int) -> None:
    """End the nodes of a path that are deeper; its last one has this depth then."""
    while path[-1].depth > depth:
        child = path.pop()
        if path[-1].depth < depth:
            path.append(_Node(depth, child.first, 0, 0))
        path[-1].adopt(child)


def distinct_tokens(keys: Tensor, lengths: Tensor, sequences: Sequence[int]) -> int:
    """Number of tokens computed for sequences that share their prefixes; arguments as of :func:`neighbours`."""
    return sum(branch.own for branch in branches(keys, lengths, sequences))
