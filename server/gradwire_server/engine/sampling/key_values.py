"""Keys and values of the samples in progress.

Legend: ``R`` samples (rows), ``P`` prompts, ``H`` hidden size. :class:`Slots` are preallocated, and rows may join and
leave at any time; they need a model whose layers all attend to everything before. :class:`Together` uses any cache of
transformers, for rows that begin at the same time.
While requests keep arriving, slots sample 1.4 times as many tokens a second (``benchmarks/shortcuts.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from gradwire_server.engine.failures import is_out_of_memory
from gradwire_server.engine.model.compilation import leave_out
from gradwire_server.engine.model.policy import Policy

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]
Prompt = Sequence[int]


class KeyValues(Protocol):
    """The keys and values that a batch of rows keeps between two tokens."""

    joins: bool
    """Whether rows may be added while others are in progress."""
    longest: int
    """Maximum tokens that any row will have."""

    def prefill(self, policy: Policy, prompts: Sequence[Prompt], spread: IntArray) -> Tensor:
        """Add rows, where ``spread [R]`` is each row's index in ``prompts``; returns its last state, ``[R, H]``."""

    def decode(self, policy: Policy, tokens: IntArray, positions: IntArray) -> Tensor:
        """Add a token to every row, given ``[R]`` tokens and positions; returns their states, ``[R, H]``."""

    def keep(self, rows: IntArray) -> None:
        """Keep only these rows, in this order; each row moves towards the front or stays."""


