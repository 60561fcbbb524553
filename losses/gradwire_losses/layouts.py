"""From the columns of a batch to the sequences that a loss sees; every rule of a batch is checked here.

Layouts, by the fields that give the sequences:

* ``rows``: ``input_ids [rows, tokens]``, one sequence a row. Scored are all tokens but the first, as far as
  ``labels`` (-100 where not learned), ``loss_mask`` and ``prompt_lengths [rows]`` leave them, where a loss has those.
  With ``target_tokens [rows, tokens]`` (Tinker's convention) nothing is shifted: entry t of every field is about the
  prediction made after reading ``input_ids[..t]``, and all are scored, as far as ``mask`` leaves them. With
  ``step_labels`` or ``token_labels`` likewise, where the label is not -100. With ``kl_input_ids`` a row has a second
  sequence, whose fields begin with ``kl_``.
* ``pairs``: ``chosen_input_ids`` and ``rejected_input_ids``, two sequences a row, chosen first. Scored as above, by
  ``prompt_lengths`` (for both), ``chosen_loss_mask`` and ``rejected_loss_mask``. Two fields ``chosen_x`` and
  ``rejected_x`` come to the loss as one, ``x``, an entry a token or a sequence.
* ``groups``: ``prompt_ids [rows, tokens]``, ``response_ids [rows, samples, tokens]``, one sequence a sample: the
  prompt and one response. Scored are the response's tokens, as far as ``response_masks`` leaves them.

Fields that say what is scored end here; the loss sees the others. Entries of a field with a tokens dimension are
given per sequence either for all of its tokens, those of unscored ones being ignored (they may be NaN), or for
its scored tokens only. A sequence whose masks leave nothing scored is legal: it contributes nothing. A field of ids
with a dimension ``candidates`` comes to the loss as ``candidates [T, K]``, whatever its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Level
from gradwire_losses.columns import Array, Column, Field, cast, read_fields
from gradwire_losses.registry import LossSpec

IGNORED_LABEL = -100


@dataclass(frozen=True)
class _Part:
    """The sequences that one ids field gives, whole or (responses) but for their beginning.

    Attributes:
        ids: the field, with one length a sequence.
        scored: ``[tokens]`` bool.
        counts: ``[sequences]``, scored tokens of each.
    """

    ids: Field
    scored: Array
    counts: Array


@dataclass(frozen=True)
class _Sequences:
    """The sequences of a batch in order, as in :class:`Batch`, and the parts they are made of by ids field.

    ``sides``: the prefixes of the fields of the first and the second sequence of a row, where a row has two.
    """

    ids: Array
    lengths: Array
    scored: Array
    group_sizes: Array
    parts: Mapping[str, _Part]
    target_tokens: Array | None = None
    sides: tuple[str, str] | None = None


def read_batch(
    loss: LossSpec,
    columns: Mapping[str, Column],
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
) -> Batch:
    """Checks the columns against what the loss declares and builds the batch that it sees, on the CPU.

    Args:
        loss: whose fields and layout they are.
        columns: name -> ``.values [total, *dense]`` and ``.levels``, as in the wire's TensorSpec; padding cut.
        vocab_size: ids must be below it.
        context_length: no sequence may be longer.

    Raises:
        BatchError: with the field, the row and the rule, for the first rule that is broken.
    """
    fields = read_fields(loss, columns)
    for field in fields.values():
        if field.spec.ids:
            _check_ids(field, vocab_size)
    sequences = _LAYOUTS[loss.layout](fields, context_length)
    tensors, levels = _loss_fields(loss, fields, sequences)
    return Batch(
        input_ids=torch.from_numpy(sequences.ids),
        lengths=torch.from_numpy(sequences.lengths.copy()),
        scored=torch.from_numpy(sequences.scored),
        group_sizes=torch.from_numpy(sequences.group_sizes.copy()),
        fields=tensors,
        levels=levels,
        target_tokens=None if sequences.target_tokens is None else torch.from_numpy(sequences.target_tokens),
    )


_SCORING_FIELDS = frozenset(
    {
        "labels",
        "loss_mask",
        "mask",
        "prompt_lengths",
        "chosen_loss_mask",
        "rejected_loss_mask",
        "kl_loss_mask",
        "response_masks",
    }
)
_TOKEN_LABELS = ("step_labels", "token_labels")


# ------------------------------------------------------------------ sequences and what of them is scored


def _check_ids(field: Field, vocab_size: int | None) -> None:
    values = field.values
    if not values.size:
        return
    if values.min() < 0 or (vocab_size is not None and values.max() >= vocab_size):
        rule = "0 <= id" if vocab_size is None else f"0 <= id < {vocab_size}"
        wrong = (values < 0) if vocab_size is None else (values < 0) | (values >= vocab_size)
        entry = int(wrong.reshape(len(wrong), -1).any(axis=1).argmax())
        hint = " (padding is marked by the mask, not by an id)" if values.min() < 0 else ""
        raise field.entry_error(entry, f"token ids of this model satisfy {rule}{hint}", rule)


def _starts(lengths: Array) -> Array:
    return np.cumsum(lengths) - lengths


def _check_lengths(field: Field, lengths: Array, context_length: int | None) -> None:
    """``lengths``: of the sequences, one for each innermost length of the field."""
    if context_length is not None and len(lengths) and lengths.max() > context_length:
        sequence = int((lengths > context_length).argmax())
        raise field.error(
            f"a sequence of {lengths[sequence]} tokens, and the model's context is {context_length}; cut or drop it",
            f"tokens <= {context_length}",
            row=field.row_of(sequence, len(field.levels) - 1),
        )


def _check_whole(ids: Field, context_length: int | None) -> None:
    if (empty := ids.lengths == 0).any():
        raise ids.error("no tokens", "at least one token a row", row=int(empty.argmax()))
    _check_lengths(ids, ids.lengths, context_length)


def _whole(fields: Mapping[str, Field], name: str, masks: tuple[str, ...], context_length: int | None) -> _Part:
    """The part of an ids field whose rows are whole sequences: the first token of each is not scored."""
    ids = fields[name]
    lengths = ids.lengths
    _check_whole(ids, context_length)
    scored = np.ones(len(ids.values), dtype=bool)
    scored[_starts(lengths)] = False
    for mask in masks:
        if mask in fields:
            scored &= _learned(fields[mask], ids) if mask == "labels" else _mask(fields[mask], ids)
    if "prompt_lengths" in fields:
        prompts = fields["prompt_lengths"]
        if (wrong := (prompts.values < 0) | (prompts.values > lengths)).any():
            row = int(wrong.argmax())
            raise prompts.error(
                f"{prompts.values[row]}, where {name} has {lengths[row]} tokens",
                f"0 <= prompt_lengths <= tokens of {name}",
                row=row,
            )
        position = np.arange(len(scored)) - np.repeat(_starts(lengths), lengths)
        scored &= position >= np.repeat(prompts.values, lengths)
    return _Part(ids, scored, _count(scored, lengths))


def _predictions(fields: Mapping[str, Field], context_length: int | None) -> _Part:
    """The part of ``input_ids`` where ``target_tokens`` say what is predicted after each token."""
    ids, targets = fields["input_ids"], fields["target_tokens"]
    _check_whole(ids, context_length)
    for name in ("loss_mask", "labels", "prompt_lengths"):
        if name in fields:
            raise fields[name].error(
                "with target_tokens, an entry is about the prediction after its token: say by mask which count",
                "not given together with target_tokens",
            )
    _check_entries(targets, ids)
    if targets.values.ndim == 2 and not targets.values.shape[1]:
        raise targets.error("no candidates", "at least one candidate a token")
    scored = _mask(fields["mask"], ids) if "mask" in fields else np.ones(len(ids.values), dtype=bool)
    return _Part(ids, scored, _count(scored, ids.lengths))


def _labelled(ids: Field, labels: Field, context_length: int | None) -> _Part:
    """The part of ``input_ids`` where a label is about its own token, having been read: -100 where there is none."""
    _check_whole(ids, context_length)
    _check_entries(labels, ids)
    scored = np.not_equal(labels.values, IGNORED_LABEL)
    return _Part(ids, scored, _count(scored, ids.lengths))


def _responses(fields: Mapping[str, Field], context_length: int | None) -> _Part:
    """The part of ``response_ids``: all of its tokens follow a prompt, so each can be scored."""
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
        _check_samples(masks, samples)
        scored &= _mask(masks, responses)
    return _Part(responses, scored, _count(scored, responses.lengths))


def _check_samples(field: Field, samples: Array) -> None:
    if (wrong := field.levels[0] != samples).any():
        row = int(wrong.argmax())
        raise field.error(
            f"{field.levels[0][row]} samples where response_ids has {samples[row]}",
            "as many samples as response_ids",
            row=row,
        )


def _count(scored: Array, lengths: Array) -> Array:
    """``[sequences]`` int64: how many of each sequence's tokens are scored."""
    counts = np.zeros(len(lengths), dtype=np.int64)
    there = lengths > 0
    if there.any():
        counts[there] = np.add.reduceat(scored.view(np.uint8), _starts(lengths)[there], dtype=np.int64)
    return counts


