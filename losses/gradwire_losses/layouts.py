"""Convert the columns of a batch to the sequences that a loss receives, and check every rule of a batch.

Layouts, by the fields that give the sequences:

* ``rows``: ``input_ids [rows, tokens]``, one sequence per row. All tokens but the first are scored, except those that
  ``labels`` (-100), ``loss_mask`` and ``prompt_lengths [rows]`` exclude, if a loss has these fields. With
  ``target_tokens [rows, tokens]`` (Tinker's convention) nothing is shifted: entry t of every field belongs to the
  prediction made after reading ``input_ids[..t]``, and all are scored, except those that ``mask`` excludes. With
  ``step_labels`` or ``token_labels`` nothing is shifted either; tokens are scored where the label is not -100. With
  ``kl_input_ids`` or ``teacher_input_ids`` a row has a second sequence, with fields named ``kl_…`` or ``teacher_…``.
* ``pairs``: ``chosen_input_ids`` and ``rejected_input_ids``, two sequences a row, chosen first; with
  ``gold_input_ids`` a third. Scored as above, by ``prompt_lengths`` (for all), ``chosen_loss_mask`` and
  ``rejected_loss_mask``. Two fields ``chosen_x`` and ``rejected_x`` become one field ``x`` for the loss, with one entry
  per token or sequence. A field of tokens that only the first sequence has is 0 at the tokens of the others.
* ``groups``: ``prompt_ids [rows, tokens]``, ``response_ids [rows, samples, tokens]``, one sequence per sample: the
prompt and one response. The response's tokens are scored, except those that ``response_masks`` excludes.

Fields that select scored tokens are consumed here; the loss receives the others. A field with a tokens dimension has,
per sequence, either one entry for each of its tokens (those of unscored tokens are ignored and may be NaN) or one for
each scored token. A sequence without scored tokens is legal and contributes nothing. A field of ids with a dimension
``candidates`` is passed to the loss as ``candidates [T, K]``, whatever its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Level
from gradwire_losses.columns import Array, Column, Field, cast, read_fields
from gradwire_losses.padding import Padding, cut_padding
from gradwire_losses.registry import LossSpec
from gradwire_losses.scored import (
    ScoredIds,
    check_ids,
    check_samples,
    count_scored,
    labelled_tokens,
    predictions,
    responses_to_prompts,
    starts_of,
    whole_sequences,
)

_SCORING_FIELDS = frozenset(
    {
        "labels",
        "loss_mask",
        "mask",
        "prompt_lengths",
        "chosen_loss_mask",
        "rejected_loss_mask",
        "gold_loss_mask",
        "kl_loss_mask",
        "teacher_loss_mask",
        "response_masks",
    }
)
_REWARDS = ("rewards", "step_rewards")
_TOKEN_LABELS = ("step_labels", "token_labels")


@dataclass(frozen=True)
class _Sequences:
    """The sequences of a batch in order, as in :class:`Batch`, and their parts by ids field.

    ``sides``: the prefixes of the fields of a row's sequences, if a row has several.
    """

    ids: Array
    lengths: Array
    scored: Array
    group_sizes: Array
    parts: Mapping[str, ScoredIds]
    target_tokens: Array | None = None
    sides: tuple[str, ...] | None = None


def read_batch(
    loss: LossSpec,
    columns: Mapping[str, Column],
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
    padding: Padding | None = None,
) -> Batch:
    """Check the columns against the loss's declaration and build the batch for the loss, on the CPU.

    Args:
        loss: The loss whose fields and layout apply.
        columns: Name -> ``.values [total, *dense]`` and ``.levels``, as in the wire's TensorSpec; without padding.
        vocab_size: Upper bound of ids.
        context_length: Maximum length of a sequence.
        padding: Description of padding that is not cut; None: there is none.

    Raises:
        BatchError: The first broken rule, with the field and the row.
    """
    guesses: list[str] = []
    if padding is not None:
        columns, guesses = cut_padding(loss, columns, padding)
    fields = read_fields(loss, columns)
    for field in fields.values():
        if field.spec.ids:
            check_ids(field, vocab_size)
    sequences = _LAYOUTS[loss.layout](fields, context_length)
    tensors, levels, warnings = _loss_fields(loss, fields, sequences)
    batch = Batch(
        input_ids=torch.from_numpy(sequences.ids),
        lengths=torch.from_numpy(sequences.lengths.copy()),
        scored=torch.from_numpy(sequences.scored),
        group_sizes=torch.from_numpy(sequences.group_sizes.copy()),
        fields=tensors,
        levels=levels,
        target_tokens=None if sequences.target_tokens is None else torch.from_numpy(sequences.target_tokens),
        warnings=(*guesses, *warnings),
    )
    parts = list(sequences.parts.values())
    row_lengths = parts[0].counts if len(parts) == 1 else count_scored(sequences.scored, sequences.lengths)
    vars(batch).update(row_lengths=torch.from_numpy(row_lengths), num_scored=int(row_lengths.sum()))
    return batch


# ------------------------------------------------------------------ order and layouts


def _ranges(starts: Array, lengths: Array) -> Array:
    """The indices ``starts[i], …, starts[i] + lengths[i] - 1`` of every i, one after the other."""
    within = np.repeat(starts - starts_of(lengths), lengths)
    within += np.arange(len(within))
    return within


def _interleave(*sides: Array) -> Array:
    """Indices that bring all of the first side, then all of the second, into the order ``first_0, second_0, first_1,
    …``."""
    before = np.cumsum([0, *(side.sum() for side in sides[:-1])])
    starts = np.stack([start + starts_of(side) for start, side in zip(before, sides, strict=True)], axis=1)
    return _ranges(starts.ravel(), np.stack(sides, axis=1).ravel())


def _prepend(prompts: Array, responses: Array, samples: Array) -> Array:
    """Indices of each sample's prompt and response tokens in all prompts, then all responses."""
    prompt_starts = np.repeat(starts_of(prompts), samples)
    starts = np.stack([prompt_starts, prompts.sum() + starts_of(responses)], axis=1)
    return _ranges(starts.ravel(), np.stack([np.repeat(prompts, samples), responses], axis=1).ravel())


