"""The batch that a loss receives: sequences, the mask of scored tokens, and the batch's other fields.

Legend: ``B`` examples (rows of the caller's batch), ``S`` sequences (one per example for a plain batch, two for pairs,
one per sample for groups), ``N`` tokens of all sequences, ``T`` scored tokens of all sequences. Everything is ragged
and flat: rows' entries are concatenated, and lengths split them. Masked positions are absent, not zero.

Devices: lengths and masks stay on the host; scores and fields are on the model's device. So sizes and selections are
known without synchronising with the device, and a loss never waits for it: use :func:`select` with host masks, never a
mask on the device; metrics stay 0-d tensors.

Alignment: entry ``t`` of a per-token field belongs to token ``t``: its log-probability given the tokens before it, the
reward for emitting it, the value of the state it was emitted in. The first token of a sequence has no log-probability
and is never scored. A batch with ``target_tokens`` defines its own targets: there, "scored token" ``t`` means the
prediction made after reading tokens ``0 … t``, and any token can be scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradwire_losses.images import ImageTokens

Level = Literal["token", "sequence", "example"]


class BatchError(ValueError):
    """A batch breaks a rule.

    Attributes:
        field: The batch field.
        row: The row of the caller's batch, if one row is at fault.
        rule: The rule in short form, e.g. ``"0 <= id < 32000"``.
    """

    def __init__(self, message: str, *, field: str = "", row: int | None = None, rule: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.row = row
        self.rule = rule


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting; to a GPU through pinned memory."""
    if device.type == "cuda" and not host.is_cuda:
        host = host.pin_memory()  # the allocator keeps the pinned memory until the copy is done, and reuses it
    return host.to(device, non_blocking=True)


def beside(host: Tensor, values: Tensor) -> Tensor:
    """Copy a host tensor to the device of ``values``, like :func:`sent`."""
    return host if host.device == values.device else sent(host, values.device)


def select(values: Tensor, mask: Tensor) -> Tensor:
    """``[T, ...], [T] bool -> [t, ...]``: select entries by a host mask."""
    return values if bool(mask.all()) else values[beside(mask.nonzero().squeeze(1), values)]


def segment_ids(lengths: Tensor) -> Tensor:
    """``[S] -> [sum(lengths)]``: the segment index of each entry."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def spread(numbers: Tensor, lengths: Tensor) -> Tensor:
    """``[S, ...], [S] -> [T, ...]``: repeat each segment's entry at all of its positions. Differentiable."""
    return numbers[beside(segment_ids(lengths), numbers)]


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """``[T], [S] -> [S]``: the sum of each segment; 0 for an empty one. Differentiable."""
    total = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return total.index_add(0, beside(segment_ids(lengths), values), values)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """``[T], [S] -> [S]``: the mean of each segment; 0 for an empty one. Differentiable."""
    return segment_sum(values, lengths) / beside(lengths.clamp(min=1), values)


