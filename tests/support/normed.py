"""Small models whose norms have weights as after a training, and what they compute: for the tests of fused kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gradwire_server.engine.model.packing import Packing, arrange
from gradwire_server.engine.model.split_model import SplitModel
from torch import Tensor
from transformers import AutoModelForCausalLM


def normed_model(kind: Any, folder: Path) -> str:
    """Write a model of a kind of configuration; returns the folder."""
    config = kind(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "norm" in name:  # zeros or ones would hide which of both a norm adds
            torch.nn.init.uniform_(weight, 0.2, 0.8)
    model.save_pretrained(folder)
    return str(folder)


def states_and_gradients(split_model: SplitModel) -> tuple[Tensor, list[Tensor]]:
    """Its states of three rows, and the gradients of their product with fixed numbers in the first layer's weights."""
    lengths = torch.tensor([40, 33, 64])
    ids = torch.randint(64, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    states = split_model.states(arrange(Packing.PACKED, ids, lengths, torch.ones(3, dtype=torch.long))).float()
    weights = [weight for name, weight in split_model.model.named_parameters() if "layers.0." in name]
    fixed = torch.sin(torch.arange(states.numel(), device=states.device).view_as(states))
    return states, list(torch.autograd.grad((states * fixed).sum(), weights))
