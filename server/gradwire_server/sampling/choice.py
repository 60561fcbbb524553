"""Which sampler there is."""

from __future__ import annotations

from typing import Any

from gradwire_server.engine.host import ModelHost
from gradwire_server.sampling.base import Sampler
from gradwire_server.sampling.local import LocalSampler


def make_sampler(name: str, host: ModelHost) -> Sampler[Any]:
    """The sampler of this name, ``"local"`` or ``"vllm"``.

    Raises:
        OperationError: UNSUPPORTED when vLLM is not installed.
    """
    if name == "local":
        return LocalSampler()
    from gradwire_server.sampling.vllm import VllmSampler

    return VllmSampler(host)
