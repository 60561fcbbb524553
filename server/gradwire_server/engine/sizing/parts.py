"""Bytes of weights, gradients, moments and cached keys, by arithmetic.

A trained weight that the model computes with in less than float32 has a float32 master beside it; its gradient and two
moments of AdamW are float32.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from gradwire_server.engine.model.quantization import Quantization, quantized_layers

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


def key_value_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * heads * size * dtype.itemsize


def readable(count: float) -> str:
    """A size for people: ``"1.5 GiB"`` or ``"12 MiB"``."""
    return f"{count / GIB:,.1f} GiB" if abs(count) >= 100 * MIB else f"{count / MIB:,.1f} MiB"