def _mask(mask: Field, ids: Field) -> Array:
    """``[tokens]`` bool: a mask with an entry for every token of its ids field."""
    _check_entries(mask, ids)
    return cast(mask)


def _check_entries(field: Field, ids: Field) -> None:
    """That the field has an entry for every token of its ids field."""
    if (wrong := field.lengths != ids.lengths).any():
        sequence = int(wrong.argmax())
        raise field.error(
            f"{field.lengths[sequence]} entries where {ids.spec.name} has {ids.lengths[sequence]} tokens",
            f"one entry a token of {ids.spec.name}",
            row=field.row_of(sequence, len(field.levels) - 1),
        )


def _learned(labels: Field, ids: Field) -> Array:
    """``[tokens]`` bool: labels are a token's own id, or -100 where it is not learned."""
    if (uneven := labels.lengths != ids.lengths).any():
        row = int(uneven.argmax())
        raise labels.error(
            f"{labels.lengths[row]} labels where {ids.spec.name} has {ids.lengths[row]} tokens",
            f"one label a token of {ids.spec.name}",
            row=row,
        )
    learned = np.not_equal(labels.values, IGNORED_LABEL)
    if (wrong := learned & (labels.values != ids.values)).any():
        entry = int(wrong.argmax())
        raise labels.entry_error(
            entry,
            f"the token there is {ids.values[entry]}. A label is the token's own id (not the next one's: "
            f"nothing is to be shifted) or {IGNORED_LABEL}, which leaves it out",
            f"label = own id or {IGNORED_LABEL}",
        )
    return learned


