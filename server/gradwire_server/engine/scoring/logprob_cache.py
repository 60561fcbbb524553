"""A cache of log-probabilities keyed by their inputs, so that a second epoch over a batch computes none.

The other sequences in a forward change the last bits of a sequence's results. Where results must be bit-identical
whatever was cached, keys cover the whole batch (:func:`keys_in_batch`), so a batch is found completely or not at all.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_losses.batch import Batch
from torch import Tensor

from gradwire_server.engine.scoring.planner import Budget


class LogprobCache:
    """Log-probabilities of sequences in an LRU cache of at most ``max_bytes`` bytes."""

    OVERHEAD = 300  # bytes of an entry in addition to its numbers

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def get(self, key: bytes) -> Tensor | None:
        values = self._entries.get(key)
        if values is not None:
            self._entries.move_to_end(key)
        return values

    def put(self, key: bytes, values: Tensor) -> None:
        """Store values, and evict the least recently used ones beyond the limit."""
        if key not in self._entries:
            self._bytes += values.nbytes + self.OVERHEAD
        self._entries[key] = values
        while self._bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= dropped.nbytes + self.OVERHEAD


def sequence_keys(identity: str, temperature: float, batch: Batch) -> list[bytes]:
    """Key of each sequence of a batch; sequences with equal keys have equal log-probabilities, up to rounding."""
    start = hashlib.blake2b(f"{identity}\0{temperature!r}\0".encode(), digest_size=16)
    parts = [_cut(batch.input_ids, batch.lengths), _cut(batch.scored, batch.lengths)]
    if batch.target_tokens is not None:
        parts.append(_cut(batch.target_tokens, batch.row_lengths))
    if batch.images is not None:
        start.update(batch.images.key)
        parts.append(_cut(batch.images.places, batch.lengths))
    keys = []
    for of_sequence in zip(*parts, strict=True):
        state = start.copy()
        for part in of_sequence:
            state.update(len(part).to_bytes(8))
            state.update(part.tobytes())
        keys.append(state.digest())
    return keys


def keys_in_batch(keys: Sequence[bytes], batch: Batch, budget: Budget) -> list[bytes]:
    """Key of each sequence within its batch and budget; sequences with equal keys have bit-identical results."""
    whole = hashlib.blake2b(repr(budget).encode(), digest_size=16)
    for part in (batch.group_sizes.numpy().tobytes(), *keys):
        whole.update(part)
    return [whole.digest() + place.to_bytes(4) for place in range(len(keys))]


def _cut(values: Tensor, lengths: Tensor) -> list[npt.NDArray[Any]]:
    return np.split(values.numpy(), lengths.cumsum(0)[:-1].numpy())
