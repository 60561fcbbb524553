"""Torch's global random generators, of the CPU and of the GPUs in use.

A process that touches a GPU gets a context on it, which takes hundreds of MiB, so the generators of other GPUs are left
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_gpus: set[int] = set()
"""Indices of the GPUs in use."""


def use_gpus(indices: Iterable[int]) -> None:
    """Include the generators of these GPUs from now on."""
    _gpus.update(indices)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore torch's global generators after the body, because loading and building modules draws random numbers."""
    before = generator_states()
    try:
        yield
    finally:
        restore(before)


def seed_generators(seed: int) -> None:
    """Seed torch's global generators as ``torch.manual_seed`` does, which formats the stack for each kind of device."""
    torch.default_generator.manual_seed(seed)
    for index in _gpus:
        torch.cuda.default_generators[index].manual_seed(seed)


def generator_states() -> dict[str, Tensor]:
    """States of torch's global generators: "cpu", and "cuda:N" for each GPU in use; uint8."""
    return {"cpu": torch.get_rng_state()} | {
        f"cuda:{index}": torch.cuda.get_rng_state(index) for index in sorted(_gpus)
    }


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore states returned by :func:`generator_states`."""
    restore({"cpu": states["cpu"]} | {name: states[name] for name in map("cuda:{}".format, sorted(_gpus))})


def restore(states: Mapping[str, Tensor]) -> None:
    """Restore the states of these generators only."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
