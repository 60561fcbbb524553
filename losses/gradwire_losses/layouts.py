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

IGNORED_LABEL = -100


@dataclass(frozen=True)
class ScoredIds:
    """The sequences of one ids field, complete or (responses) without their beginning.

    Attributes:
        ids: The field, with one length per sequence.
        scored: ``[tokens]`` bool.
        counts: ``[sequences]``, number of scored tokens per sequence.
    """

    ids: Field
    scored: Array
    counts: Array


def check_ids(field: Field, vocab_size: int | None) -> None:
    values = field.values
    if not values.size:
        return
    if values.min() < 0 or (vocab_size is not None and values.max() >= vocab_size):
        rule = "0 <= id" if vocab_size is None else f"0 <= id < {vocab_size}"
        wrong = (values < 0) if vocab_size is None else (values < 0) | (values >= vocab_size)
        entry = int(wrong.reshape(len(wrong), -1).any(axis=1).argmax())
        hint = " (padding is marked by the mask, not by an id)" if values.min() < 0 else ""
        raise field.entry_error(entry, f"token ids of this model satisfy {rule}{hint}", rule)


def starts_of(lengths: Array) -> Array:
    return np.cumsum(lengths) - lengths


def _check_lengths(field: Field, lengths: Array, context_length: int | None) -> None:
    """Check ``lengths`` of the sequences, one for each innermost length of the field."""
    if context_length is not None and len(lengths) and lengths.max() > context_length:
        sequence = int((lengths > context_length).argmax())
        raise field.error(
            f"a sequence of {lengths[sequence]} tokens, but the model's context is {context_length}; shorten or drop "
            "it",
            f"tokens <= {context_length}",
            row=field.row_of(sequence, len(field.levels) - 1),
        )


def _check_whole(ids: Field, context_length: int | None) -> None:
    if (empty := ids.lengths == 0).any():
        raise ids.error("no tokens", "at least one token a row", row=int(empty.argmax()))
    _check_lengths(ids, ids.lengths, context_length)


def whole_sequences(
    fields: Mapping[str, Field], name: str, masks: tuple[str, ...], context_length: int | None
) -> ScoredIds:
    """Build the part of an ids field whose rows are whole sequences: the first token of each is not scored."""
    ids = fields[name]
    lengths = ids.lengths
    _check_whole(ids, context_length)
    scored = np.ones(len(ids.values), dtype=bool)
    scored[starts_of(lengths)] = False
    for mask in masks:
        if mask in fields:
            scored &= _learned(fields[mask], ids) if mask == "labels" else _mask(fields[mask], ids)
    if "prompt_lengths" in fields:
        prompts = fields["prompt_lengths"]
        if (wrong := (prompts.values < 0) | (prompts.values > lengths)).any():
            row = int(wrong.argmax())
            raise prompts.error(
                f"{prompts.values[row]}, but {name} has {lengths[row]} tokens",
                f"0 <= prompt_lengths <= tokens of {name}",
                row=row,
            )
        position = np.arange(len(scored)) - np.repeat(starts_of(lengths), lengths)
        scored &= position >= np.repeat(prompts.values, lengths)
    return ScoredIds(ids, scored, count_scored(scored, lengths))


def predictions(fields: Mapping[str, Field], context_length: int | None) -> ScoredIds:
    """Build the part of ``input_ids`` whose ``target_tokens`` define the prediction after each token."""
    ids, targets = fields["input_ids"], fields["target_tokens"]
    _check_whole(ids, context_length)
    for name in ("loss_mask", "labels", "prompt_lengths"):
        if name in fields:
            raise fields[name].error(
                "with target_tokens, an entry belongs to the prediction after its token: select predictions with mask",
                "not given together with target_tokens",
            )
    _check_entries(targets, ids)
    if targets.values.ndim == 2 and not targets.values.shape[1]:
        raise targets.error("no candidates", "at least one candidate a token")
    scored = _mask(fields["mask"], ids) if "mask" in fields else np.ones(len(ids.values), dtype=bool)
    return ScoredIds(ids, scored, count_scored(scored, ids.lengths))


