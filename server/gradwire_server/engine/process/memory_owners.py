"""The engine's memory by owner, for status and metrics."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.sizing.parts import GRADIENT_BYTES, MOMENT_BYTES, master_bytes
from gradwire_server.engine.state.engine_run import EngineRun


class MemoryOwners:
    """Who holds the engine's memory. It is read by a thread beside the one that computes.

    Args:
        context: The engine's parts, before any model is loaded.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._at_start = _process_bytes(context.pool.device)
        self._weights: WeakKeyDictionary[Policy, tuple[int, int]] = WeakKeyDictionary()

    def by_owner(self) -> dict[str, int]:
        """Owner -> bytes.

        ``base``: shared copies of base models. ``references``: other frozen models. ``runs``: weights, gradients and
        moments. ``cache``: keys and values of samples in progress, and log-probabilities. ``activations``: the rest of
        what is allocated on a GPU; on a CPU the growth of the process beyond the others, with memory that was freed
        and not given back.
        """
        context = self._context
        owners = {
            "base": context.pool.held_bytes,
            "references": context.references.held_bytes,
            "runs": sum(self._run_bytes(run) for run in list(context.runs.values())),
            "cache": context.sampler.held_bytes + context.references.cached_bytes,
        }
        rest = _process_bytes(context.pool.device) - self._at_start - sum(owners.values())
        return owners | {"activations": max(0, rest)}

    def _run_bytes(self, run: EngineRun) -> int:
        trained, weights = self._weight_bytes(run.policy)
        held = weights + (0 if run.accumulator.empty else GRADIENT_BYTES * trained)
        held += MOMENT_BYTES * trained if run.step else 0
        return held + (0 if run.ema is None else self._weight_bytes(run.ema)[1])

    def _weight_bytes(self, policy: Policy) -> tuple[int, int]:
        """Number of trained parameters, and bytes of these with their masters; counted once, as there may be many."""
        if policy not in self._weights:
            parameters = list(policy.trainable_parameters().values())
            held = sum(each.nbytes + each.numel() * master_bytes(each.dtype) for each in parameters)
            self._weights[policy] = policy.num_trainable_parameters, held
        return self._weights[policy]


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: peak memory instead, in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _process_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
