"""``torch.compile`` of a model's layers, by choice: one compilation for all of them, whatever shapes batches have.

Norms, activations, rotary embeddings and residual sums, which compiling fuses, are between the products and attention,
which have kernels of their own. So each layer is compiled with dynamic shapes, and what depends on more than shapes,
attention over a layout of sequences and adapters that are switched, stays as it is: neither a new batch shape nor
another run on the model compiles anything again. Another kind of work does, once: with gradients or without, with
adapters or not.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface

from gradwire_server.engine.model import attention
from gradwire_server.engine.model.adapters import SpanLinear

KINDS = 64
"""Of work that a layer's code may be compiled for; beyond them it runs as it is."""


_LEFT_OUT: list[tuple[type, str]] = [(SpanLinear, "forward")]


def leave_out(kind: type, method: str) -> None:
    """Keeps a method that the layers call out of what is compiled; for those that take another way at each call."""
    _LEFT_OUT.append((kind, method))


def compile_layers(trunk: nn.Module) -> None:
    """Compiles the layers of a trunk, each when it is first called."""
    torch._dynamo.config.recompile_limit = KINDS
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for kind, method in _LEFT_OUT:
        function = getattr(kind, method)
        if not hasattr(function, "_torchdynamo_disable"):
            setattr(kind, method, torch.compiler.disable(function))
    layers = max((module for module in trunk.modules() if isinstance(module, nn.ModuleList)), key=len)
    for layer in layers:
        layer.compile(dynamic=True)
