"""Models on meta tensors, which have shapes and no memory.

A model whose layers are all alike can be made with fewer of them: bytes are then linear in the number of layers, so two
short models tell those of the whole one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from gradwire_server.engine.model.attention import packed
from gradwire_server.engine.model.loading.configuration import read_configuration, without_weights
from gradwire_server.engine.model.loading.fused_kernels import use_fused_kernels
from gradwire_server.engine.model.loading.pool import ModelPool, check_quantization
from gradwire_server.engine.model.loading.quantization import Quantization, QuantizedLinear, quantized_layers
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.placement import Placement
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.model.trunk import trunk_of
from gradwire_server.engine.model.vision.image_tokens import Vision


class MetaPool(ModelPool):
    """Models without weights, each assumed to be computed as the server computes most of them: packed.

    Args:
        models: Name -> folder, ``config.json`` or hub name.
        layers: Number of layers; None for each model's own.
        quantize: How shared copies hold their linear layers.
    """

    def __init__(
        self,
        models: dict[str, str],
        dtype: torch.dtype,
        *,
        layers: int | None = None,
        quantize: Quantization | None = None,
    ) -> None:
        super().__init__(models, Placement("meta"), dtype, quantize=quantize)
        self._layers = layers

    def load(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        quantize: Quantization | None = None,
        *,
        offload: bool = False,
        placement: Placement | None = None,
        exact: bool | None = None,
    ) -> SplitModel:
        facts = self.facts(name)
        check_quantization(facts, quantize)
        config = read_configuration(facts.path)
        if self._layers is not None:
            shorten(config, self._layers)
        model = without_weights(config, dtype or self.dtype)
        if self.kernels is not None:
            use_fused_kernels(model, self.kernels)
        if quantize is not None:
            for layer in quantized_layers(model):
                layer.__class__ = _MetaQuantizedLinear
        split_model = SplitModel(facts, model, placement or self.placement)
        split_model.by_kernels = self.kernels is not None
        if model.config._attn_implementation == "sdpa":
            model.config._attn_implementation = packed.NAME
            split_model.packing = Packing.SHARED
        if facts.takes_images:
            split_model.vision = Vision(model, facts.path)
        return split_model


class _MetaQuantizedLinear(QuantizedLinear):
    """A layer whose weight has its whole shape here; a pass makes another tensor of it, as dequantising does."""

    def dequantised(self) -> Tensor:
        return torch.empty_like(self.weight)


def shorten(config: PreTrainedConfig, layers: int) -> None:
    """Give a configuration fewer layers."""
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if vars(text).get("layer_types"):  # of some configurations it is computed from the number of layers
        text.layer_types = text.layer_types[:layers]


def layers_alike(model: PreTrainedModel) -> bool:
    """Whether all layers of a model have the same shapes and kind, so that fewer of them tell what each takes."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    stack = getattr(trunk_of(model), "layers", None)
    if len(kinds) > 1 or not isinstance(stack, nn.ModuleList) or len(stack) != config.num_hidden_layers:
        return False
    shapes = [[(name, each.shape) for name, each in layer.named_parameters()] for layer in stack]
    return all(each == shapes[0] for each in shapes)
