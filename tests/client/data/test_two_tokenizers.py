"""Two tokenizers of one text: where their tokens end together, and whose candidates are whose."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire.data import Expectations, gold_fields, padded_candidates, shared_tokens

STUDENT = {"a": 0, "ab": 1, "c": 2, "d": 3, "s": 4}
TEACHER = {"c": 0, "b": 1, "a": 2, "d": 3, "t": 4}


def test_the_fields_by_hand() -> None:
    """The text "abcd": the student writes ab c d, the teacher a b c d."""
    shared = shared_tokens(STUDENT, TEACHER)
    assert shared == {0: 2, 2: 0, 3: 3}
    student = Expectations([2, 3, 4], np.array([[1, 0], [2, 4], [3, 2]]))
    teacher = Expectations(
        [1, 2, 3, 4],
        np.array([[2, 4], [1, 4], [0, 4], [3, 2]]),
        np.log([[0.5, 0.2], [0.4, 0.3], [0.6, 0.1], [0.7, 0.2]]),
        np.log([0.5, 0.4, 0.6, 0.7]),
    )
    found = gold_fields(student, teacher, shared)
    assert found["piece_ends"].tolist() == [True, True, True]
    # ab: b and t of the teacher, which the student has not, times the teacher's a; ab of the student.
    assert found["own"].tolist() == [[True, False], [False, True], [False, False]]
    assert found["shared"].tolist() == [[False, False], [True, False], [True, True]]
    assert found["student_token_ids"].tolist() == [[1, 0], [2, 4], [3, 0]]
    np.testing.assert_allclose(np.exp(found["teacher_log_probs"]), [[0.2, 0.15], [0.6, 0.1], [0.7, 0.2]], rtol=1e-6)


def test_text_whose_tokens_do_not_end_together_is_one_piece() -> None:
    student = Expectations([1, 3, 3, 5, 6], np.zeros((5, 1), int))
    teacher = Expectations([2, 3, 5], np.zeros((3, 1), int), np.full((3, 1), -1.0), np.full(3, -2.0))
    found = gold_fields(student, teacher, {0: 0})
    assert found["piece_ends"].tolist() == [False, False, True, True, False]
    assert found["teacher_log_probs"][[2, 3], 0].tolist() == [-3.0, -1.0]
    wide = {name: np.repeat(values, 2, axis=1) if values.ndim == 2 else values for name, values in found.items()}
    columns = padded_candidates([found, wide])
    assert [values.shape for values in columns["own"]] == [(5, 2), (5, 2)]
    assert columns["teacher_log_probs"][0][2].tolist() == [-3.0, np.float32(-1e30)]


def test_what_is_missing_is_named() -> None:
    student = Expectations([1], np.zeros((1, 1), int))
    with pytest.raises(ValueError, match="the teacher's Expectations need top_logprobs"):
        gold_fields(student, student, {})
    teacher = Expectations([1, 2], np.zeros((1, 1), int), np.zeros((1, 1)), np.zeros(1))
    with pytest.raises(ValueError, match="teacher: 2 ends, but top_ids of 1 tokens"):
        gold_fields(student, teacher, {})
