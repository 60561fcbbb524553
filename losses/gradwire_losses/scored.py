"""The scored tokens of a batch's sequences: masks, labels, lengths, and the rules for ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradwire_losses.columns import Array, Field, cast

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