def _rows(fields: Mapping[str, Field], context_length: int | None) -> _Sequences:
    targets = None
    if "target_tokens" in fields:
        part = predictions(fields, context_length)
        given = fields["target_tokens"].values
        # Of several candidates, the first represents the target.
        targets = (given if given.ndim == 1 else given[:, 0])[part.scored].astype(np.int64)
    elif "mask" in fields:
        raise fields["mask"].error("it requires target_tokens, which the batch does not have", "with target_tokens")
    elif labels := next((fields[name] for name in _TOKEN_LABELS if name in fields), None):
        part = labelled_tokens(fields["input_ids"], labels, context_length)
        targets = part.ids.values[part.scored].astype(np.int64)
    elif second := next((side for side in ("kl_", "teacher_") if f"{side}input_ids" in fields), None):
        return _several(fields, ("", second), context_length)
    else:
        part = whole_sequences(fields, "input_ids", ("loss_mask", "labels"), context_length)
    ids, ones = part.ids.values.astype(np.int64), np.ones(part.ids.num_rows, dtype=np.int64)
    return _Sequences(ids, part.ids.lengths, part.scored, ones, {"input_ids": part}, targets)


def _pairs(fields: Mapping[str, Field], context_length: int | None) -> _Sequences:
    sides = ("chosen_", "rejected_", "gold_") if "gold_input_ids" in fields else ("chosen_", "rejected_")
    return _several(fields, sides, context_length)


def _several(fields: Mapping[str, Field], sides: tuple[str, ...], context_length: int | None) -> _Sequences:
    """One sequence for each side of a row."""
    parts = [whole_sequences(fields, f"{side}input_ids", (f"{side}loss_mask",), context_length) for side in sides]
    order = _interleave(*(part.ids.lengths for part in parts))
    return _Sequences(
        ids=np.concatenate([part.ids.values for part in parts]).astype(np.int64, copy=False)[order],
        lengths=np.stack([part.ids.lengths for part in parts], axis=1).ravel(),
        scored=np.concatenate([part.scored for part in parts])[order],
        group_sizes=np.full(parts[0].ids.num_rows, len(sides), dtype=np.int64),
        parts={part.ids.spec.name: part for part in parts},
        sides=sides,
    )


def _groups(fields: Mapping[str, Field], context_length: int | None) -> _Sequences:
    prompts, part = fields["prompt_ids"], responses_to_prompts(fields, context_length)
    samples = part.ids.levels[0]
    order = _prepend(prompts.lengths, part.ids.lengths, samples)
    return _Sequences(
        ids=np.concatenate([prompts.values, part.ids.values]).astype(np.int64, copy=False)[order],
        lengths=np.repeat(prompts.lengths, samples) + part.ids.lengths,
        scored=np.concatenate([np.zeros(len(prompts.values), dtype=bool), part.scored])[order],
        group_sizes=samples,
        parts={"response_ids": part},
    )


_LAYOUTS: Mapping[str, Callable[[Mapping[str, Field], int | None], _Sequences]] = {
    "rows": _rows,
    "pairs": _pairs,
    "groups": _groups,
}


# ------------------------------------------------------------------ fields passed to the loss


