"""Optional ``torch.compile`` of a model's layers, with dynamic shapes.

Compilation fuses norms, activations, rotary embeddings and residual sums; matrix products and attention have kernels of
their own. Each layer is compiled with dynamic shapes, and code that depends on more than shapes (attention over a
layout, switched adapters) stays uncompiled, so neither a new batch shape nor another run on the model recompiles
anything. Each new kind of work compiles once: with or without gradients, with or without adapters.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface

from gradwire_server.engine.model.adapters.layers import SpanLinear
from gradwire_server.engine.model.attention import packed

KINDS = 64
"""Maximum number of compiled versions of a layer's code; beyond it the layer runs uncompiled."""


def compile_layers(trunk: nn.Module) -> None:
    """Compile the layers of a trunk, each on its first call."""
    torch._dynamo.config.recompile_limit = KINDS
    AttentionInterface.register(packed.NAME, torch.compiler.disable(packed.packed_attention))
    if not hasattr(SpanLinear.forward, "_torchdynamo_disable"):
        SpanLinear.forward = torch.compiler.disable(SpanLinear.forward)  # type: ignore[method-assign]
    layers = max((module for module in trunk.modules() if isinstance(module, nn.ModuleList)), key=len)
    for layer in layers:
        layer.compile(dynamic=True)
