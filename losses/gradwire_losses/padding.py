"""Cut padding of batches without a mask: runs of the model's padding token at the ends of rows of equal length.

A client with a padding mask cuts by it. Without one, it names the fields that may be padded, and this module decides
what is padding. A token that a mask or label marks as scored is content. If padding cannot be told from content, the
batch gets a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire_losses.columns import Array, Column
from gradwire_losses.registry import FieldSpec, LossSpec

_IGNORED_LABEL = -100


@dataclass(frozen=True)
class Padding:
    """Information about a batch's padding.

    Attributes:
        fields: Ids fields that may be padded.
        pad_token_id: The model's padding token; None if it has none.
        eos_token_ids: The model's end tokens.
    """

    fields: Collection[str]
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...] = ()


class _Cut(NamedTuple):
    values: Array
    levels: tuple[Array, ...]


def cut_padding(
    loss: LossSpec, columns: Mapping[str, Column], padding: Padding
) -> tuple[Mapping[str, Column], list[str]]:
    """Cut padding; return the columns, and a warning for each field where padding could not be told from content."""
    remaining, warnings = dict(columns), []
    for spec in loss.fields:
        if spec.ids and not spec.aligned_with and spec.name in padding.fields and _readable(columns.get(spec.name)):
            warning = _cut_field(loss, spec, remaining, padding)
            if warning:
                warnings.append(f"{spec.name}: {warning}. Pass {spec.padding_mask} to mark the padding")
    return remaining, warnings


def _readable(column: Column | None) -> bool:
    """Whether a column is well-formed; malformed ones are reported where shapes are checked."""
    return (
        column is not None
        and column.values.ndim == 1
        and column.values.dtype.kind in "iu"
        and bool(column.levels)
        and int(column.levels[-1].sum()) == len(column.values)
    )


def _cut_field(loss: LossSpec, spec: FieldSpec, columns: dict[str, Column], padding: Padding) -> str | None:
    ids = columns[spec.name]
    lengths, pad = ids.levels[-1].astype(np.int64), padding.pad_token_id
    aligned = [f for f in loss.fields if f.aligned_with == spec.name and f.name in columns]
    content, told = _content(ids, aligned, columns)
    leading, trailing = (
        _runs((ids.values == pad) & ~content, lengths) if pad is not None else (0 * lengths, 0 * lengths)
    )
    warning = None if told else _other_filler(ids, lengths, padding)
    if not leading.any() and not trailing.any():
        return warning
    whole = leading == lengths
    if pad in padding.eos_token_ids and not told:
        continued = spec.name.startswith("prompt")  # a prompt that is to be continued does not end with an end token
        keep_first, keep_last = bool((leading > 0).all()), not continued or bool((trailing > 0).all())
        leading, trailing = np.maximum(leading - keep_first, 0), np.maximum(trailing - keep_last, 0)
        if leading.any() or trailing.any():
            warning = f"runs of token {pad} at the ends are treated as padding, although the token also ends a text" + (
                ": the first at each end is kept as content" if keep_last else ""
            )
    if "samples" in spec.shapes[0]:
        trailing = np.where(whole, 0, trailing)
    else:  # a row of padding tokens only stays unchanged: its content is unknown
        leading, trailing = np.where(whole, 0, leading), np.where(whole, 0, trailing)
    position = np.arange(len(ids.values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = (position >= np.repeat(leading, lengths)) & (position < np.repeat(lengths - trailing, lengths))
    cut = (lengths - leading - trailing).astype(np.uint32)
    for name in (spec.name, *(f.name for f in aligned)):
        column = columns[name]
        if column.levels and np.array_equal(column.levels[-1], ids.levels[-1]):
            columns[name] = _Cut(column.values[kept], (*column.levels[:-1], cut))
    return warning


def _content(ids: Column, aligned: list[FieldSpec], columns: Mapping[str, Column]) -> tuple[Array, bool]:
    """``[tokens]`` bool: tokens that a mask or label marks as scored; and whether there is such a field."""
    content, told = np.zeros(len(ids.values), dtype=bool), False
    for spec in aligned:
        column = columns[spec.name]
        if not column.levels or not np.array_equal(column.levels[-1], ids.levels[-1]) or column.values.ndim != 1:
            continue
        if spec.dtype == "bool" and "mask" in spec.name:
            content |= column.values != 0
        elif "labels" in spec.name:
            content |= column.values != _IGNORED_LABEL
        else:
            continue
        told = True
    return content, told


def _runs(marked: Array, lengths: Array) -> tuple[Array, Array]:
    """``[tokens] bool, [S] -> [S], [S]``: number of marked entries at the beginning and at the end of each sequence."""
    leading, trailing = np.zeros_like(lengths), np.zeros_like(lengths)
    end = 0
    for row, length in enumerate(lengths.tolist()):
        own, end = marked[end : end + length], end + length
        if length and (own[0] or own[-1]):
            others = np.flatnonzero(~own)
            leading[row] = others[0] if len(others) else length
            trailing[row] = length - 1 - others[-1] if len(others) else length
    return leading, trailing


def _other_filler(ids: Column, lengths: Array, padding: Padding) -> str | None:
    """Find runs of two or more of a token that often serves as padding and is not this model's padding token."""
    if len(lengths) < 2:
        return None
    for token in (0, *padding.eos_token_ids):
        if token == padding.pad_token_id:
            continue
        leading, trailing = _runs(ids.values == token, lengths)
        if max(leading.max(), trailing.max()) > 1:
            model = (
                "the model has no padding token"
                if padding.pad_token_id is None
                else (f"the model's padding token is {padding.pad_token_id}")
            )
            return f"rows begin or end with runs of token {token}, which count as content: {model}"
    return None
