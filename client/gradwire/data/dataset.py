"""A data set: checked rows, a held-out split, and batches in a seeded order that can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, overload

import numpy as np

from gradwire.data.sources import DataError
from gradwire.data.stored import Copied, Indices, Joined, Lines

T = TypeVar("T")
HELD_OUT = 2_000
"""Rows to evaluate on at most, about, of a data set that is not in memory."""


class Dataset(Sequence[T], Generic[T]):
    """Rows of one kind.

    Args:
        rows: The rows.
        skipped: The rows that were left out, as errors.

    Attributes:
        skipped: See above; the warning at loading names the first of them.
    """

    def __init__(self, rows: Sequence[T], skipped: Sequence[DataError] = ()) -> None:
        self._rows: Sequence[T] = rows if isinstance(rows, Lines | Copied | Joined) else list(rows)
        self.skipped = tuple(skipped)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Dataset[T]: ...

    def __getitem__(self, index: int | slice) -> T | Dataset[T]:
        return Dataset(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    @property
    def in_memory(self) -> bool:
        """Whether the rows are; others are read from their files when they are used."""
        return isinstance(self._rows, list) or (isinstance(self._rows, Joined) and self._rows.in_memory)

    def __repr__(self) -> str:
        left_out = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"<Dataset of {len(self)} rows{left_out}>"

    def shuffled(self, seed: int = 0) -> Dataset[T]:
        """Return the rows in a random order, the same for the same seed."""
        return Dataset(
            Joined([self._rows], [_order(len(self), seed)])
            if not self.in_memory
            else [self._rows[i] for i in _order(len(self), seed)]
        )

    def split(self, share: float, seed: int = 0) -> tuple[Dataset[T], Dataset[T]]:
        """Split into training rows and held-out rows that share no prompt.

        Args:
            share: Share of the rows to hold out, as near as whole prompts allow.
            seed: Seed of the choice.

        Raises:
            ValueError: Nothing would be left on one side.
        """
        if not 0 < share < 1:
            raise ValueError(f"share must be between 0 and 1; this is {share}")
        if not self.in_memory:
            (kept_rows,), held_rows = split_together([self], share, seed)
            return kept_rows, held_rows
        groups: dict[str, list[int]] = {}
        for index, row in enumerate(self._rows):
            groups.setdefault(_prompt_key(row), []).append(index)
        wanted, held = max(1, round(share * len(self))), set[int]()
        keys = list(groups)
        for place in _order(len(keys), seed):
            if len(held) >= wanted:
                break
            held.update(groups[keys[place]])
        if not held or len(held) == len(self):
            raise ValueError(
                f"{len(self)} rows with {len(groups)} different prompts cannot be split by {share}: each side needs a "
                "prompt of its own; in a recipe, set held_out: 0 or name a file as validation"
            )
        kept = [row for index, row in enumerate(self._rows) if index not in held]
        return Dataset(kept), Dataset([self._rows[index] for index in sorted(held)])

    def batches(
        self,
        size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        lengths: Sequence[int] | None = None,
    ) -> Batches[T]:
        """Return the rows in batches, in a different order in each epoch.

        Args:
            size: Rows per batch; the last batch of an epoch may be smaller.
            seed: Seed of the orders.
            epochs: Number of epochs; None goes on without end.
            shuffle: False keeps the rows' own order.
            lengths: Length of each row: ``size`` is then the sum of a batch's lengths at most, or one longer row.
        """
        if size < 1:
            raise ValueError(f"a batch has at least one row; size is {size}")
        if not len(self._rows):
            raise ValueError("the data set is empty")
        return Batches(self._rows, size, seed, epochs, shuffle, lengths)


class Batches(Iterator[list[T]], Generic[T]):
    """An iterator over batches whose position can be saved and restored.

    Attributes:
        position: ``{"epoch": ..., "row": ...}``, to be stored with a checkpoint; assigning one continues from there.
    """

    def __init__(
        self,
        rows: Sequence[T],
        size: int,
        seed: int,
        epochs: int | None,
        shuffle: bool,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self._rows, self._size, self._seed, self._epochs, self._shuffle = rows, size, seed, epochs, shuffle
        self._lengths = np.ones(len(rows), np.int64) if lengths is None else np.asarray(lengths, np.int64)
        self._epoch, self._row = 0, 0
        self._begin(0)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    @property
    def per_epoch(self) -> int:
        """Batches of the first epoch."""
        return self.count(1)

    @property
    def ends_epoch(self) -> bool:
        """Whether the last batch ended an epoch."""
        return self._row >= len(self._rows)

    def count(self, epochs: int, accumulation: int = 1) -> int:
        """Return the number of batches of the first epochs, or of the steps that take them.

        Args:
            epochs: Number of epochs; with lengths, the batches of one depend on its order.
            accumulation: Batches of a step. No step has batches of two epochs, so the last one of each may have fewer.
        """
        if (self._lengths == 1).all():
            return epochs * -(-len(self._rows) // (self._size * accumulation))
        steps = 0
        for epoch in range(epochs):
            sums = np.cumsum(self._lengths[self._order_of(epoch)])
            row = batches = 0
            while row < len(sums):
                row, batches = _end(sums, row, self._size), batches + 1
            steps += -(-batches // accumulation)
        return steps

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self._epoch, "row": self._row}

    @position.setter
    def position(self, position: Mapping[str, int]) -> None:
        epoch, row = position["epoch"], position["row"]
        if epoch < 0 or not 0 <= row <= len(self._rows):
            raise ValueError(f"{dict(position)} is no position in {len(self._rows)} rows: is this the same data set?")
        self._epoch, self._row = epoch, row
        self._begin(epoch)

    def __next__(self) -> list[T]:
        if self._row >= len(self._rows):
            self._epoch, self._row = self._epoch + 1, 0
            self._begin(self._epoch)
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        chosen = self._order[self._row : _end(self._sums, self._row, self._size)]
        self._row += len(chosen)
        return [self._rows[index] for index in chosen]

    def _begin(self, epoch: int) -> None:
        self._order = self._order_of(epoch)
        self._sums = np.cumsum(self._lengths[self._order])

    def _order_of(self, epoch: int) -> Indices:
        return _order(len(self._rows), self._seed, epoch) if self._shuffle else np.arange(len(self._rows))


def _end(sums: Indices, row: int, size: int) -> int:
    """The row behind those of a batch that begins with this one, of rows whose lengths have these sums."""
    before = int(sums[row - 1]) if row else 0
    return max(row + 1, int(np.searchsorted(sums, before + size, side="right")))


def split_together(parts: Sequence[Dataset[T]], share: float, seed: int = 0) -> tuple[list[Dataset[T]], Dataset[T]]:
    """Split several data sets at once, so that no prompt of one is held out of another.

    If one is not in memory, a prompt's hash says on which side it is, and about HELD_OUT rows are held out at most.

    Returns:
        What is kept of each, and the rows that are held out.

    Raises:
        ValueError: Nothing would be left on one side.
    """
    if all(part.in_memory for part in parts):
        kept, held_out = Dataset([row for part in parts for row in part]).split(share, seed)
        known = {id(row) for row in kept}
        return [Dataset([row for row in part if id(row) in known], part.skipped) for part in parts], held_out
    total = sum(map(len, parts))
    limit = np.uint64(min(share, HELD_OUT / total) * float(2**64 - 1))
    hashes = [np.fromiter((_hash(_prompt_key(row), seed) for row in part), np.uint64, len(part)) for part in parts]
    held = sum(int(np.count_nonzero(each < limit)) for each in hashes)
    if not 0 < held < total:
        raise ValueError(f"{total} rows cannot be split by {share}: name a file as validation")
    rows = [part._rows for part in parts]
    sides = [Dataset(Joined([each], [np.flatnonzero(of >= limit)])) for each, of in zip(rows, hashes)]
    return sides, Dataset(Joined(rows, [np.flatnonzero(each < limit) for each in hashes]))


def mixed(parts: Sequence[tuple[Dataset[T], float]], seed: int = 0) -> Dataset[T]:
    """Join data sets, each of which an epoch sees as often as its weight says.

    Args:
        parts: A data set and its weight: 1 takes every row once, 2 twice, 0.5 a half of them, always the same.
        seed: Seed of the choice.
    """
    chosen = []
    for number, (part, weight) in enumerate(parts):
        some = _order(len(part), seed, number)[: round(weight % 1 * len(part))]
        chosen.append(np.concatenate([np.tile(np.arange(len(part)), int(weight)), np.sort(some)]))
    return Dataset(
        Joined([part._rows for part, _ in parts], chosen), [each for part, _ in parts for each in part.skipped]
    )


def duplicates(rows: Sequence[Any]) -> tuple[int, int]:
    """Count the rows that equal an earlier one, and those whose prompt alone an earlier one has."""
    seen: set[int] = set()
    prompts: set[int] = set()
    same = shared = 0
    for row in rows:
        whole, prompt = hash(repr(replace(row, place=""))), hash(_prompt_key(row))
        if whole in seen:
            same += 1
        elif prompt in prompts:
            shared += 1
        seen.add(whole)
        prompts.add(prompt)
    return same, shared


def _prompt_key(row: Any) -> str:
    """Key that two rows with the same prompt share; blanks and the system message make no difference."""
    if getattr(row, "text", ""):
        return " ".join(row.text.split())
    messages = [each for each in row.prompt if each["role"] != "system"] or list(row.prompt)
    return json.dumps([[each["role"], " ".join(str(each["content"]).split())] for each in messages])


def _order(count: int, *seed: int) -> Indices:
    return np.random.default_rng(seed).permutation(count)


def _hash(key: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest(), "little")
