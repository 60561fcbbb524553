"""Torch's global random generators: the CPU's, and each GPU's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leaves torch's global generators as they were: loading and making modules draws numbers."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        yield


def generator_states() -> dict[str, Tensor]:
    """The states of torch's global generators: "cpu", and "cuda:N" where there are GPUs; uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Puts states that :func:`generator_states` gave in place."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all([states[f"cuda:{index}"] for index in range(torch.cuda.device_count())])
