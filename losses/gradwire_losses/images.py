"""The images of a batch: which tokens stand for them, and where those tokens are in the picture.

Legend: ``N`` tokens, as in :mod:`gradwire_losses.batch`; ``I`` image tokens of all pictures, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor


class Picture(Protocol):
    """One distinct image as its model takes it."""

    @property
    def digest(self) -> bytes:
        """Digest of the image's content."""

    @property
    def count(self) -> int:
        """Number of its image tokens, in whose places the model has what it sees."""


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """The image tokens among the tokens of a batch.

    Attributes:
        places: ``[N]`` int64, on the host: index of the image token that each token is, among the ``I``; -1 for text.
        positions: ``[N, 3]`` int64, on the host: each token's time, height and width for rotary embeddings; None if the
            model numbers the tokens of a sequence one after the other.
        pictures: The distinct images.
        model: Path of the model whose processor read them.
    """

    places: Tensor
    positions: Tensor | None
    pictures: Sequence[Picture]
    model: str

    @cached_property
    def ends(self) -> Tensor:
        """Number of image tokens up to the end of each picture."""
        return torch.tensor([picture.count for picture in self.pictures], dtype=torch.int64).cumsum(0)

    @cached_property
    def key(self) -> bytes:
        """Digest of the pictures, in order."""
        state = blake2b(digest_size=16)
        for picture in self.pictures:
            state.update(picture.digest)
        return state.digest()

    def select(self, tokens: Tensor) -> ImageTokens:
        """The image tokens at these indices, in this order."""
        positions = None if self.positions is None else self.positions[tokens]
        return replace(self, places=self.places[tokens], positions=positions)

    def keys(self, input_ids: Tensor) -> Tensor:
        """``[N]`` numbers that are equal where the model reads the same: ids of text, each image token its own."""
        return torch.where(self.places >= 0, -1 - self.places, input_ids)

    def arranged(self, places: Tensor, size: int) -> ImageTokens:
        """The image tokens on an axis of ``size`` entries, on which token ``t`` is at ``places[t]``."""
        own = torch.full((size,), -1, dtype=torch.int64)
        own[places] = self.places
        if self.positions is None:
            return replace(self, places=own)
        positions = torch.zeros(size, 3, dtype=torch.int64)
        positions[places] = self.positions
        return replace(self, places=own, positions=positions)
