"""Bytes of weights, gradients, moments and cached keys, by arithmetic.

A trained weight that the model computes with in less than float32 has a float32 master beside it; its gradient and two
moments of AdamW are float32.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from gradwire_server.engine.model.loading.configuration import size_of
from gradwire_server.engine.model.loading.quantization import Quantization, quantized_layers
from gradwire_server.engine.model.placement import layers_of
from gradwire_server.engine.model.trunk import trunk_of

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
GIB = 1 << 30
MIB = 1 << 20


def master_bytes(dtype: torch.dtype) -> int:
    """Bytes of the float32 copy of a trained weight that is held in this dtype."""
    return 0 if dtype in (torch.float32, torch.float64) else 4


def trained_bytes(dtype: torch.dtype) -> int:
    """Bytes of a trained weight in this dtype: itself, its master, gradient and moments."""
    wide = max(dtype.itemsize, 4)  # gradients and moments of float64 weights are float64
    return dtype.itemsize + master_bytes(dtype) + (GRADIENT_BYTES + MOMENT_BYTES) * wide // 4


def weight_bytes(model: PreTrainedModel, dtype: torch.dtype, quantize: Quantization | None = None) -> int:
    """Bytes of a model's frozen weights; with ``quantize``, linear layers but the output head are held in 4 or 8 bits.

    NF4 with double quantisation: half a byte a weight, a byte for each block of 64 of them, and four for each 256
    blocks. int8: a byte a weight and four for each output.
    """
    whole = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    for layer in quantized_layers(model) if quantize else ():
        count = layer.weight.numel()
        narrow = count // 2 + count // 64 + count // 4096 if quantize == "nf4" else count + 4 * layer.out_features
        whole += narrow - count * dtype.itemsize
    return whole


def gathered_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Bytes of a divided model's layers that are whole at a time: two, the next one being fetched, and the rest."""
    layers = [set(layer.parameters()) for layer in layers_of(trunk_of(model))]
    inside = set[nn.Parameter]().union(*layers)
    rest = sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
    largest = sorted(sum(parameter.numel() for parameter in layer) for layer in layers)[-2:]
    return (rest + sum(largest)) * dtype.itemsize


def key_value_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers; 0 for a model without attention."""
    config = model.config.get_text_config()
    if getattr(config, "qk_nope_head_dim", None) and getattr(config, "v_head_dim", None):
        # Latent attention (DeepSeek): keys and values of every head are kept, not what they are computed from.
        of_head = int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
        return int(config.num_hidden_layers * config.num_attention_heads) * of_head * dtype.itemsize
    if not getattr(config, "num_attention_heads", None):
        return 0  # a recurrent state (Mamba) does not grow with the tokens
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    size = int(size_of(config, "head_dim") or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * size * dtype.itemsize


def readable(count: float) -> str:
    """A size for people: ``"1.5 GiB"``, ``"12.0 MiB"`` or ``"3.1 KiB"``."""
    if abs(count) >= 100 * MIB:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / MIB:,.1f} MiB" if abs(count) >= MIB / 10 or not count else f"{count / 1024:,.1f} KiB"