def pad(values: Tensor, lengths: Tensor, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """``[T], [S] -> [S, longest], [S, longest] bool``: pad rows, and the mask of real entries."""
    places, width = _padded_places(lengths)
    padded = torch.full((len(lengths) * width,), fill, dtype=values.dtype, device=values.device)
    mask = torch.arange(width, device=values.device) < beside(lengths, values)[:, None]
    return padded.index_copy(0, beside(places, values), values).view(len(lengths), width), mask


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """``[S, longest], [S] -> [T]``: the inverse of :func:`pad`."""
    places, _ = _padded_places(lengths)
    return padded.flatten()[beside(places, padded)]


def _padded_places(lengths: Tensor) -> tuple[Tensor, int]:
    width = int(lengths.max()) if len(lengths) else 0
    segments = segment_ids(lengths)
    starts = lengths.cumsum(0) - lengths
    return torch.arange(len(segments), device=lengths.device) + (
        torch.arange(len(lengths), device=lengths.device) * width - starts
    )[segments], width


@dataclass(frozen=True)
class Batch:
    """Sequences and fields.

    Attributes:
        input_ids: ``[N]`` int64, the tokens of all sequences.
        lengths: ``[S]`` int64, number of tokens per sequence.
        scored: ``[N]`` bool, whether a token is scored; False for each sequence's first token, except with
            target_tokens.
        group_sizes: ``[B]`` int64, sequences per example: 1 for rows, 2 for pairs (chosen, then rejected).
        fields: Name -> ``[T, ...]``, ``[S, ...]`` or ``[B, ...]``, float32, int64 or bool, by ``levels``.
        levels: Name -> the unit (token, sequence or example) of a field's entries.
        target_tokens: ``[T]`` int64, the token predicted at each scored position; None if it is the scored
            token itself, predicted from the tokens before it.
        origin: The host copy of a batch that :meth:`to` moved. ``lengths``, ``scored`` and ``group_sizes`` are
            always on the host.
        warnings: Parts of the caller's batch that have no effect, as sentences for people.
        images: The image tokens among ``input_ids``; None without images.
    """

    input_ids: Tensor
    lengths: Tensor
    scored: Tensor
    group_sizes: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    levels: Mapping[str, Level] = field(default_factory=dict)
    target_tokens: Tensor | None = None
    origin: Batch | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()
    images: ImageTokens | None = None

    @property
    def host(self) -> Batch:
        """The batch on the host, for checking a field or choosing entries by value."""
        return self if self.origin is None else self.origin

    @cached_property
    def row_lengths(self) -> Tensor:
        """``[S]`` int64, on the host: scored tokens per sequence, 0 if a mask leaves none."""
        return segment_sum(self.scored.long(), self.lengths)

    @property
    def num_examples(self) -> int:
        return self.group_sizes.shape[0]  # not ``len``, which torch answers by Python

    @property
    def num_sequences(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def num_scored(self) -> int:
        return int(self.scored.sum())

    @property
    def own_positions(self) -> Tensor:
        """``[T]``: index of each scored token in ``input_ids``."""
        return self.scored.nonzero().squeeze(1)

    @property
    def read_positions(self) -> Tensor:
        """``[T]``: index of the token of ``input_ids`` after which each prediction is made."""
        return self.own_positions - 1 if self.target_tokens is None else self.own_positions

    @property
    def targets(self) -> Tensor:
        """``[T]``: the token whose log-probability each prediction needs."""
        return self.input_ids[self.scored] if self.target_tokens is None else self.target_tokens

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def get(self, name: str) -> Tensor | None:
        return self.fields.get(name)

    def per_token(self, name: str) -> Tensor:
        """``[T, ...]``: a field expanded to tokens: each token's own entry, or its sequence's or example's,
        repeated."""
        values, level = self.fields[name], self.levels[name]
        if level == "example":
            values, level = spread(values, self.group_sizes), "sequence"
        return spread(values, self.row_lengths) if level == "sequence" else values

    def select(self, examples: Tensor) -> Batch:
        """Select these examples (indices ``[b]``), in this order."""
        sequences = _entries(self.group_sizes, examples)
        tokens = _entries(self.lengths, sequences)
        scored_tokens = _entries(self.row_lengths, sequences)
        index: dict[Level, Tensor] = {"token": scored_tokens, "sequence": sequences, "example": examples}
        return Batch(
            input_ids=self.input_ids[tokens],
            lengths=self.lengths[sequences],
            scored=self.scored[tokens],
            group_sizes=self.group_sizes[examples],
            fields={name: values[index[self.levels[name]]] for name, values in self.fields.items()},
            levels=self.levels,
            target_tokens=None if self.target_tokens is None else self.target_tokens[scored_tokens],
            images=None if self.images is None else self.images.select(tokens),
        )

    def to(self, device: torch.device) -> Batch:
        """Copy tokens and fields to a device, without waiting."""
        if device.type == "cpu":
            return self.host
        moved = replace(
            self.host,
            input_ids=sent(self.input_ids, device),
            fields={name: sent(values, device) for name, values in self.fields.items()},
            target_tokens=None if self.target_tokens is None else sent(self.target_tokens, device),
            origin=self.host,
        )
        vars(moved).update(row_lengths=self.host.row_lengths, num_scored=self.host.num_scored)
        return moved


def _entries(lengths: Tensor, segments: Tensor) -> Tensor:
    """Indices of the entries of these segments, segment by segment."""
    starts = lengths.cumsum(0) - lengths
    chosen = lengths[segments]
    within = torch.arange(int(chosen.sum()), device=lengths.device) - (chosen.cumsum(0) - chosen).repeat_interleave(
        chosen
    )
    return starts[segments].repeat_interleave(chosen) + within


@dataclass(frozen=True)
class Scores:
    """Scores that the engine computed for a batch, in float32, by name; only those that the loss requested."""

    by_name: Mapping[str, Tensor]

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    @property
    def logprobs(self) -> Tensor:
        """``[T]``, differentiable: log-probability (nats) of each scored token."""
        return self.by_name["logprobs"]

    @property
    def entropy(self) -> Tensor:
        """``[T]``, differentiable: entropy (nats) of the distribution each scored token was drawn from."""
        return self.by_name["entropy"]

    @property
    def values(self) -> Tensor:
        """``[T]``, differentiable: the value head at the state each scored token was emitted in."""
        return self.by_name["values"]

    @property
    def rewards(self) -> Tensor:
        """``[S]``, differentiable: the reward head at each sequence's last token."""
        return self.by_name["rewards"]

    @property
    def ref_logprobs(self) -> Tensor:
        """``[T]``: as logprobs, under the reference model; no gradient."""
        return self.by_name["ref_logprobs"]

    @property
    def correct(self) -> Tensor:
        """``[T]`` bool: whether the token is the most probable one."""
        return self.by_name["correct"]

    @property
    def candidate_logprobs(self) -> Tensor:
        """``[T, K]``, differentiable: log-probability of each of the batch's ``candidates [T, K]`` at that position."""
        return self.by_name["candidate_logprobs"]

    @property
    def mean_logprobs(self) -> Tensor:
        """``[T]``, differentiable: mean over the vocabulary of the log-probabilities at each scored token."""
        return self.by_name["mean_logprobs"]

    @property
    def collision(self) -> Tensor:
        """``[T]``: log of the sum over the vocabulary of the squared probabilities; no gradient."""
        return self.by_name["collision"]

    @property
    def divergence(self) -> Tensor:
        """``[T]``, differentiable: generalised Jensen-Shannon divergence between the reference and the policy."""
        return self.by_name["divergence"]

    @property
    def token_rewards(self) -> Tensor:
        """``[T]``, differentiable: the reward head at each scored token itself, having read it."""
        return self.by_name["token_rewards"]

    @property
    def class_logits(self) -> Tensor:
        """``[S, C]``, differentiable: the classification head at each sequence's last token."""
        return self.by_name["class_logits"]

    @property
    def token_class_logits(self) -> Tensor:
        """``[T, C]``, differentiable: the classification head at each scored token itself, having read it."""
        return self.by_name["token_class_logits"]
