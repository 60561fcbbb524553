"""Log-probabilities that are kept by what they are of, so that a second epoch over a batch computes none.

What a sequence goes through the model with changes its last bits. Where those are to be the same however much was kept,
a key says all of it (:func:`keys_in_batch`): a batch is then found whole or not at all.
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
    """Log-probabilities of sequences, least recently used first to go beyond so many bytes."""

    OVERHEAD = 300  # bytes of an entry beside its numbers

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Tensor | None:
        values = self._entries.get(key)
        if values is not None:
            self._entries.move_to_end(key)
        return values

    def put(self, key: bytes, values: Tensor) -> None:
        """Keeps values, and forgets others for them."""
        if key not in self._entries:
            self._bytes += values.nbytes + self.OVERHEAD
        self._entries[key] = values
        while self._bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= dropped.nbytes + self.OVERHEAD


def sequence_keys(identity: str, temperature: float, batch: Batch) -> list[bytes]:
    """Of each sequence of a batch: two with the same key have the same log-probabilities, within rounding."""
    start = hashlib.blake2b(f"{identity}\0{temperature!r}\0".encode(), digest_size=16)
    parts = [_cut(batch.input_ids, batch.lengths), _cut(batch.scored, batch.lengths)]
    if batch.target_tokens is not None:
        parts.append(_cut(batch.target_tokens, batch.row_lengths))
    keys = []
    for of_sequence in zip(*parts, strict=True):
        state = start.copy()
        for part in of_sequence:
            state.update(len(part).to_bytes(8))
            state.update(part.tobytes())
        keys.append(state.digest())
    return keys


def keys_in_batch(keys: Sequence[bytes], batch: Batch, budget: Budget) -> list[bytes]:
    """Of each sequence at its place in its batch, divided by this budget: two with the same key have the same bits."""
    whole = hashlib.blake2b(repr(budget).encode(), digest_size=16)
    for part in (batch.group_sizes.numpy().tobytes(), *keys):
        whole.update(part)
    return [whole.digest() + place.to_bytes(4) for place in range(len(keys))]


def _cut(values: Tensor, lengths: Tensor) -> list[npt.NDArray[Any]]:
    return np.split(values.numpy(), lengths.cumsum(0)[:-1].numpy())
