"""Whole weights for a vLLM engine in this process, by vLLM's weight transfer: a backend that is handed the tensors.

vLLM's own backends move weights between processes (NCCL, CUDA IPC). Here trainer and sampler are one process, so
``update_weights`` gets the trainer's tensors themselves, and vLLM copies them into its own, layer by layer.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from gradwire_server.engine.model.policy import Policy

IN_PROCESS = "gradwire_in_process"
"""The backend's name, as ``backend`` of vLLM's ``WeightTransferConfig``."""


@functools.cache
def allow_in_process() -> None:
    """Make :data:`IN_PROCESS` known to vLLM."""
    transfer: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")

    class InProcess(transfer.WeightTransferEngine):  # type: ignore[misc]
        """Attributes are vLLM's: ``model`` and ``model_config`` of its worker, ``device`` where they are."""

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing connects two parts of one process."""

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(update_info["weights"])

        def receive_weights(self, update_info: list[tuple[str, Tensor]]) -> None:
            self.model.load_weights(update_info)

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _pack_output_heads(self.model)

        def shutdown(self) -> None:
            """Nothing is held."""

    factory.WeightTransferEngineFactory.register_engine(IN_PROCESS, InProcess)


def checkpoint_weights(policy: Policy) -> list[tuple[str, Tensor]]:
    """The weights of a policy's model by the names of its checkpoint, in the order of the layers; nothing is copied."""
    policy.activate()
    model = policy.model
    shared = getattr(model, "all_tied_weights_keys", {})  # vLLM shares them itself
    weights = {name: weight for name, weight in model.state_dict().items() if name not in shared}
    return list(revert_weight_conversion(model, weights).items())


def _pack_output_heads(model: nn.Module) -> None:
    """Pack the output heads again: on a CPU vLLM multiplies with a packed copy, which a head that it shares with the
    embedding would keep."""
    layers: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, layers.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
