"""Keys and values of the samples in progress.

Legend: ``R`` samples (rows), ``P`` prompts, ``H`` hidden size. Rows may join and leave :class:`.pages.Pages` at any
time, and share what begins alike; this needs a model whose layers all attend to everything before. :class:`Together`
uses any cache of transformers, for rows that begin at the same time: an object, list or dictionary of others and of
tensors, whose first dimension is the rows. Tokens, where a tensor has them, are its last dimension but one.
While requests keep arriving, rows that join sample 1.4 times as many tokens a second.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gradwire_losses.batch import sent
from gradwire_losses.images import ImageTokens
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.vision.row_images import images_of_pieces

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


IntArray = npt.NDArray[np.int64]
Prompt = Sequence[int]


class Room(Protocol):
    """Tokens of cache that are taken once further rows have joined."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""

    def with_row(self, prompt: Hashable, tokens: int) -> int:
        """Tokens of all rows and one more with so many tokens; rows with equal ``prompt`` have the same one."""

    def add(self, prompt: Hashable, tokens: int) -> None:
        """Add a row."""


class KeyValues(Protocol):
    """The keys and values that a batch of rows keeps between two tokens."""

    joins: bool
    """Whether rows may be added while others are in progress."""

    def room(self, prompts: Iterable[Hashable]) -> Room:
        """A count that begins with the rows in progress, which have these prompts."""

    def more(self, positions: IntArray) -> int:
        """Tokens of cache that are taken once every row has its next token, given ``[R]`` their positions."""

    def held(self) -> Sequence[float]:
        """``[R]`` tokens of cache that each row would give back."""

    def found(self, tree: bytes, prompt: Prompt) -> tuple[int, int]:
        """Tokens of a prompt that are known in its tree, and how many of them take no more cache, as rows have them."""

    def warm(self, policy: Policy, tree: bytes, prompt: Prompt, tokens: int) -> None:
        """Compute so many tokens of a prompt in advance, of which more are missing. Only for rows that join."""

    def prefill(
        self, policies: Sequence[Policy], prompts: Sequence[Prompt], spread: IntArray, trees: Sequence[bytes] = ()
    ) -> Tensor:
        """Add rows, where ``spread [R]`` is each row's index in ``prompts``; returns its last state, ``[R, H]``.

        Each prompt has its policy and its tree. Prompts of one policy are neighbours.
        """

    def decode(self, policies: Sequence[Policy], tokens: IntArray, positions: IntArray) -> Tensor:
        """Add a token to every row, given ``[R]`` policies, tokens and positions; returns their states, ``[R, H]``."""

    def spoilt(self, rows: IntArray) -> None:
        """Remove what these rows have, as it is not finite: what a mask leaves out of others' attention must be."""

    def keep(self, rows: IntArray) -> None:
        """Keep only these rows, in this order."""

    def end(self, *, spare_memory: bool = False) -> None:
        """Drop all rows, and what only they need; also what others may need later, if memory is to be spared."""


def _images_of(prompts: Sequence[Prompt], width: int) -> ImageTokens | None:
    """The image tokens of prompts that are padded on the left to this width; None if all are text."""
    images = images_of_pieces([(prompt, 0, len(prompt)) for prompt in prompts])
    if images is None:
        return None
    ends = [width * (row + 1) for row in range(len(prompts))]
    places = torch.cat([torch.arange(end - len(prompt), end) for end, prompt in zip(ends, prompts, strict=True)])
    return images.arranged(places, width * len(prompts))


class PaddedRoom:
    """Every row as long as the longest."""

    def __init__(self) -> None:
        self._rows = self._width = 0

    @property
    def tokens(self) -> int:
        return self._rows * self._width

    def with_row(self, prompt: Hashable, tokens: int) -> int:
        return (self._rows + 1) * max(self._width, tokens + 1)

    def add(self, prompt: Hashable, tokens: int) -> None:
        self._rows, self._width = self._rows + 1, max(self._width, tokens + 1)


