"""Names and shapes of the parameters that adapters add to the models.

They are found by building the adapted model without weights, which takes longer than most operations. The next upload
of an adapter with the same settings finds them in memory.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from gradwire_proto.v1 import training_pb2 as pb
from peft import PeftModel

from gradwire_server.engine.errors import invalid
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.adapters.lora_settings import lora_config, only_the_head_of_tied
from gradwire_server.engine.model.loading.pool import ModelPool

KEPT = 64
"""Number of settings whose shapes are kept."""

Shapes = dict[str, tuple[int, ...]]


class AdapterShapes:
    """Shapes of adapters, built once for each model and settings."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._modules: dict[str, frozenset[str]] = {}
        self._shapes: OrderedDict[tuple[str, bytes], Shapes] = OrderedDict()

    def modules(self, base: str) -> frozenset[str]:
        """Names of the modules of a model.

        Raises:
            OperationError: The model cannot be used.
        """
        if base not in self._modules:
            self._modules[base] = frozenset(name for name, _ in self._pool.meta_model(base).named_modules())
        return self._modules[base]

    def of(self, base: str, settings: pb.LoraSettings) -> Shapes:
        """Parameter name -> shape of an adapter; the caller does not change it.

        Raises:
            OperationError: INVALID_ARGUMENT if the model cannot have such an adapter.
        """
        key = base, settings.SerializeToString(deterministic=True)
        if key not in self._shapes:
            self._shapes[key] = self._built(base, settings)
            if len(self._shapes) > KEPT:
                self._shapes.popitem(last=False)
        self._shapes.move_to_end(key)
        return self._shapes[key]

    def _built(self, base: str, settings: pb.LoraSettings) -> Shapes:
        model = self._pool.meta_model(base)
        try:
            with preserved_rng(), only_the_head_of_tied(), torch.device("meta"):
                PeftModel(model, lora_config(model, settings), adapter_name="upload", autocast_adapter_dtype=False)
        except ValueError as error:
            raise invalid(f"the adapter does not fit the base model {base!r}: {error}", "path") from error
        return {
            name.replace(".upload", ""): tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if "upload" in name.split(".")
        }
