"""Dropout of a model: off, unless a run asks for it; then with masks that depend on the row alone.

What a checkpoint's configuration says of dropout is for those who trained it. A loss that compares two forwards of one
policy (a ratio, a reference) is wrong where either of them drops something, so no run has dropout by default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_Place = tuple[dict[str, Any], str, Any]


class DropoutPlaces:
    """Every rate by which a model drops activations in training mode, adapters aside: those of its modules, and
    numbers that its modules and its configuration keep for functions."""

    def __init__(self, model: nn.Module) -> None:
        owners: list[object] = [*model.modules()]
        configs = [owner.config for owner in owners if hasattr(owner, "config")]
        owners += {id(config): config for config in configs}.values()
        self._places: list[_Place] = [place for owner in owners for place in _rates(owner)]

    def set(self, rate: float) -> None:
        """Makes this rate that of all places. Whole layers are never dropped."""
        for holder, name, _ in self._places:
            holder[name] = 0.0 if "layerdrop" in name else rate

    def restore(self) -> None:
        """The rates that the model came with: what it is exported with."""
        for holder, name, own in self._places:
            holder[name] = own


def _rates(owner: object) -> Iterator[_Place]:
    holder = vars(owner)
    for name, value in holder.items():
        named = "drop" in name or (name == "p" and isinstance(owner, nn.modules.dropout._DropoutNd))
        if named and isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value < 1:
            yield holder, name, value


def seed_generators(seed: str, row: int) -> None:
    """Starts torch's generators for the masks of one row, whatever goes through the model before or with it.

    Args:
        seed: says which run and operation it is.
        row: of the operation's batch.
    """
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))
