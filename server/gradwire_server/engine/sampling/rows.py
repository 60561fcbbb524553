"""The samples in progress as columns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradwire_server.engine.sampling.pages.key_values import IntArray

BoolArray = npt.NDArray[np.bool_]

DRAWS = 64
"""Uniform numbers generated per row at a time."""


@dataclass
class Rows:
    """The samples in progress as columns of ``[R]`` entries."""

    job: npt.NDArray[np.object_]
    row: IntArray
    kind: IntArray  # number of the job's drawing parameters
    growing: npt.NDArray[np.object_]  # GrowingSample or None
    length: IntArray  # tokens in the cache
    count: IntArray  # tokens sampled
    limit: IntArray
    last: IntArray  # newest token, not in the cache yet
    seed: npt.NDArray[np.uint64]
    place: npt.NDArray[np.uint64]
    uniform: npt.NDArray[np.float64]  # [R, DRAWS]
    tokens: npt.NDArray[np.int32]  # [R, room]
    logprobs: npt.NDArray[np.float32]  # [R, room]

    def __len__(self) -> int:
        return len(self.row)

    def select(self, rows: IntArray) -> Rows:
        return Rows(**{name: column[rows] for name, column in vars(self).items()})

    def beside(self, other: Rows) -> Rows:
        mine, theirs = vars(self), vars(other)
        return Rows(**{name: np.concatenate([mine[name], theirs[name]]) for name in mine})


def widened(rows: Rows, room: int) -> Rows:
    """Rows with room for so many tokens."""
    missing = ((0, 0), (0, room - rows.tokens.shape[1]))
    return dataclasses.replace(rows, tokens=np.pad(rows.tokens, missing), logprobs=np.pad(rows.logprobs, missing))