class _Places:
    """Places that the current step writes: row ``r`` at ``positions[r]``; it attends to places below ``width``."""

    def __init__(self) -> None:
        self.width = 0
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._positions = torch.zeros(0, dtype=torch.int64)

    def set(self, positions: IntArray) -> None:
        self._positions = torch.from_numpy(positions)
        self.width = int(positions.max()) + 1
        self._on.clear()

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``[R]`` rows and ``[R]`` positions."""
        if device not in self._on:
            self._on[device] = (
                torch.arange(len(self._positions), device=device),
                self._positions.to(device, non_blocking=True),
            )
        return self._on[device]


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, ``[slots, heads, width, size]``."""

    keys: Tensor
    values: Tensor

    def __init__(self, places: _Places, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, positions = self._places.on(key_states.device)
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        part = slice(len(rows)), slice(None), slice(self._places.width)
        return self.keys[part], self.values[part]

    def get_seq_length(self) -> int:
        return self._places.width - 1


leave_out(SlotLayer, "update")  # each step writes a token's keys to a different place


class Slots:
    """One slot per row, filled from the left; the rows in progress use the first slots."""

    joins = True

    def __init__(self) -> None:
        self.longest = 1 << 62
        self._places = _Places()
        self._layers: list[SlotLayer] = []
        self._rows = 0

    def prefill(self, policy: Policy, prompts: Sequence[Prompt], spread: IntArray) -> Tensor:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids[place, : len(prompt)] = torch.as_tensor(prompt)
        # Padding is on the right, where no real token attends to it.
        output = policy.split_model.trunk(input_ids=ids.to(policy.device), use_cache=True)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        new = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        self._reserve(self._rows + len(spread), width, new)
        rows = slice(self._rows, self._rows + len(spread))
        whose = None if len(spread) == len(prompts) else torch.from_numpy(spread)
        for layer, (keys, values) in zip(self._layers, new, strict=True):
            of_row = whose.to(keys.device) if whose is not None else slice(None)
            layer.keys[rows, :, :width] = keys[of_row]
            layer.values[rows, :, :width] = values[of_row]
        self._rows += len(spread)
        states: Tensor = output.last_hidden_state
        states = states[torch.arange(len(prompts), device=states.device), last.to(states.device)]
        return states if whose is None else states[whose.to(states.device)]

    def decode(self, policy: Policy, tokens: IntArray, positions: IntArray) -> Tensor:
        self._places.set(positions)
        width = self._places.width
        self._reserve(self._rows, width, ())
        device = policy.device
        _, places = self._places.on(device)
        seen = torch.arange(width, device=device) <= places[:, None]
        if getattr(policy.model.config, "_attn_implementation", None) in _TAKE_BOOLS:
            seen = seen[:, None, None]  # transformers would build this too, after checking whether any is masked
        output = policy.split_model.trunk(
            input_ids=torch.from_numpy(tokens)[:, None].to(device, non_blocking=True),
            attention_mask=seen,
            position_ids=places[:, None],
            past_key_values=Cache(layers=list(self._layers)),
            use_cache=True,
        )
        state: Tensor = output.last_hidden_state[:, -1]
        return state

    def keep(self, rows: IntArray) -> None:
        (moved,) = np.nonzero(rows != np.arange(len(rows)))
        if len(moved):
            to, come_from = torch.from_numpy(moved), torch.from_numpy(rows[moved])
            for layer in self._layers:
                of, at = come_from.to(layer.device), to.to(layer.device)
                layer.keys[at] = layer.keys[of]
                layer.values[at] = layer.values[of]
        self._rows = len(rows)

    def _reserve(self, rows: int, width: int, like: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Allocate room for so many rows and tokens; growth at least doubles it up to the limit, so that it is rare."""
        slots, room = (self._layers[0].keys.shape[0], self._layers[0].keys.shape[2]) if self._layers else (0, 0)
        if rows <= slots and width <= room:
            return
        if rows > slots:
            slots = max(rows, 2 * slots)
        if width > room:
            room = min(max(width + _AHEAD, 2 * room), max(width, self.longest))

        def grown(old: Tensor | None, sample: Tensor) -> Tensor:
            # Zeros, because masked entries must be finite to have no effect.
            new = sample.new_zeros(slots, sample.shape[1], room, sample.shape[3])
            if old is not None:
                new[: self._rows, :, : old.shape[2]] = old[: self._rows]
            return new

        if not self._layers:
            self._layers = [SlotLayer(self._places, grown(None, keys), grown(None, values)) for keys, values in like]
            return
        for layer in self._layers:
            layer.keys = grown(layer.keys, layer.keys)
            layer.values = grown(layer.values, layer.values)


_TAKE_BOOLS = ("sdpa", "gradwire")  # attention implementations that take boolean masks; the second is our own
_AHEAD = 32  # initial room in tokens beyond a prompt


class Together:
    """Rows that begin at the same time, padded on the left, in the cache that the model itself makes."""

    joins = False

    def __init__(self) -> None:
        self.longest = 1 << 62
        self._mask = torch.zeros(0, 0, dtype=torch.int64)
        self._cache: Any = None

    def prefill(self, policy: Policy, prompts: Sequence[Prompt], spread: IntArray) -> Tensor:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids[place, width - len(prompt) :] = torch.as_tensor(prompt)
            mask[place, width - len(prompt) :] = 1
        ids, self._mask = ids.to(policy.device), mask.to(policy.device)
        output = policy.split_model.trunk(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
        )
        state: Tensor = output.last_hidden_state[:, -1]
        self._cache = output.past_key_values
        if len(spread) > len(prompts):
            self.keep(spread)
            state = state[torch.from_numpy(spread)]
        return state

    def decode(self, policy: Policy, tokens: IntArray, positions: IntArray) -> Tensor:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        output = policy.split_model.trunk(
            input_ids=torch.from_numpy(tokens)[:, None].to(policy.device),
            attention_mask=self._mask,
            position_ids=torch.from_numpy(positions)[:, None].to(policy.device),
            past_key_values=self._cache,
            use_cache=True,
        )
        state: Tensor = output.last_hidden_state[:, -1]
        return state

    def keep(self, rows: IntArray) -> None:
        kept = torch.from_numpy(rows)  # on the CPU, because the cache may be spread over devices
        self._cache.batch_select_indices(kept)
        self._mask = self._mask[kept]


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a plain one; one that shares another's keys, for example, is not."""
    return type(layer) is DynamicLayer and layer.keys is not None and layer.keys.ndim == 4


@torch.no_grad()
def fits_slots(policy: Policy) -> bool:
    """Whether a model's own cache has plain keys and values, and slots in its place give the same states."""
    trunk, facts = policy.split_model.trunk, policy.facts
    if facts.context_length < 4:
        return False
    ids = (torch.arange(4) + 1) % facts.vocab_size
    try:
        expected = trunk(input_ids=ids[None].to(policy.device), use_cache=True)
        cache: Any = expected.past_key_values
        if type(cache) is not DynamicCache or not all(map(_is_plain, cache.layers)):
            return False
        slots, tokens = Slots(), ids.numpy()
        slots.prefill(policy, [tokens[:3].tolist(), tokens[:1].tolist()], np.arange(2))
        found = slots.decode(policy, tokens[[3, 1]], np.array([3, 1]))
    except Exception as error:  # an architecture may do anything with a cache that it did not make
        if is_out_of_memory(error):
            raise
        logger.info("%s keeps a cache of its own: %s: %s", facts.name, type(error).__name__, error)
        return False
    wanted = expected.last_hidden_state[0, [3, 1]].float()
    tolerance = 1e-3 if policy.split_model.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((found.float() - wanted).abs().max() <= tolerance * (1 + wanted.abs().max()))