# ------------------------------------------------------------------ order and layouts


def _ranges(starts: Array, lengths: Array) -> Array:
    """The indices ``starts[i], …, starts[i] + lengths[i] - 1`` of every i, one after the other."""
    within = np.repeat(starts - _starts(lengths), lengths)
    within += np.arange(len(within))
    return within


def _interleave(first: Array, second: Array) -> Array:
    """Where the entries of rows ``first_0, second_0, first_1, …`` are in all of first, then all of second."""
    starts = np.stack([_starts(first), first.sum() + _starts(second)], axis=1)
    return _ranges(starts.ravel(), np.stack([first, second], axis=1).ravel())


def _prepend(prompts: Array, responses: Array, samples: Array) -> Array:
    """Where the tokens of each sample's prompt and response are in all prompts, then all responses."""
    prompt_starts = np.repeat(_starts(prompts), samples)
    starts = np.stack([prompt_starts, prompts.sum() + _starts(responses)], axis=1)
    return _ranges(starts.ravel(), np.stack([np.repeat(prompts, samples), responses], axis=1).ravel())


def _rows(fields: Mapping[str, Field], context_length: int | None) -> _Sequences:
    targets = None
    if "target_tokens" in fields:
        part = _predictions(fields, context_length)
        given = fields["target_tokens"].values
        # Of several candidates, the first stands for the target.
        targets = (given if given.ndim == 1 else given[:, 0])[part.scored].astype(np.int64)
    elif "mask" in fields:
        raise fields["mask"].error("it goes with target_tokens, which the batch has not", "with target_tokens")
    elif labels := next((fields[name] for name in _TOKEN_LABELS if name in fields), None):
        part = _labelled(fields["input_ids"], labels, context_length)
        targets = part.ids.values[part.scored].astype(np.int64)
    elif "kl_input_ids" in fields:
        return _two_sides(fields, ("", "kl_"), context_length)
    else:
        part = _whole(fields, "input_ids", ("loss_mask", "labels"), context_length)
    ids, ones = part.ids.values.astype(np.int64), np.ones(part.ids.num_rows, dtype=np.int64)
    return _Sequences(ids, part.ids.lengths, part.scored, ones, {"input_ids": part}, targets)


