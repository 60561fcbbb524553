"""Torch's global random generators, of the CPU and of each GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore torch's global generators after the body, because loading and building modules draws random numbers."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        yield


def generator_states() -> dict[str, Tensor]:
    """States of torch's global generators: "cpu", and "cuda:N" for each GPU; uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore states returned by :func:`generator_states`."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all([states[f"cuda:{index}"] for index in range(torch.cuda.device_count())])
