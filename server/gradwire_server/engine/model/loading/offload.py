"""Frozen models whose layers are in host memory, for references that do not fit the device beside what is trained."""

from __future__ import annotations

import torch
from accelerate import cpu_offload
from torch import nn
from transformers import PreTrainedModel

from gradwire_server.engine.model.trunk import trunk_of


def offload_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Keep the layers of a frozen model, loaded on the host, there; each weight is on the device while it computes.

    Embedding, final norm and output head move to the device. Weights on the host are pinned for a GPU, so that copies
    run at the full speed of the bus. A forward copies all layers once, whatever it computes.
    """
    whole: nn.Module = model  # the type of transformers' own method knows no device
    trunk = trunk_of(model)
    layers = trunk.layers
    trunk.layers = nn.ModuleList()
    whole.to(device)
    trunk.layers = layers
    weights = layers.state_dict()
    if device.type == "cuda":
        weights = {name: weight.pin_memory() for name, weight in weights.items()}
    cpu_offload(layers, execution_device=device, state_dict=weights)


def num_layer_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that :func:`offload_layers` keeps on the host."""
    return sum(weight.nbytes for weight in trunk_of(model).layers.parameters())