class Together:
    """Rows of one policy that begin at the same time, padded on the left, in the cache that the model itself makes.

    Prompts of models with recurrent states go through the model without padding, those of one length together.
    """

    joins = False

    def __init__(self) -> None:
        self._mask = torch.zeros(0, 0, dtype=torch.int64)
        self._masked = False
        self._field = FIELDS[0]
        self._cache: Any = None

    def room(self, prompts: Iterable[Hashable]) -> Room:
        return PaddedRoom()

    def more(self, positions: IntArray) -> int:
        rows, width = self._mask.shape
        return rows * (width + 1)

    def held(self) -> Sequence[float]:
        rows, width = self._mask.shape
        return [float(width)] * rows

    def found(self, tree: bytes, prompt: Prompt) -> tuple[int, int]:
        return 0, 0

    def warm(self, policy: Policy, tree: bytes, prompt: Prompt, tokens: int) -> None:
        raise NotImplementedError("rows that begin together have no prompts in parts")

    def prefill(
        self, policies: Sequence[Policy], prompts: Sequence[Prompt], spread: IntArray, trees: Sequence[bytes] = ()
    ) -> Tensor:
        policy = policies[0]
        policy.activate()
        lengths = np.array([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids[place, width - len(prompt) :] = torch.as_tensor(prompt)
        self._mask = sent((torch.arange(width) >= width - torch.from_numpy(lengths)[:, None]).long(), policy.device)
        alike = [np.flatnonzero(lengths == length) for length in np.unique(lengths)[::-1]]
        self._masked = False

        def of_length(rows: IntArray) -> tuple[Tensor, Any]:
            width = lengths[rows[0]]
            images = _images_of([prompts[row] for row in rows], width)
            return self._forward(policy, ids[rows, -width:], self._mask[rows, -width:], images=images)

        states = [of_length(alike[0])]
        if len(alike) > 1 and not is_recurrent(states[0][1]):
            self._masked = True
            images = _images_of(prompts, width)
            alike, states = [np.arange(len(prompts))], [self._forward(policy, ids, self._mask, images=images)]
        else:
            states += map(of_length, alike[1:])
            self._masked = len(alike) > 1 and has_keys(states[0][1])
        self._cache = joined([cache for _, cache in states])
        order = np.argsort(np.concatenate(alike))[spread]
        if len(order) > 1:
            self._cache = selected(self._cache, torch.from_numpy(order))
        self._mask = self._mask[sent(torch.from_numpy(spread), self._mask.device)]
        together = torch.cat([state for state, _ in states])
        return together.index_select(0, sent(torch.from_numpy(order), together.device))

    def decode(self, policies: Sequence[Policy], tokens: IntArray, positions: IntArray) -> Tensor:
        policy = policies[0]
        policy.activate()
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        ids = torch.from_numpy(tokens)[:, None]
        state, self._cache = self._forward(policy, ids, self._mask, torch.from_numpy(positions)[:, None])
        return state

    def _forward(
        self,
        policy: Policy,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor | None = None,
        images: ImageTokens | None = None,
    ) -> tuple[Tensor, Any]:
        """Last states of rows, ``[R, H]``, and their cache, given the one of earlier tokens if there are positions."""
        cache = {} if positions is None else {self._field: self._cache}
        own_mask = mask if self._masked else None
        tokens: dict[str, Any] = {"input_ids": sent(ids, policy.device), "attention_mask": own_mask}
        vision = policy.split_model.vision
        if images is not None and vision is not None:
            tokens = {"attention_mask": own_mask} | vision.trunk_inputs(tokens["input_ids"], images, own_mask)
        output = policy.split_model.trunk(
            position_ids=(mask.cumsum(1) - 1).clamp(min=0) if positions is None else sent(positions, policy.device),
            use_cache=True,
            **tokens,
            **cache,
        )
        field = cache_field(output)
        if field is None:
            raise NotImplementedError(f"{policy.facts.architecture} keeps no cache")
        self._field = field
        state: Tensor = output.last_hidden_state[:, -1]
        return state, output[field]

    def spoilt(self, rows: IntArray) -> None:
        """All rows are of one policy, whose cache ends with them."""

    def keep(self, rows: IntArray) -> None:
        kept = torch.from_numpy(rows)  # on the CPU, because the cache may be spread over devices
        self._cache = selected(self._cache, kept)
        self._mask = self._mask[sent(kept, self._mask.device)]

    def end(self, *, spare_memory: bool = False) -> None:
        self._cache, self._mask = None, torch.zeros(0, 0, dtype=torch.int64)
