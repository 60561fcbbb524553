"""The trunk of a transformers model: the part that ends in the hidden states for its output head."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def trunk_of(model: PreTrainedModel) -> Any:
    """The part of a causal LM from token ids to final hidden states.

    It is the model's decoder, unless transformers names something else so: the output head (ModernBERT) or the model
    itself (Llama 4). Then it is the part that holds the input embeddings.
    """
    decoder = model.get_decoder()
    embeddings = model.get_input_embeddings()
    if decoder is not model and _holds(decoder, embeddings):
        return decoder
    return next((child for child in model.children() if _holds(child, embeddings)), decoder)


def _holds(module: nn.Module, embeddings: nn.Module) -> bool:
    return module is not embeddings and any(each is embeddings for each in module.modules())
