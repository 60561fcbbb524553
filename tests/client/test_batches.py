"""Batches: every form gives the same bytes, padding never travels, and what is wrong is named by field and row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradwire.batches import SCORING_FIELDS, maybe_padded, to_columns
from gradwire.descriptions import LossField
from gradwire.errors import InvalidBatchError
from gradwire.wire.columns import token_rows
from gradwire_proto.codec import Column, encode

IDS = LossField("input_ids", "int", ("[rows, tokens]",), required=True, padding_mask="attention_mask")
ROW_FIELDS = (
    IDS,
    LossField("loss_mask", "bool", ("[rows, tokens]",), aligned_with="input_ids"),
    LossField("rewards", "float", ("[rows]", "[rows, tokens]"), aligned_with="input_ids"),
    LossField("lengths", "int", ("[rows]",)),
    LossField("top", "float", ("[rows, tokens, k]",), aligned_with="input_ids"),
)
GROUP_FIELDS = (
    LossField("prompt_ids", "int", ("[rows, tokens]",), required=True, padding_mask="prompt_masks"),
    LossField("response_ids", "int", ("[rows, samples, tokens]",), required=True, padding_mask="response_masks"),
    LossField("response_masks", "bool", ("[rows, samples, tokens]",), aligned_with="response_ids"),
    LossField("rewards", "float", ("[rows, samples]",), required=True),
)


def rows(batch: Any) -> dict[str, Column]:
    return to_columns("a_loss", ROW_FIELDS, batch)


def groups(batch: Any) -> dict[str, Column]:
    return to_columns("a_loss", GROUP_FIELDS, batch)


def lists(column: Column) -> list[list[Any]]:
    return [row.tolist() for row in column.rows()]


def payload(columns: dict[str, Column]) -> tuple[Any, bytes]:
    specs, buffers = encode(columns)
    return [spec.SerializeToString() for spec in specs], b"".join(buffers)


RAGGED: dict[str, Any] = {
    "input_ids": [[5, 6, 7], [8], [9, 10]],
    "loss_mask": [[0, 1, 1], [1], [0, 1]],
    "rewards": [[0.0, 0.5, -1.0], [2.0], [0.0, 3.0]],
    "lengths": [1, 0, 1],
}
WIDTH = 5


def padded(values: list[list[Any]], side: str, dtype: Any, fill: Any = 0) -> np.ndarray:
    out = np.full((len(values), WIDTH), fill, dtype)
    for index, row in enumerate(values):
        where = slice(len(row)) if side == "right" else slice(WIDTH - len(row), WIDTH)
        out[index, where] = row
    return out


def padded_batch(side: str) -> dict[str, Any]:
    return {
        "input_ids": padded(RAGGED["input_ids"], side, np.int64, fill=3),
        "attention_mask": padded([[1] * len(row) for row in RAGGED["input_ids"]], side, np.int64),
        "loss_mask": padded(RAGGED["loss_mask"], side, np.int64, fill=1),
        "rewards": padded(RAGGED["rewards"], side, np.float32, fill=np.nan),
        "lengths": np.array(RAGGED["lengths"]),
    }


def as_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: values[index] for name, values in batch.items()} for index in range(3)]


FORMS: dict[str, Any] = {
    "nested lists": RAGGED,
    "tuples": {name: tuple(tuple(v) if isinstance(v, list) else v for v in values) for name, values in RAGGED.items()},
    "row dicts": as_rows(RAGGED),
    "lists of arrays": {name: [np.array(v) for v in values] for name, values in RAGGED.items()},
    "lists of tensors": {name: [torch.tensor(v) for v in values] for name, values in RAGGED.items()},
    "object arrays": {
        name: np.array([np.array(v) for v in values] + [None], dtype=object)[:-1] for name, values in RAGGED.items()
    },
    "padded right": padded_batch("right"),
    "padded left": padded_batch("left"),
    "padded, as lists": {name: values.tolist() for name, values in padded_batch("right").items()},
    "padded, as rows": as_rows(padded_batch("left")),
    "padded tensors": {name: torch.from_numpy(values) for name, values in padded_batch("right").items()},
    "big-endian": {
        name: values.astype(values.dtype.newbyteorder(">")) for name, values in padded_batch("right").items()
    },
    "not contiguous": {
        name: np.asfortranarray(np.repeat(values, 2, axis=0))[::2] for name, values in padded_batch("left").items()
    },
    "other dtypes": padded_batch("right")
    | {
        "input_ids": padded(RAGGED["input_ids"], "right", np.uint8, fill=3),
        "attention_mask": padded([[1] * len(row) for row in RAGGED["input_ids"]], "right", np.float64),
        "rewards": padded(RAGGED["rewards"], "right", np.float64, fill=np.nan),
        "lengths": np.array(RAGGED["lengths"], np.int8),
    },
    "masked ids, ragged fields": RAGGED | {key: padded_batch("left")[key] for key in ("input_ids", "attention_mask")},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bytes(form: str) -> None:
    columns = rows(FORMS[form])
    assert payload(columns) == payload(rows(RAGGED))
    assert "attention_mask" not in columns
    assert lists(columns["input_ids"]) == RAGGED["input_ids"]
    assert lists(columns["rewards"]) == RAGGED["rewards"]
    assert columns["lengths"].levels == ()


def test_dtypes_that_travel() -> None:
    columns = rows(RAGGED)
    assert {name: column.values.dtype.name for name, column in columns.items()} == {
        "input_ids": "int32",
        "loss_mask": "bool",
        "rewards": "float32",
        "lengths": "int32",
    }
    assert rows({"input_ids": [[2**40]]})["input_ids"].values.dtype == np.int64
    assert list(columns)[-1] == "loss_mask"  # bytes last, the rest stays aligned


def test_a_bfloat16_tensor_that_requires_gradients() -> None:
    rewards = torch.tensor([1.0, -2.5], dtype=torch.bfloat16, requires_grad=True)
    assert rows({"input_ids": [[1], [2]], "rewards": rewards})["rewards"].values.tolist() == [1.0, -2.5]


def test_a_field_shorter_than_the_padding_is_left_as_it_is() -> None:
    batch = padded_batch("right") | {"rewards": [[0.5, -1.0], [], [3.0]]}
    columns = rows(batch)
    assert lists(columns["rewards"]) == [[0.5, -1.0], [], [3.0]]
    assert lists(columns["input_ids"]) == RAGGED["input_ids"]


def test_dense_dimensions_are_cut_with_their_tokens() -> None:
    top = np.arange(3 * WIDTH * 2, dtype=np.float32).reshape(3, WIDTH, 2)
    columns = rows(padded_batch("left") | {"top": top})
    expected = [top[0, 2:], top[1, 4:], top[2, 3:]]
    for got, want in zip(columns["top"].rows(), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_row_of_padding_only_becomes_empty() -> None:
    columns = rows({"input_ids": [[1, 2], [3, 3]], "attention_mask": [[1, 1], [0, 0]]})
    assert lists(columns["input_ids"]) == [[1, 2], []]


def test_random_padding_is_dropped_whatever_its_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        count, width = rng.integers(1, 6), rng.integers(1, 9)
        lengths = rng.integers(0, width + 1, count)
        starts = [rng.integers(0, width - length + 1) for length in lengths]
        mask = np.zeros((count, width), bool)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            mask[index, start : start + length] = True
        ids, rewards = rng.integers(0, 99, (count, width)), rng.normal(size=(count, width)).astype(np.float32)
        columns = rows({"input_ids": ids, "attention_mask": mask, "rewards": rewards})
        for index, (got, values) in enumerate(zip(columns["input_ids"].rows(), columns["rewards"].rows(), strict=True)):
            np.testing.assert_array_equal(got, ids[index][mask[index]])
            np.testing.assert_array_equal(values, rewards[index][mask[index]])


def test_groups_and_masks_that_are_both() -> None:
    batch = {
        "prompt_ids": [[3, 1, 2], [1, 2, 4]],
        "prompt_masks": [[0, 1, 1], [1, 1, 1]],
        "response_ids": [[[5, 6, 7, 0], [8, 9, 0, 0]], [[1, 2, 3, 4], [0, 0, 0, 0]]],
        "response_masks": [[[1, 0, 1, 0], [1, 1, 0, 0]], [[1, 1, 1, 1], [0, 0, 0, 0]]],
        "rewards": [[1, 0], [0.5, 2]],
    }
    for form in (batch, {name: np.array(values) for name, values in batch.items()}):
        columns = groups(form)
        assert lists(columns["prompt_ids"]) == [[1, 2], [1, 2, 4]]
        assert "prompt_masks" not in columns
        outer, inner = columns["response_ids"].levels
        assert (outer.tolist(), inner.tolist()) == ([2, 2], [3, 2, 4, 0])
        assert columns["response_ids"].values.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
        assert columns["response_masks"].values.tolist() == [True, False, True] + [True] * 6  # the hole stays
        assert [level.tolist() for level in columns["response_masks"].levels] == [[2, 2], [3, 2, 4, 0]]
        assert columns["rewards"].levels[0].tolist() == [2, 2]


def test_a_mask_that_says_what_is_scored_leaves_the_context_before_it() -> None:
    columns = groups(
        {
            "prompt_ids": [[1]],
            "response_ids": [[[20, 21, 22, 23, 0]]],
            "response_masks": [[[0, 1, 1, 1, 0]]],
            "rewards": [[1.0]],
        }
    )
    assert columns["response_ids"].values.tolist() == [20, 21, 22, 23]
    assert columns["response_masks"].values.tolist() == [False, True, True, True]


def test_ragged_groups() -> None:
    columns = groups(
        {"prompt_ids": [[1], [2]], "response_ids": [[[5, 6]], [[7], [], [8, 9]]], "rewards": [[1], [2, 3, 4]]}
    )
    assert [level.tolist() for level in columns["response_ids"].levels] == [[1, 3], [2, 1, 0, 2]]
    assert columns["rewards"].levels[0].tolist() == [1, 3]


def test_token_rows() -> None:
    assert lists(token_rows("prompt_ids", [[1, 2], [3]])) == [[1, 2], [3]]
    assert lists(token_rows("prompt_ids", np.array([1, 2]))) == [[1, 2]]
    assert lists(token_rows("prompt_ids", [torch.tensor([1, 2]), torch.tensor([3])])) == [[1, 2], [3]]


OK: dict[str, Any] = {"input_ids": [[1, 2], [3]]}
WRONG: dict[str, tuple[Any, str, int | None, str]] = {
    "not a batch": ("text", "", None, "mapping"),
    "no rows": ([], "", None, "empty"),
    "a row that is none": ([{"input_ids": [1]}, [2]], "", 1, "row 1"),
    "rows that differ in fields": ([{"input_ids": [1], "rewards": 1.0}, {"input_ids": [1]}], "rewards", 1, "does not"),
    "unknown field": (OK | {"reward": [1, 2]}, "reward", None, "did you mean 'rewards'"),
    "missing field": ({"rewards": [1]}, "input_ids", None, "needs"),
    "empty": ({"input_ids": []}, "input_ids", None, "empty"),
    "one dimension": ({"input_ids": [1, 2]}, "input_ids", None, "a list that holds one row"),
    "texts": ({"input_ids": ["a", "b"]}, "input_ids", None, "service.encode"),
    "three dimensions": ({"input_ids": np.zeros((2, 2, 2), int)}, "input_ids", None, "3 dimensions"),
    "mixed depth": ({"input_ids": [[1, 2], 3]}, "input_ids", 1, "int"),
    "deeper in one row": ({"input_ids": [[1, 2], [3, [4]]]}, "input_ids", 1, "[rows, tokens]"),
    "floats for ids": ({"input_ids": [[1.5]]}, "input_ids", None, "must be int"),
    "one row of floats": ({"input_ids": [[1], [2.5]]}, "input_ids", 1, "must be int"),
    "none": ({"input_ids": [[1], [None]]}, "input_ids", 1, "not numbers"),
    "text": ({"input_ids": [["a"]]}, "input_ids", None, "not numbers"),
    "row counts": (OK | {"rewards": [1.0]}, "rewards", None, "1 rows but input_ids has 2"),
    "mask of two": (OK | {"loss_mask": [[1, 1], [2]]}, "loss_mask", 1, "0 or 1"),
    "hole in padding": (
        {"input_ids": [[1, 2, 3], [1, 2, 3]], "attention_mask": [[1, 1, 1], [1, 0, 1]]},
        "attention_mask",
        1,
        "loss mask",
    ),
    "mask of another width": (OK | {"attention_mask": [[1, 1], [1, 1]]}, "attention_mask", 1, "2 entries"),
    "dense shapes differ": (OK | {"top": [[[1.0], [2.0]], [[1.0, 2.0]]]}, "top", None, "dense shapes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    batch, field, row, text = WRONG[case]
    with pytest.raises(InvalidBatchError) as caught:
        rows(batch)
    assert text in str(caught.value)
    assert (caught.value.field, caught.value.row) == (field, row)
    assert caught.value.rule


def test_a_hole_in_a_sample_names_the_row() -> None:
    fields = (LossField("r", "int", ("[rows, samples, tokens]",), padding_mask="m", required=True),)
    ids = np.ones((3, 2, 3), int)
    mask = np.ones((3, 2, 3), int)
    mask[2, 0, 1] = 0
    with pytest.raises(InvalidBatchError) as caught:
        to_columns("a_loss", fields, {"r": ids, "m": mask})
    assert caught.value.row == 2


def test_scoring_needs_no_loss() -> None:
    columns = to_columns("forward", SCORING_FIELDS, {"input_ids": [[1, 2, 0]], "attention_mask": [[1, 1, 0]]})
    assert lists(columns["input_ids"]) == [[1, 2]]


def test_what_may_be_padded_is_left_to_the_server() -> None:
    def left(fields: Any, batch: Any) -> list[str]:
        return maybe_padded(fields, batch, to_columns("a_loss", fields, batch))

    square = {"input_ids": [[1, 2], [3, 0]]}
    assert left(ROW_FIELDS, square) == ["input_ids"]
    assert left(ROW_FIELDS, square | {"attention_mask": [[1, 1], [1, 0]]}) == []
    assert left(ROW_FIELDS, {"input_ids": [[1, 2], [3]]}) == []
    grouped = {"prompt_ids": [[1, 0], [1, 2]], "response_ids": [[[3, 4]], [[5, 0]]], "rewards": [[1], [2]]}
    assert left(GROUP_FIELDS, grouped | {"response_masks": [[[1, 1]], [[1, 0]]]}) == ["prompt_ids", "response_ids"]


def test_a_token_id_that_no_integer_type_holds_is_named() -> None:
    for ids in ([[1, 2], [3, 2**70]], [[1, 2], [3, -(2**70)]]):
        with pytest.raises(InvalidBatchError, match=f"row 1: {ids[1][1]} does not fit int64") as caught:
            rows({"input_ids": ids})
        assert (caught.value.field, caught.value.row) == ("input_ids", 1)