def labelled_tokens(ids: Field, labels: Field, context_length: int | None) -> ScoredIds:
    """Build the part of ``input_ids`` whose labels belong to the token itself, after reading it; -100 for none."""
    _check_whole(ids, context_length)
    _check_entries(labels, ids)
    scored = np.not_equal(labels.values, IGNORED_LABEL)
    return ScoredIds(ids, scored, count_scored(scored, ids.lengths))


def responses_to_prompts(fields: Mapping[str, Field], context_length: int | None) -> ScoredIds:
    """Build the part of ``response_ids``: all of its tokens follow a prompt, so each can be scored."""
    prompts, responses = fields["prompt_ids"], fields["response_ids"]
    if (empty := prompts.lengths == 0).any():
        raise prompts.error(
            "an empty prompt; a response needs a token before it, a start token if nothing else",
            "at least one token a prompt",
            row=int(empty.argmax()),
        )
    samples = responses.levels[0]
    if (empty := samples == 0).any():
        raise responses.error("no samples", "at least one sample a row", row=int(empty.argmax()))
    _check_lengths(responses, np.repeat(prompts.lengths, samples) + responses.lengths, context_length)
    scored = np.ones(len(responses.values), dtype=bool)
    if "response_masks" in fields:
        masks = fields["response_masks"]
        check_samples(masks, samples)
        scored &= _mask(masks, responses)
    return ScoredIds(responses, scored, count_scored(scored, responses.lengths))


def check_samples(field: Field, samples: Array) -> None:
    if (wrong := field.levels[0] != samples).any():
        row = int(wrong.argmax())
        raise field.error(
            f"{field.levels[0][row]} samples where response_ids has {samples[row]}",
            "as many samples as response_ids",
            row=row,
        )


def count_scored(scored: Array, lengths: Array) -> Array:
    """``[sequences]`` int64: number of scored tokens of each sequence."""
    counts = np.zeros(len(lengths), dtype=np.int64)
    there = lengths > 0
    if there.any():
        counts[there] = np.add.reduceat(scored.view(np.uint8), starts_of(lengths)[there], dtype=np.int64)
    return counts


def _mask(mask: Field, ids: Field) -> Array:
    """``[tokens]`` bool: a mask with an entry for every token of its ids field."""
    _check_entries(mask, ids)
    return cast(mask)


def _check_entries(field: Field, ids: Field) -> None:
    """Check that the field has an entry for every token of its ids field."""
    if (wrong := field.lengths != ids.lengths).any():
        sequence = int(wrong.argmax())
        raise field.error(
            f"{field.lengths[sequence]} entries but {ids.spec.name} has {ids.lengths[sequence]} tokens",
            f"one entry per token of {ids.spec.name}",
            row=field.row_of(sequence, len(field.levels) - 1),
        )


def _learned(labels: Field, ids: Field) -> Array:
    """``[tokens]`` bool: labels are a token's own id, or -100 if it is not learned."""
    if (uneven := labels.lengths != ids.lengths).any():
        row = int(uneven.argmax())
        raise labels.error(
            f"{labels.lengths[row]} labels but {ids.spec.name} has {ids.lengths[row]} tokens",
            f"one label per token of {ids.spec.name}",
            row=row,
        )
    learned = np.not_equal(labels.values, IGNORED_LABEL)
    if (wrong := learned & (labels.values != ids.values)).any():
        entry = int(wrong.argmax())
        raise labels.entry_error(
            entry,
            f"the token there is {ids.values[entry]}. A label is the token's own id (do not shift it to the "
            f"next token) or {IGNORED_LABEL}, which excludes the token",
            f"label = own id or {IGNORED_LABEL}",
        )
    return learned


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
