"""Lists of pages for the attention of a token: which pages each row attends to, in classes of similar sizes.

Legend: ``R`` rows, ``N`` pages of a row. Attention computes a class in one call, and a shorter list is filled up with
the scratch page, so classes of sizes within a factor of two waste little and are few. Where sizes are filled up to
powers of two, few shapes occur.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire_server.engine.model.attention.paged import PAGE, PageLists, RowLists
from gradwire_server.engine.sampling.pages.key_values import IntArray
from gradwire_server.engine.sampling.pages.page_table import SCRATCH

FEWEST_PAGES = 16
"""Pages that there is room for in a list of those of which a kernel reads only what a row has."""


def shared_lists(shared: Sequence[tuple[int, ...]], fills: bool) -> RowLists:
    """The lists of shared pages, each with its rows, in classes of similar numbers of rows and pages.

    Args:
        shared: Pages that each row shares.
        fills: Whether to fill up to powers of two.
    """
    lists: dict[tuple[int, ...], list[int]] = {}
    for row, pages in enumerate(shared):
        if pages:
            lists.setdefault(pages, []).append(row)
    classes: dict[tuple[int, int], list[tuple[tuple[int, ...], list[int]]]] = {}
    for pages, of_list in lists.items():
        size = power_of_two(len(of_list)), power_of_two(len(pages))
        classes.setdefault(size, []).append((pages, of_list))
    made, total = [], 0
    order = np.full(power_of_two(len(shared)) if fills else len(shared), -1, np.int64)
    for size, members in classes.items():
        most = size
        if not fills:
            most = max(len(of_list) for _, of_list in members), max(len(pages) for pages, _ in members)
        count = power_of_two(len(members)) if fills else len(members)
        of_rows, table = np.zeros((count, most[0]), np.int64), np.full((count, most[1]), SCRATCH, np.int64)
        lengths = np.ones(count, np.int64)
        for number, (pages, of_list) in enumerate(members):
            of_rows[number] = of_list[0]
            of_rows[number, : len(of_list)] = of_list
            table[number, : len(pages)] = pages
            lengths[number] = len(pages) * PAGE
            order[of_list] = total + number * most[0] + np.arange(len(of_list))
        total += of_rows.size
        full = not fills and bool((lengths == most[1] * PAGE).all())
        made.append(_lists(of_rows, table, None if full else lengths, fills))
    if not made:
        return RowLists(made, None)
    order[order < 0] = total
    in_order = len(made) == 1 and np.array_equal(made[0].rows.numpy().ravel(), np.arange(len(shared)))
    return RowLists(made, None if in_order and not fills else torch.from_numpy(order))


def own_lists(table: IntArray, lengths: IntArray, fills: bool, one_class: bool) -> RowLists:
    """The lists of the rows' own pages ``[R, N]`` with ``[R]`` tokens, in classes of similar numbers of pages.

    Args:
        fills: Whether to fill up to powers of two.
        one_class: Whether all lists are one class, as long as the longest.
    """
    counts = -(-lengths // PAGE)
    if fills or one_class:
        width = filled_up(table.shape[1]) if fills else max(FEWEST_PAGES, power_of_two(table.shape[1]))
        table = np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=SCRATCH)
    if one_class:
        counts, sizes = np.full(len(table), table.shape[1]), np.zeros(len(table), np.int64)
    else:
        sizes = np.ceil(np.log2(counts)).astype(np.int64)
    made, parts = [], []
    for size in np.unique(sizes):
        (rows,) = np.nonzero(sizes == size)
        parts.append(rows)
        own = np.ascontiguousarray(table[rows, : counts[rows].max()])
        made.append(_lists(rows[:, None], own, lengths[rows], fills or one_class))
    if one_class:
        return RowLists(made, None)
    order = np.empty(len(table), np.int64)
    order[np.concatenate(parts)] = np.arange(len(table))
    return RowLists(made, None if len(made) == 1 else torch.from_numpy(order))


def _lists(rows: IntArray, table: IntArray, lengths: IntArray | None, fills: bool) -> PageLists:
    first = int(table[0, 0])
    in_a_row = not fills and np.array_equal(table.ravel(), np.arange(first, first + table.size))
    return PageLists(
        torch.from_numpy(rows),
        torch.from_numpy(table),
        None if lengths is None else torch.from_numpy(lengths),
        first if in_a_row else None,
    )


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def filled_up(number: int) -> int:
    """The smallest power of two, or three halves of one, that is not less."""
    whole = power_of_two(number)
    return whole // 4 * 3 if number <= whole // 4 * 3 and whole >= 4 else whole
