"""Choice of the sampler by name."""

from __future__ import annotations

from typing import Any

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Sampler


def make_sampler(name: str, pool: ModelPool, agreement: Agreement) -> Sampler[Any]:
    """Make the sampler with this name, ``"local"`` or ``"vllm"``.

    Raises:
        OperationError: UNSUPPORTED if vLLM is not installed.
    """
    if name == "local":
        return LocalSampler(agreement)
    from gradwire_server.engine.sampling.samplers.vllm import VllmSampler

    return VllmSampler(pool, agreement)
