"""Fields of the loss ``gold``: a teacher's expectations in the tokens of a student with another tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ABSENT = -1e30
"""Log-probability of no candidate."""


@dataclass(frozen=True)
class Expectations:
    """A model's predictions at each token of a response, as ``compute_top_logprobs`` returns them.

    Attributes:
        ends: ``[tokens]``: where each token ends in the response's text, counted from 0; in one unit for both models
            (bytes, or the characters of a fast tokenizer's ``offset_mapping``).
        top_ids: ``[tokens, k]``: the most probable tokens in the place of each.
        top_logprobs: ``[tokens, k]``: their log-probabilities; needed of the teacher.
        logprobs: ``[tokens]``: the log-probability of each token itself; needed of the teacher.
    """

    ends: Sequence[int]
    top_ids: NDArray[Any]
    top_logprobs: NDArray[Any] | None = None
    logprobs: NDArray[Any] | None = None


def shared_tokens(student: Mapping[str, int], teacher: Mapping[str, int]) -> dict[int, int]:
    """Ids of the teacher's tokens that the student has too -> the student's ids.

    Args:
        student, teacher: Vocabularies: text of a token -> its id (``get_vocab`` of a tokenizer).
    """
    return {number: student[text] for text, number in teacher.items() if text in student}


def gold_fields(student: Expectations, teacher: Expectations, shared: Mapping[int, int]) -> dict[str, NDArray[Any]]:
    """Make the fields of the loss ``gold`` for one response, an entry for each of the student's tokens.

    A piece of text ends where a token of both ends. Its candidates are the teacher's ``k`` and, of the student's, those
    that the teacher has not.

    Args:
        student: The student's expectations of a text.
        teacher: The teacher's, of the same text.
        shared: :func:`shared_tokens`.

    Returns:
        ``piece_ends [tokens]``, and ``student_token_ids``, ``teacher_log_probs``, ``shared`` and ``own
        [tokens, candidates]``, with as many candidates as the response needs: rows of one batch are padded to the most
        by :func:`padded_candidates`.

    Raises:
        ValueError: The teacher's log-probabilities are missing, or numbers of entries differ.
    """
    if teacher.top_logprobs is None or teacher.logprobs is None:
        raise ValueError("the teacher's Expectations need top_logprobs and logprobs")
    for name, model in (("student", student), ("teacher", teacher)):
        if len(model.ends) != len(model.top_ids):
            raise ValueError(f"{name}: {len(model.ends)} ends, but top_ids of {len(model.top_ids)} tokens")
    places = {int(end): place for place, end in enumerate(teacher.ends)}
    known, start = frozenset(shared.values()), 0
    tokens: list[tuple[list[int], list[int], list[float], list[float]] | None] = []
    for t, end in enumerate(student.ends):
        place = places.get(int(end))
        if place is None or place < start or (t + 1 < len(student.ends) and student.ends[t + 1] == end):
            tokens.append(None)
            continue
        before = float(np.sum(teacher.logprobs[start:place], dtype=np.float64))
        start = place + 1
        both, alone = [], []
        for number, logprob in zip(teacher.top_ids[place].tolist(), teacher.top_logprobs[place].tolist(), strict=True):
            if number in shared:
                both.append((shared[number], logprob + before))
            else:
                alone.append(logprob + before)
        own = [number for number in student.top_ids[t].tolist() if number not in known]
        tokens.append(([number for number, _ in both], own, [logprob for _, logprob in both], alone))
    width = max([len(a) + max(len(b), len(d)) for a, b, _, d in filter(None, tokens)], default=1)
    shape = (len(tokens), max(1, width))
    fields: dict[str, NDArray[Any]] = {
        "piece_ends": np.array([token is not None for token in tokens]),
        "student_token_ids": np.zeros(shape, np.int64),
        "teacher_log_probs": np.full(shape, ABSENT, np.float32),
        "shared": np.zeros(shape, np.bool_),
        "own": np.zeros(shape, np.bool_),
    }
    for t, token in enumerate(tokens):
        if token is None:
            continue
        ids, own, logprobs, alone = token
        fields["student_token_ids"][t, : len(ids) + len(own)] = ids + own
        fields["teacher_log_probs"][t, : len(ids) + len(alone)] = logprobs + alone
        fields["shared"][t, : len(ids)] = True
        fields["own"][t, len(ids) : len(ids) + len(own)] = True
    return fields


def padded_candidates(rows: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, list[NDArray[Any]]]:
    """Columns of several :func:`gold_fields`, with equally many candidates."""
    width = max(row["shared"].shape[1] for row in rows)
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in rows[0]}
    for row in rows:
        for name, values in row.items():
            fill = ABSENT if name == "teacher_log_probs" else 0
            more = ((0, 0), (0, width - values.shape[1])) if values.ndim == 2 else ((0, 0),)
            columns[name].append(np.pad(values, more, constant_values=fill))
    return columns