def _loss_fields(
    loss: LossSpec, fields: Mapping[str, Field], sequences: _Sequences
) -> tuple[dict[str, Tensor], dict[str, Level], list[str]]:
    tensors: dict[str, Tensor] = {}
    levels: dict[str, Level] = {}
    warnings: list[str] = []
    for name, field in fields.items():
        if field.spec.ids and "candidates" in field.dimensions:
            name = "candidates"
        elif name in _SCORING_FIELDS or field.spec.ids:
            continue
        if sequences.sides and (partner := _partner(loss, name, sequences.sides)):
            if partner not in fields:
                raise BatchError(f"{name} is given without {partner}", field=partner, rule=f"requires {name}")
            if partner.startswith(sequences.sides[0]) and name.startswith(sequences.sides[1]):
                continue
            name = name.removeprefix(sequences.sides[0])
            values, levels[name] = _pair(field, fields[partner], sequences.parts)
        elif "tokens" in field.dimensions:
            if field.dimensions[:3] == ("rows", "samples", "tokens"):
                check_samples(field, sequences.group_sizes)
            part = sequences.parts[field.spec.aligned_with]
            values, levels[name] = _scored_entries(field, part), "token"
            if sequences.sides:
                values = _first_side(values, sequences.parts)
            if name in _REWARDS and (lost := _lost_rewards(field, part)):
                warnings.append(lost)
        else:
            if "samples" in field.dimensions:
                check_samples(field, sequences.group_sizes)
            one_each = loss.layout == "rows" and sequences.sides is None
            levels[name] = "sequence" if one_each or "samples" in field.dimensions else "example"
            values = cast(field)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    return tensors, levels, warnings


def _lost_rewards(field: Field, part: ScoredIds) -> str | None:
    """Describe rewards on unscored tokens, which have no effect; None if there are none."""
    full = np.repeat(field.lengths == part.ids.lengths, field.lengths)
    lost = np.zeros(len(field.values), dtype=bool)
    lost[full] = ~part.scored[np.repeat(field.lengths == part.ids.lengths, part.ids.lengths)]
    lost &= np.isfinite(field.values) & (field.values != 0)
    if not lost.any():
        return None
    first, count = int(lost.argmax()), int(lost.sum())
    row, place = field.place_of(first)
    others = f", the first of {count} such" if count > 1 else ""
    return (
        f"{field.spec.name}, row {row}, {place}: the reward {field.values[first]:g} is on a token that is not scored"
        f"{others}, so it has no effect. Move it to a scored token, or score that token"
    )


def _first_side(entries: Array, parts: Mapping[str, ScoredIds]) -> Array:
    """Entries of the first side's scored tokens, and 0 for those of the others, in the order of the sequences."""
    first, *others = parts.values()
    rest = np.zeros((sum(int(part.counts.sum()) for part in others), *entries.shape[1:]), entries.dtype)
    every: Array = np.concatenate([entries, rest])
    return every[_interleave(first.counts, *(part.counts for part in others))]


def _partner(loss: LossSpec, name: str, sides: tuple[str, ...]) -> str | None:
    """The field of the other side that belongs to a field, if the loss declares one."""
    first, second = sides[:2]
    other = first + name.removeprefix(second) if name.startswith(second) else second + name.removeprefix(first)
    return other if any(spec.name == other for spec in loss.fields) else None


def _pair(chosen: Field, rejected: Field, parts: Mapping[str, ScoredIds]) -> tuple[Array, Level]:
    """Combine both fields in the order of the sequences, with the unit of their entries."""
    if chosen.dimensions != rejected.dimensions:
        raise rejected.error(
            f"the shape [{', '.join(rejected.dimensions)}], {chosen.spec.name} has [{', '.join(chosen.dimensions)}]",
            f"the shape of {chosen.spec.name}",
        )
    if "tokens" not in chosen.dimensions:
        both: Array = np.stack([cast(chosen), cast(rejected)], axis=1)
        return both.reshape(-1, *chosen.values.shape[1:]), "sequence"
    sides = [(field, parts[field.spec.aligned_with]) for field in (chosen, rejected)]
    index = _interleave(*(part.counts for _, part in sides))
    entries: Array = np.concatenate([_scored_entries(field, part) for field, part in sides])
    return entries[index], "token"


def _scored_entries(field: Field, part: ScoredIds) -> Array:
    """``[T, ...]``: the entries of scored tokens, from sequences with one entry per token or per scored token."""
    lengths, tokens, counts = field.lengths, part.ids.lengths, part.counts
    full, compact = lengths == tokens, lengths == counts
    if (wrong := ~(full | compact)).any():
        sequence = int(wrong.argmax())
        row = field.row_of(sequence, len(field.levels) - 1)
        raise field.error(
            f"{lengths[sequence]} entries but {part.ids.spec.name} has {tokens[sequence]} tokens, of which "
            f"{counts[sequence]} are scored; pass one entry per token or one per scored token",
            f"one entry per token of {part.ids.spec.name}, or one per scored token",
            row=row,
        )
    if compact.all():
        return cast(field)
    kept = np.ones(len(field.values), dtype=bool)
    kept[np.repeat(full, lengths)] = part.scored[np.repeat(full, tokens)]
    return cast(field, kept)
