"""The engine's memory by owner, for status and metrics."""

from __future__ import annotations

import torch

from gradwire_server.engine.machine import resident_bytes
from gradwire_server.engine.operations.context import EngineContext


class MemoryOwners:
    """Who holds the engine's memory. It is read by a thread beside the one that computes.

    Args:
        context: The engine's parts, before any model is loaded.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._at_start = _process_bytes(context.pool.device)

    def by_owner(self) -> dict[str, int]:
        """Owner -> bytes.

        ``base``: shared copies of base models. ``references``: other frozen models. ``runs``: weights, gradients and
        moments that are on the device. ``cache``: log-probabilities of references. ``activations``: the
        rest of what is allocated on a GPU, keys and values of samples included; on a CPU the growth of the process
        beyond the others, with memory that was freed and not given back.
        """
        context = self._context
        held = context.residency.held()
        owners = {
            "base": context.pool.held_bytes,
            "references": context.references.held_bytes,
            "runs": held["device"].nbytes if "device" in held else 0,
            "cache": context.references.cached_bytes,
        }
        rest = _process_bytes(context.pool.device) - self._at_start - sum(owners.values())
        return owners | {"activations": max(0, rest)}


def _process_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