def _pairs(fields: Mapping[str, Field], context_length: int | None) -> _Sequences:
    return _two_sides(fields, ("chosen_", "rejected_"), context_length)


def _two_sides(fields: Mapping[str, Field], sides: tuple[str, str], context_length: int | None) -> _Sequences:
    first, second = (_whole(fields, f"{side}input_ids", (f"{side}loss_mask",), context_length) for side in sides)
    order = _interleave(first.ids.lengths, second.ids.lengths)
    return _Sequences(
        ids=np.concatenate([first.ids.values, second.ids.values]).astype(np.int64, copy=False)[order],
        lengths=np.stack([first.ids.lengths, second.ids.lengths], axis=1).ravel(),
        scored=np.concatenate([first.scored, second.scored])[order],
        group_sizes=np.full(first.ids.num_rows, 2, dtype=np.int64),
        parts={part.ids.spec.name: part for part in (first, second)},
        sides=sides,
    )


def _groups(fields: Mapping[str, Field], context_length: int | None) -> _Sequences:
    prompts, part = fields["prompt_ids"], _responses(fields, context_length)
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


# ------------------------------------------------------------------ the fields that a loss sees


def _loss_fields(
    loss: LossSpec, fields: Mapping[str, Field], sequences: _Sequences
) -> tuple[dict[str, Tensor], dict[str, Level]]:
    tensors: dict[str, Tensor] = {}
    levels: dict[str, Level] = {}
    for name, field in fields.items():
        if field.spec.ids and "candidates" in field.dimensions:
            name = "candidates"
        elif name in _SCORING_FIELDS or field.spec.ids:
            continue
        if sequences.sides and (partner := _partner(loss, name, sequences.sides)):
            if partner not in fields:
                raise BatchError(
                    f"{name} is given without {partner}", field=partner, rule=f"given together with {name}"
                )
            if partner.startswith(sequences.sides[0]) and name.startswith(sequences.sides[1]):
                continue
            name = name.removeprefix(sequences.sides[0])
            values, levels[name] = _pair(field, fields[partner], sequences.parts)
        elif "tokens" in field.dimensions:
            if field.dimensions[:3] == ("rows", "samples", "tokens"):
                _check_samples(field, sequences.group_sizes)
            values, levels[name] = _scored_entries(field, sequences.parts[field.spec.aligned_with]), "token"
        else:
            if "samples" in field.dimensions:
                _check_samples(field, sequences.group_sizes)
            one_each = loss.layout == "rows" and sequences.sides is None
            levels[name] = "sequence" if one_each or "samples" in field.dimensions else "example"
            values = cast(field)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    return tensors, levels


def _partner(loss: LossSpec, name: str, sides: tuple[str, str]) -> str | None:
    """The field of the other side that a field goes with, if the loss declares one."""
    first, second = sides
    other = first + name.removeprefix(second) if name.startswith(second) else second + name.removeprefix(first)
    return other if any(spec.name == other for spec in loss.fields) else None


def _pair(chosen: Field, rejected: Field, parts: Mapping[str, _Part]) -> tuple[Array, Level]:
    """The values of both in the order of the sequences, and what they belong to."""
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


def _scored_entries(field: Field, part: _Part) -> Array:
    """``[T, ...]``: the entries of scored tokens, of sequences that have one a token and of those already compact."""
    lengths, tokens, counts = field.lengths, part.ids.lengths, part.counts
    full, compact = lengths == tokens, lengths == counts
    if (wrong := ~(full | compact)).any():
        sequence = int(wrong.argmax())
        row = field.row_of(sequence, len(field.levels) - 1)
        raise field.error(
            f"{lengths[sequence]} entries where {part.ids.spec.name} has {tokens[sequence]} tokens, of which "
            f"{counts[sequence]} are scored; give one entry a token or one a scored token",
            f"one entry a token of {part.ids.spec.name}, or one a scored token",
            row=row,
        )
    if compact.all():
        return cast(field)
    kept = np.ones(len(field.values), dtype=bool)
    kept[np.repeat(full, lengths)] = part.scored[np.repeat(full, tokens)]
    return cast(field, kept)
