"""From columns to sequences: every rule of a batch is told with its field and row, and what is legal arrives whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss
from support.losses import VOCAB, Column, column, group_columns, pair_columns, pick, read, row_columns

ROWS = {"input_ids": [[4, 5, 6], [7, 8]]}
PPO = ROWS | {"old_log_probs": [[0.0, -1, -1], [0.0, -1]], "rewards": [[0.0, 0, 1], [0.0, 1]]}
PAIRS = {"chosen_input_ids": [[1, 2, 3], [4, 5]], "rejected_input_ids": [[1, 2], [4, 6, 7]]}
GROUPS = {
    "prompt_ids": [[1, 2], [3]],
    "response_ids": [[[4, 5], [6]], [[7], []]],
    "rewards": [[1.0, 0.0], [0.5, 0.5]],
}


@dataclass(frozen=True)
class Bad:
    """A batch, the loss it is for, and what the error must say: field, row, rule, and words of the message."""

    what: str
    loss: str
    columns: dict[str, Any]
    field: str
    row: int | None
    rule: str
    words: str


BAD = [
    Bad("an id past the vocabulary", "causal_lm", {"input_ids": [[1, 2], [3, 99]]}, "input_ids", 1, "0 <= id < 50",
        "token 1 is 99"),
    Bad("a negative id", "causal_lm", {"input_ids": [[1, 2], [3, 4, -5]]}, "input_ids", 1, "0 <= id < 50",
        "token 2 is -5"),
    Bad("an unknown field", "causal_lm", ROWS | {"input_idz": [[1], [2]]}, "input_idz", None, "a declared field",
        "input_ids, labels, loss_mask"),
    Bad("a mask that should not travel", "causal_lm", ROWS | {"attention_mask": [[1, 1, 1], [1, 1]]}, "attention_mask",
        None, "rows without padding", "cut the padding"),
    Bad("a missing field", "causal_lm", {"labels": [[1, 2]]}, "input_ids", None, "required", "needs the batch field"),
    Bad("a missing second field", "enhanced_ppo", ROWS, "old_log_probs", None, "required", "float [rows, tokens]"),
    Bad("no rows", "causal_lm", {"input_ids": Column(np.zeros(0, np.int64), (np.zeros(0, np.uint32),))}, "input_ids",
        None, "at least one row", "empty"),
    Bad("no fields", "causal_lm", {}, "input_ids", None, "required", "no fields"),
    Bad("too few dimensions", "causal_lm", {"input_ids": [1, 2, 3]}, "input_ids", None, "shape [rows, tokens]",
        "1 dimension"),
    Bad("too many dimensions", "causal_lm", {"input_ids": [[[1], [2]]]}, "input_ids", None, "shape [rows, tokens]",
        "3 dimensions"),
    Bad("floats for ids", "causal_lm", {"input_ids": [[4.5, 5.0]]}, "input_ids", None, "dtype int", "float64"),
    Bad("a row of no tokens", "causal_lm", {"input_ids": [[1], []]}, "input_ids", 1, "at least one token a row",
        "no tokens"),
    Bad("a row past the context", "causal_lm", {"input_ids": [[1], [2] * 13]}, "input_ids", 1, "tokens <= 12",
        "13 tokens"),
    Bad("a mask of another length", "causal_lm", ROWS | {"loss_mask": [[1, 1, 1], [1]]}, "loss_mask", 1,
        "one entry per token of input_ids", "1 entries but input_ids has 2"),
    Bad("a mask of 2", "causal_lm", ROWS | {"loss_mask": [[1, 1, 1], [1, 2]]}, "loss_mask", 1, "0 or 1",
        "token 1 is 2"),
    Bad("labels of another length", "causal_lm", ROWS | {"labels": [[4, 5], [7, 8]]}, "labels", 0,
        "one label per token of input_ids", "2 labels"),
    Bad("labels shifted by one", "causal_lm", ROWS | {"labels": [[4, 5, 6], [8, -100]]}, "labels", 1,
        "label = own id or -100", "the token there is 7"),
    Bad("other row counts", "enhanced_ppo", PPO | {"rewards": [[0.0, 0, 1]]}, "rewards", None, "equal row counts",
        "has 1 rows but input_ids has 2"),
    Bad("a NaN reward", "enhanced_ppo", PPO | {"rewards": [[0.0, 0, 1], [0.0, np.nan]]}, "rewards", 1, "finite",
        "token 1 is nan"),
    Bad("an infinite log-probability", "enhanced_ppo", PPO | {"old_log_probs": [[0, -np.inf, 1], [0, 1]]},
        "old_log_probs", 0, "finite", "token 1 is -inf"),
    Bad("a positive log-probability", "enhanced_ppo", PPO | {"old_log_probs": [[0, -1, -1], [0, 0.5]]}, "old_log_probs",
        1, "log-probability <= 0", "token 1 is 0.5"),
    Bad("a probability for its logarithm", "grpo", GROUPS | {"old_log_probs": [[[-1, 0.9], [-1]], [[-1], []]]},
        "old_log_probs", 0, "log-probability <= 0", "sample 0, token 1 is 0.9"),
    Bad("a number past float32", "enhanced_ppo", PPO | {"rewards": [[0.0, 0, 1e39], [0, 1]]}, "rewards", 0, "finite",
        "float32"),
    Bad("a token field of another length", "enhanced_ppo", PPO | {"rewards": [[0, 0, 1, 1], [0, 1]]}, "rewards", 0,
        "one entry per token of input_ids, or one per scored "
        "token", "4 entries but input_ids has 3 tokens, of which 2"),
    Bad("a prompt longer than its row", "dpo", PAIRS | {"prompt_lengths": [1, 3]}, "prompt_lengths", 1,
        "0 <= prompt_lengths <= tokens of chosen_input_ids", "3, but chosen_input_ids has 2"),
    Bad("one side's log-probabilities", "dpo", PAIRS | {"chosen_ref_log_probs": [0.0, 1.0]}, "rejected_ref_log_probs",
        None, "requires chosen_ref_log_probs", "without"),
    Bad("the other side's", "dpo", PAIRS | {"rejected_ref_log_probs": [0.0, 1.0]}, "chosen_ref_log_probs",
        None, "requires rejected_ref_log_probs", "without"),
    Bad("sides of other shapes", "dpo", PAIRS | {"chosen_ref_log_probs": [0.0, 1.0],
        "rejected_ref_log_probs": [[0.0, 1.0], [0.0, 1.0, 2.0]]}, "rejected_ref_log_probs", None,
        "the shape of chosen_ref_log_probs", "[rows]"),
    Bad("an id of the rejected side", "dpo", PAIRS | {"rejected_input_ids": [[1, 2], [4, 6, 50]]},
        "rejected_input_ids", 1, "0 <= id < 50", "token 2 is 50"),
    Bad("an empty prompt", "grpo", GROUPS | {"prompt_ids": [[1, 2], []]}, "prompt_ids", 1,
        "at least one token a prompt", "start token"),
    Bad("no samples", "grpo", GROUPS | {"response_ids": [[[4, 5], [6]], []], "rewards": [[1.0, 0.0], []]},
        "response_ids", 1, "at least one sample a row", "no samples"),
    Bad("an id of a sample", "grpo", GROUPS | {"response_ids": [[[4, 5], [6]], [[7], [8, 77]]]}, "response_ids", 1,
        "0 <= id < 50", "sample 1, token 1 is 77"),
    Bad("rewards of other samples", "grpo", GROUPS | {"rewards": [[1.0, 0.0], [0.5, 0.5, 0.5]]}, "rewards", 1,
        "as many samples as response_ids", "3 samples where response_ids has 2"),
    Bad("a NaN reward of a sample", "grpo", GROUPS | {"rewards": [[1.0, 0.0], [0.5, np.nan]]}, "rewards", 1, "finite",
        "sample 1 is nan"),
    Bad("masks of other samples", "grpo", GROUPS | {"response_masks": [[[1, 1]], [[1], []]]}, "response_masks", 0,
        "as many samples as response_ids", "1 samples"),
    Bad("a mask of another sample's length", "grpo", GROUPS | {"response_masks": [[[1, 1], [1]], [[1], [1]]]},
        "response_masks", 1, "one entry per token of response_ids", "1 entries"),
    Bad("log-probabilities of another length", "grpo", GROUPS | {"old_log_probs": [[[0, 0], [0]], [[0, 0], []]]},
        "old_log_probs", 1, "one entry per token of response_ids, or one per scored token", "2 entries"),
    Bad("a sample past the context", "grpo", GROUPS | {"response_ids": [[[4, 5], [6]], [[7], [8] * 12]]},
        "response_ids", 1, "tokens <= 12", "13 tokens"),
    Bad("lengths that do not add up", "causal_lm", {"input_ids": Column(np.arange(3), (np.array([2, 2], np.uint32),))},
        "input_ids", None, "row lengths add up to the number of entries", "4, but there are 3 entries"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_a_broken_rule_is_named_with_its_field_and_row(bad: Bad) -> None:
    columns = {n: rows if isinstance(rows, Column) else column(rows) for n, rows in bad.columns.items()}
    with pytest.raises(BatchError) as caught:
        read_batch(get_loss(bad.loss), columns, vocab_size=VOCAB, context_length=12)
    error = caught.value
    assert (error.field, error.row, error.rule) == (bad.field, bad.row, bad.rule)
    assert bad.words in str(error)
    assert bad.field in str(error)


def test_rows_score_all_but_the_first_token_as_far_as_masks_leave_them() -> None:
    batch = read("causal_lm", {"input_ids": [[4, 5, 6], [7], [8, 9]], "loss_mask": [[1, 0, 1], [1], [0, 1]]})
    assert batch.input_ids.tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.scored.tolist() == [False, False, True, False, False, True]
    assert batch.row_lengths.tolist() == [1, 0, 1] and batch.group_sizes.tolist() == [1, 1, 1]
    assert batch.fields == {}


def test_labels_and_a_loss_mask_are_both_obeyed() -> None:
    columns = {"input_ids": [[4, 5, 6, 7]], "labels": [[-100, 5, -100, 7]], "loss_mask": [[1, 1, 1, 0]]}
    assert read("causal_lm", columns).scored.tolist() == [False, True, False, False]


def test_pairs_come_as_chosen_and_rejected_in_turn_and_their_fields_as_one() -> None:
    columns = PAIRS | {
        "prompt_lengths": [1, 2],
        "chosen_ref_log_probs": [[9.0, -1.0, -2.0], [9.0, 9.0]],
        "rejected_ref_log_probs": [[-3.0], [9.0, 9.0, -4.0]],
    }
    batch = read("dpo", columns)
    assert batch.lengths.tolist() == [3, 2, 2, 3] and batch.group_sizes.tolist() == [2, 2]
    assert batch.input_ids.tolist() == [1, 2, 3, 1, 2, 4, 5, 4, 6, 7]
    assert batch.row_lengths.tolist() == [2, 1, 0, 1]
    assert batch["ref_log_probs"].tolist() == [-1.0, -2.0, -3.0, -4.0]
    per_row = read("dpo", PAIRS | {"chosen_ref_log_probs": [-1.0, -2.0], "rejected_ref_log_probs": [-3.0, -4.0]})
    assert per_row["ref_log_probs"].tolist() == [-1.0, -3.0, -2.0, -4.0]
    assert per_row.levels["ref_log_probs"] == "sequence"


def test_groups_are_prompt_and_response_of_which_the_response_is_scored() -> None:
    batch = read(
        "grpo", GROUPS | {"response_masks": [[[0, 1], [1]], [[1], []]], "old_log_probs": [[[-1.0], [-2]], [[-3], []]]}
    )
    assert batch.input_ids.tolist() == [1, 2, 4, 5, 1, 2, 6, 3, 7, 3]
    assert batch.lengths.tolist() == [4, 3, 2, 1]
    assert batch.row_lengths.tolist() == [1, 1, 1, 0]
    assert batch["rewards"].tolist() == [1.0, 0.0, 0.5, 0.5] and batch.levels["rewards"] == "sequence"
    assert batch["old_log_probs"].tolist() == [-1.0, -2.0, -3.0]


def test_rectangles_are_taken_for_ragged_fields() -> None:
    spec = get_loss("grpo")
    ragged = {
        name: column(rows) for name, rows in (GROUPS | {"response_ids": [[[4, 5], [6, 7]], [[8, 9], [1, 2]]]}).items()
    }
    dense = ragged | {
        "response_ids": Column(np.array([[[4, 5], [6, 7]], [[8, 9], [1, 2]]], np.int32), ()),
        "rewards": Column(np.array([[1.0, 0.0], [0.5, 0.5]], np.float32), ()),
    }
    one, other = read_batch(spec, ragged), read_batch(spec, dense)
    assert one.input_ids.tolist() == other.input_ids.tolist() and one.lengths.tolist() == other.lengths.tolist()
    assert one["rewards"].tolist() == other["rewards"].tolist()


def test_what_a_loss_sees_is_float32_int64_and_writable() -> None:
    columns = {name: column(rows) for name, rows in PPO.items()}
    for held in columns.values():
        held.values.setflags(write=False)
    batch = read_batch(get_loss("enhanced_ppo"), columns)
    assert batch.input_ids.dtype == torch.int64 and batch["rewards"].dtype == torch.float32
    batch.input_ids[0] = 0
    assert columns["input_ids"].values[0] == 4


@pytest.mark.parametrize(
    ("loss", "build"),
    [("causal_lm", row_columns), ("dpo", pair_columns), ("grpo", group_columns)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_selected_examples_are_those_of_a_batch_of_them(loss: str, build: Any, rng: np.random.Generator) -> None:
    columns = build(rng)
    whole = read(loss, columns)
    chosen = rng.permutation(whole.num_examples)[:3]
    expected = read(loss, {name: [rows[i] for i in chosen] for name, rows in columns.items()})
    selected = whole.select(torch.from_numpy(chosen))
    for name in ("input_ids", "lengths", "scored", "group_sizes", "row_lengths"):
        assert getattr(selected, name).tolist() == getattr(expected, name).tolist(), name
    assert {name: v.tolist() for name, v in selected.fields.items()} == {
        n: v.tolist() for n, v in expected.fields.items()
    }
    marks = {"logprobs": torch.arange(whole.num_scored), "rewards": torch.arange(whole.num_sequences)}
    assert len(pick(whole, marks, torch.from_numpy(chosen))["logprobs"]) == expected.num_scored


def test_a_large_batch_is_read_in_a_fraction_of_a_second() -> None:
    import time

    lengths = np.full(8000, 1000, np.uint32)
    ids = np.random.default_rng(0).integers(0, VOCAB, 8_000_000)
    columns = {"input_ids": Column(ids, (lengths,)), "labels": Column(ids, (lengths,))}
    start = time.process_time()
    batch = read_batch(get_loss("causal_lm"), columns, vocab_size=VOCAB, context_length=1000)
    assert time.process_time() - start < 1.0  # about 30 ms on an idle core
    assert batch.num_scored == 8000 * 999


def test_rewards_on_tokens_that_are_not_scored_are_told() -> None:
    columns = PPO | {"loss_mask": [[1, 1, 0], [1, 1]], "rewards": [[0.0, 0.0, 5.0], [0.0, 1.0]]}
    [warning] = read("enhanced_ppo", columns).warnings
    assert warning.startswith("rewards, row 0, token 2: the reward 5 is on a token that is not scored")
    assert read("enhanced_ppo", PPO).warnings == ()
    masked = {"response_masks": [[[1, 1], [1]], [[0], []]], "step_rewards": [[[0, 0], [1]], [[2], []]]}
    [warning] = read("gigpo", GROUPS | masked).warnings
    assert warning.startswith("step_rewards, row 1, sample 0, token 0: the reward 2")
    unscored_nan = PPO | {"rewards": [[np.nan, 0.0, 5.0], [np.nan, 1.0]]}
    assert read("enhanced_ppo", unscored_nan).warnings == ()
    compact = PPO | {"loss_mask": [[1, 1, 0], [1, 1]], "rewards": [[5.0], [1.0]]}
    assert read("enhanced_ppo", compact).warnings == ()


def test_a_mask_says_what_is_scored_and_the_rest_is_context() -> None:
    responses, masks = [[[4, 5], [6]], [[7], [8, 9]]], [[[0, 1], [1]], [[1], [1, 1]]]
    batch = read("grpo", GROUPS | {"response_ids": responses, "response_masks": masks})
    assert batch.input_ids.tolist() == [1, 2, 4, 5, 1, 2, 6, 3, 7, 3, 8, 9]
    assert batch.row_lengths.tolist() == [1, 1, 1, 2]
