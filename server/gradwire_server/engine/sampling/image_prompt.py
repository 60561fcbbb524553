"""A prompt with images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from gradwire_losses.images import ImageTokens, Picture


class ImagePrompt(tuple[int, ...]):
    """Token ids of a prompt with all tokens of its images; equal to another one only if the images are the same.

    Attributes:
        images: The image tokens among them.
        sent: ``[L]`` bool, whether the caller sent the token; one that he sent for an image is the image's last.
        shift: Number added to a later token's index to get its position for rotary embeddings.
    """

    images: ImageTokens
    sent: torch.Tensor
    shift: int

    def __new__(cls, ids: Iterable[int], images: ImageTokens, sent: torch.Tensor) -> ImagePrompt:
        prompt = super().__new__(cls, ids)
        prompt.images, prompt.sent = images, sent
        prompt.shift = 0 if images.positions is None else int(images.positions.max()) + 1 - len(prompt)
        return prompt

    def followed_by(self, ids: Sequence[int]) -> ImagePrompt:
        """The prompt with these tokens of text behind it."""
        images, count = self.images, len(ids)
        places = torch.cat([images.places, torch.full((count,), -1)])
        positions = images.positions
        if positions is not None:
            more = torch.arange(len(self), len(self) + count) + self.shift
            positions = torch.cat([positions, more[:, None].expand(-1, 3)])
        sent = torch.cat([self.sent, torch.ones(count, dtype=torch.bool)])
        return ImagePrompt((*self, *ids), replace(images, places=places, positions=positions), sent)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImagePrompt) and super().__eq__(other) and self.images.key == other.images.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.images.key))


def images_key(tokens: object) -> bytes:
    """What tells a prompt from another one with equal tokens: a digest of its images; empty for text."""
    return tokens.images.key if isinstance(tokens, ImagePrompt) else b""


def images_of_pieces(pieces: Sequence[tuple[Sequence[int], int, int]]) -> ImageTokens | None:
    """The image tokens of pieces of prompts, one after the other; None if all are text.

    Args:
        pieces: Prompts, each with the index of the piece's first token and of the one behind its last.
    """
    shown = [prompt.images for prompt, _, _ in pieces if isinstance(prompt, ImagePrompt)]
    if not shown:
        return None
    places, positions = [], []
    pictures: list[Picture] = []
    before = 0
    for prompt, start, stop in pieces:
        if not isinstance(prompt, ImagePrompt):
            places.append(torch.full((stop - start,), -1))
            positions.append(torch.arange(start, stop)[:, None].expand(-1, 3))
            continue
        own = prompt.images.places[start:stop]
        places.append(torch.where(own >= 0, own + before, -1))
        if prompt.images.positions is not None:
            positions.append(prompt.images.positions[start:stop])
        pictures += prompt.images.pictures
        before += int(prompt.images.ends[-1]) if len(prompt.images.ends) else 0
    has_positions = shown[0].positions is not None
    return ImageTokens(torch.cat(places), torch.cat(positions) if has_positions else None, pictures, shown[0].model)
