"""The caches that models of transformers keep, as batches of rows: keys and values, and recurrent states.

A cache is an object, list or dictionary of others and of tensors, whose first dimension is the rows. Tokens, where a
tensor has them, are its last dimension but one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gradwire_losses.batch import sent
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

FIELDS = ("past_key_values", "cache_params", "state")
"""Names under which models return a cache, and take it."""

_OBJECTS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)


def cache_field(output: Mapping[str, Any]) -> str | None:
    """The name under which a model has returned a cache; None if it has not."""
    return next((name for name in FIELDS if output.get(name) is not None), None)


def is_recurrent(cache: Any) -> bool:
    """Whether a cache has states in which a row's padding would leave traces."""
    if not isinstance(cache, Cache):
        return True
    return type(cache).__name__ != "DynamicCache" or any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers
    )


def has_keys(cache: Any) -> bool:
    """Whether a cache has keys, among which a mask chooses."""
    return isinstance(cache, Cache) and any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def joined(caches: Sequence[Any]) -> Any:
    """One cache of the rows of several, in which shorter ones are padded on the left; the first is used up."""
    return caches[0] if len(caches) == 1 else _combined(caches, _beside)


def selected(cache: Any, rows: Tensor) -> Any:
    """A cache of these rows of one, in this order; the one given is used up."""
    return _combined([cache], lambda tensors: tensors[0].index_select(0, sent(rows, tensors[0].device)))


def _beside(tensors: Sequence[Tensor]) -> Tensor:
    width = max(each.shape[-2] for each in tensors)
    return torch.cat([F.pad(each, (0, 0, width - each.shape[-2], 0)) for each in tensors])


def _combined(parts: Sequence[Any], combine: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return combine(parts) if first.dim() > 1 else first
    if isinstance(first, _OBJECTS):
        vars(first).update(_combined([vars(part) for part in parts], combine))
        return first
    if isinstance(first, dict):
        return {key: _combined([part[key] for part in parts], combine) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_combined(each, combine) for each in zip(*parts, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):  # tokens seen, of a row padded to the longest
        return max(parts)
    return first
