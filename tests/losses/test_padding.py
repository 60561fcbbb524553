"""What is padding where no mask says so: runs of the model's padding token at the ends, and nothing that is scored."""

from __future__ import annotations

from typing import Any

import pytest
from gradwire_losses.batch import Batch
from gradwire_losses.layouts import read_batch
from gradwire_losses.padding import Padding
from gradwire_losses.registry import get_loss
from support.losses import column

PAD, EOS = 1, 2


def read(
    loss: str, columns: dict[str, Any], *fields: str, pad: int | None = PAD, eos: tuple[int, ...] = (EOS,)
) -> Batch:
    given = {name: column(rows) for name, rows in columns.items()}
    return read_batch(get_loss(loss), given, padding=Padding(fields, pad, eos))


def rows(batch: Batch) -> list[list[int]]:
    return [part.tolist() for part in batch.input_ids.split(batch.lengths.tolist())]


def test_the_documented_batch_of_grpo_trains_on_no_padding() -> None:
    columns = {
        "prompt_ids": [[7, 8, 9], [7, PAD, PAD], [PAD, 7, 8]],
        "response_ids": [[[20, 21, 22, PAD]], [[PAD, 20, 21, 22]], [[20, 21, EOS, 5]]],
        "response_masks": [[[1, 1, 1, 0]], [[0, 1, 1, 1]], [[0, 1, 1, 0]]],
        "rewards": [[1.0], [0.0], [0.5]],
        "old_log_probs": [[[-1.0, -2.0, -3.0, 9.0]], [[9.0, -4.0, -5.0, -6.0]], [[9.0, -7.0, -8.0, 9.0]]],
    }
    batch = read("grpo", columns, "prompt_ids", "response_ids")
    assert rows(batch) == [[7, 8, 9, 20, 21, 22], [7, 20, 21, 22], [7, 8, 20, 21, EOS, 5]]
    assert batch.row_lengths.tolist() == [3, 3, 2] and batch.warnings == ()
    assert batch["old_log_probs"].tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]


def test_without_the_clients_word_a_padding_token_is_content() -> None:
    assert rows(read("causal_lm", {"input_ids": [[5, PAD, PAD], [5, 6, 7]]})) == [[5, PAD, PAD], [5, 6, 7]]


def test_what_is_scored_is_no_padding() -> None:
    ids, labels = [[5, PAD, PAD, PAD], [PAD, 5, 6, 7]], [[-100, PAD, -100, -100], [-100, 5, 6, 7]]
    assert rows(read("causal_lm", {"input_ids": ids, "labels": labels}, "input_ids")) == [[5, PAD], [5, 6, 7]]


def test_an_end_token_that_is_also_padding_is_told() -> None:
    batch = read("causal_lm", {"input_ids": [[5, 6, EOS, EOS], [5, 6, 7, EOS]]}, "input_ids", pad=EOS)
    assert rows(batch) == [[5, 6, EOS], [5, 6, 7, EOS]]
    [warning] = batch.warnings
    assert warning.startswith("input_ids: runs of token 2") and "attention_mask" in warning
    columns = {"prompt_ids": [[5, EOS], [5, 6]], "response_ids": [[[8]], [[9]]], "rewards": [[1.0], [2.0]]}
    batch = read("grpo", columns, "prompt_ids", pad=EOS)
    assert rows(batch) == [[5, 8], [5, 6, 9]]
    [warning] = batch.warnings
    assert warning.startswith("prompt_ids: runs of token 2") and "prompt_masks" in warning


@pytest.mark.parametrize("pad", [None, PAD])
def test_another_filler_is_content_and_told(pad: int | None) -> None:
    batch = read("causal_lm", {"input_ids": [[5, 6, 0, 0], [5, 6, 7, 8]]}, "input_ids", pad=pad)
    assert rows(batch) == [[5, 6, 0, 0], [5, 6, 7, 8]]
    [warning] = batch.warnings
    assert warning.startswith("input_ids: rows begin or end with runs of token 0") and "attention_mask" in warning
