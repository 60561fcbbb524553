"""Choice of the sampler by name."""

from __future__ import annotations

from typing import Any

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Sampler
from gradwire_server.engine.sampling.speculation import Mode


def make_sampler(name: str, pool: ModelPool, agreement: Agreement, cache_bytes: int, speculate: Mode) -> Sampler[Any]:
    """Make the sampler with this name, ``"local"`` or ``"vllm"``.

    Args:
        cache_bytes: Maximum bytes of the local sampler's keys and values.
        speculate: Speculation of the local sampler.

    Raises:
        OperationError: UNSUPPORTED if vLLM is not installed.
    """
    if name == "local":
        return LocalSampler(agreement, cache_bytes=cache_bytes, speculate=speculate)
    from gradwire_server.engine.sampling.samplers.vllm import VllmSampler

    return VllmSampler(pool, agreement, cache_bytes=cache_bytes, speculate=speculate)
