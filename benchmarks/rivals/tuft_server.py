"""Start TuFT 0.1.3 where there is no GPU: ``python tuft_server.py launch --config FILE --port PORT``.

Its server, its futures and its training actor are its own. Three parts of a GPU are replaced: Ray is told of one, which
the actor asks for and does not use; the sampling backend, which would be vLLM, is TuFT's own dummy; and
``torch.cuda.reset_peak_memory_stats``, which the actor calls for every batch and which torch's CPU build does not have,
does nothing.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from tuft import cli
from tuft.backends.base_backend import BaseSamplingBackend
from tuft.backends.sampling_backend import DummySamplingBackend


def without_cuda() -> None:
    """Run in each of Ray's workers before anything else."""
    import torch

    torch.cuda.reset_peak_memory_stats = lambda *args, **kwargs: None


def dummy_sampler(cls: type[BaseSamplingBackend], config: Any) -> BaseSamplingBackend:
    return DummySamplingBackend(config)


if __name__ == "__main__":
    ray.init(
        num_gpus=1,
        include_dashboard=False,
        _temp_dir=os.environ["RIVALS_RAY_FOLDER"],
        runtime_env={"worker_process_setup_hook": without_cuda},
    )
    BaseSamplingBackend.create_backend = classmethod(dummy_sampler)
    cli.main()
