"""Feed-forward layers in chunks along the tokens, so that their wide activations exist for one chunk at a time.

A layer's feed-forward part computes each token by itself, and its activations are several times as wide as the hidden
states. In chunks, each is computed once more in the backward pass and frees what it needs. The results are the same up
to rounding, since products of fewer rows may be summed in another order, and gradients of weights are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from gradwire_server.engine.generators import preserved_rng, seed_generators

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 4096
"""Fewest tokens of a chunk."""
CHUNK_BYTES = 4 << 20
"""Fewest bytes of a chunk's hidden states. Smaller tensors come from the heap of the C library, which grew by a hundred
MiB and more with the chunks of a narrow model: it hardly reuses aligned blocks (``ENVIRONMENT`` in
:mod:`gradwire_server.engine_client.launcher`)."""


class FeedForward:
    """The feed-forward layers of a model, found by their structure.

    Args:
        model: Its layers compute in chunks from now on while :attr:`chunked` is true.

    Attributes:
        chunked: Whether they compute in chunks.
        num_layers: Number of layers found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.chunked = False
        layers = list(feed_forward_layers(model))
        self.num_layers = len(layers)
        in_chunks: dict[type[nn.Module], type[nn.Module]] = {}
        for layer in layers:
            kind = type(layer)
            if kind not in in_chunks:
                in_chunks[kind] = type(kind.__name__, (_InChunks, kind), {"__module__": kind.__module__})
            chunked: Any = layer
            chunked.__class__, chunked.feed_forward = in_chunks[kind], self


class _InChunks(nn.Module):
    """Mixed into the class of a feed-forward layer."""

    feed_forward: FeedForward

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = super().forward
        tokens = max(CHUNK_TOKENS, CHUNK_BYTES // (hidden.shape[-1] * hidden.itemsize))
        if not self.feed_forward.chunked or args or kwargs or hidden.shape[-2] <= tokens:
            computed: Tensor = whole(hidden, *args, **kwargs)
            return computed
        chunks = hidden.split(tokens, dim=-2)
        return torch.cat([checkpoint(whole, chunk, use_reentrant=False) for chunk in chunks], dim=-2)


def feed_forward_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that widen hidden states, apply an activation function, gated or not, and narrow them again.

    Found by structure: linear layers from the hidden size to another and back, no other parameters, and one argument.
    The first of each class is tried, to be sure that it computes tokens independently.
    """
    right: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        if not _is_feed_forward(module):
            continue
        kind = type(module)
        if kind not in right:
            right[kind] = _computes_tokens_alone(module)
        if right[kind]:
            yield module


def _is_feed_forward(module: nn.Module) -> bool:
    linear = [each for each in module.children() if isinstance(each, nn.Linear | Conv1D)]
    own = sum(len(list(each.parameters(recurse=False))) for each in linear)
    if not 2 <= len(linear) <= 3 or own != len(list(module.parameters())) or hasattr(module, "is_causal"):
        return False
    (hidden, wide), *gate, (narrowed, returned) = map(_features, linear)
    pairs = wide == narrowed if gate else wide in (narrowed, 2 * narrowed)  # a gate may be one layer with what it gates
    return pairs and returned == hidden and gate in ([], [(hidden, wide)]) and takes_one_argument(module)


def _features(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    assert isinstance(layer, Conv1D)
    return int(layer.weight.shape[0]), int(layer.weight.shape[1])


def takes_one_argument(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is each.empty and each.kind not in several for each in parameters) == 1


@torch.no_grad()
def _computes_tokens_alone(module: nn.Module) -> bool:
    """Whether half of the tokens give what they give among all of them; of a meta tensor there is nothing to try."""
    weight = next(module.parameters())
    if weight.is_meta:
        return True
    width = next(_features(each)[0] for each in module.children() if isinstance(each, nn.Linear | Conv1D))
    with preserved_rng():
        seed_generators(0)
        states = torch.randn(1, 4, width).to(weight.device, weight.dtype if weight.is_floating_point() else None)
    try:
        whole, half = module(states), module(states[:, 2:])
    except (RuntimeError, TypeError) as error:
        logger.info("%s is computed as a whole: %s", type(module).__name__, error)
        return False
    tolerance = 1e-4 if states.dtype in (torch.float32, torch.float64) else 5e-2
    return isinstance(whole, Tensor) and torch.allclose(whole[:, 2:], half, rtol=tolerance, atol=tolerance)
