"""A model's dropout, and noise on its embeddings: off unless a run asks for it, then drawn for each row by itself.

The dropout rates in a checkpoint's configuration were meant for its pretraining. A loss that compares two forwards of
one policy (a ratio, a reference) is wrong if either drops activations, so dropout is off by default.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gradwire_server.engine.generators import preserved_rng, seed_generators

_Place = tuple[dict[str, Any], str, Any]


class DropoutPlaces:
    """Every place where a model stores a rate for dropping activations in training mode, adapters aside.

    These are attributes of its modules, and of its configuration where functions read them.
    """

    def __init__(self, model: nn.Module) -> None:
        owners: list[object] = [*model.modules()]
        configs = [owner.config for owner in owners if hasattr(owner, "config")]
        owners += {id(config): config for config in configs}.values()
        self._places: list[_Place] = [place for owner in owners for place in _rates(owner)]

    @property
    def names(self) -> list[str]:
        """Names of the rates, as the model's configuration and modules have them."""
        return sorted({"dropout" if name == "p" else name for _, name, _ in self._places if "layerdrop" not in name})

    def set(self, rate: float) -> None:
        """Set this rate everywhere, except that whole layers are never dropped."""
        for holder, name, _ in self._places:
            holder[name] = 0.0 if "layerdrop" in name else rate

    def restore(self) -> None:
        """Restore the model's original rates, which exports contain."""
        for holder, name, own in self._places:
            holder[name] = own


def _rates(owner: object) -> Iterator[_Place]:
    holder = vars(owner)
    for name, value in holder.items():
        named = "drop" in name or (name == "p" and isinstance(owner, nn.modules.dropout._DropoutNd))
        if named and isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value < 1:
            yield holder, name, value


class EmbeddingNoise:
    """Noise on a model's embeddings in training mode (NEFTune, Jain et al. 2023, arXiv 2310.05914).

    Attributes:
        alpha: The noise of a row of ``L`` tokens is uniform in ``+-alpha / sqrt(L * width)``; 0 for none.
    """

    def __init__(self, embeddings: nn.Module) -> None:
        self.alpha = 0.0
        embeddings.register_forward_hook(self._added)

    def _added(self, _module: nn.Module, _inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        if not self.alpha:
            return embedded
        bound = self.alpha / math.sqrt(embedded.shape[-2] * embedded.shape[-1])
        return embedded + torch.empty_like(embedded).uniform_(-bound, bound)


def jittered(model: nn.Module) -> list[nn.Module]:
    """Modules that draw in training mode whatever the dropout is: routers with noise on their inputs or choices.

    They stay in evaluation mode, so that a policy scores tokens alike twice.
    """
    return [module for module in model.modules() if any("jitter" in name for name in vars(module))]


@contextmanager
def seeded(seed: str, row: int) -> Iterator[None]:
    """Seed torch's generators for the body, for the masks of one row, whatever was drawn for others.

    Args:
        seed: Identifies the run and operation.
        row: Index in the operation's batch.
    """
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=7).digest()
    with preserved_rng():
        seed_generators(int.from_bytes(digest, "little"))
        yield
