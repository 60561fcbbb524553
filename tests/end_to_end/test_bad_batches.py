"""A bad batch is told what is wrong with it, by field, row and rule, and the run goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import gradwire
import numpy as np
import pytest

GOOD: dict[str, Any] = {"input_ids": [[4, 5, 6], [7, 8]]}
PPO: dict[str, Any] = GOOD | {"old_log_probs": [[0.0, -1, -1], [0.0, -1]], "rewards": [[0.0, 0, 1], [0.0, 1]]}

# what is wrong, batch, loss, kwargs, exception, field, row, a piece of the rule or message
CASES: list[tuple[str, Any, str, dict[str, Any], type[gradwire.GradwireError], str, int | None, str]] = [
    ("id past the vocabulary", {"input_ids": [[4, 5], [6, 99999]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "input_ids", 1, "99999"),
    ("negative id", {"input_ids": [[4, -5], [6, 7]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "input_ids", 0, "-5"),
    ("unknown field", GOOD | {"input_idz": [[1], [2]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "input_idz", None, "input_ids"),
    ("missing field", {"labels": [[1, 2], [3]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "input_ids", None, "input_ids"),
    ("wrong shape", {"input_ids": [4, 5, 6]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "input_ids", None, "[rows, tokens]"),
    ("rows that differ", GOOD | {"loss_mask": [[1, 1, 1]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "loss_mask", None, "2"),
    ("row length that differs", GOOD | {"loss_mask": [[1, 1, 1], [1]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "loss_mask", 1, ""),
    ("floats for ids", {"input_ids": [[4.5, 5.0]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "input_ids", None, "int"),
    ("empty batch", {"input_ids": []}, "causal_lm", {}, gradwire.InvalidBatchError, "input_ids", None, "empty"),
    ("row past the context", {"input_ids": [[4, 5], [6] * 5000]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "input_ids", 1, "context"),
    ("mask of 2", GOOD | {"loss_mask": [[1, 1, 1], [1, 2]]}, "causal_lm", {}, gradwire.InvalidBatchError,
     "loss_mask", 1, ""),
    ("NaN reward", PPO | {"rewards": [[0.0, 0, 1], [0.0, np.nan]]}, "enhanced_ppo", {}, gradwire.InvalidBatchError,
     "rewards", 1, "finite"),
    ("infinite log-probability", PPO | {"old_log_probs": [[0.0, -np.inf, 1], [0.0, 1]]}, "enhanced_ppo", {},
     gradwire.InvalidBatchError, "old_log_probs", 0, "finite"),
    ("unknown loss", GOOD, "casual_lm", {}, gradwire.UnknownLossError, "loss_fn", None, "causal_lm"),
    ("a function", GOOD, lambda batch, scores: 0.0, {}, gradwire.InvalidArgumentError, "loss_fn", None,
     "forward_backward_custom"),
    ("unknown argument", PPO, "enhanced_ppo", {"clip_epsilom": 0.2}, gradwire.InvalidArgumentError,
     "clip_epsilom", None, "clip_epsilon"),
    ("argument out of range", PPO, "enhanced_ppo", {"gamma": 1.5}, gradwire.InvalidArgumentError,
     "gamma", None, "1"),
    ("arguments that do not go together", PPO, "enhanced_ppo", {"reduction_divisor": 4.0},
     gradwire.InvalidArgumentError, "", None, "do not go together"),
    ("argument of the wrong type", PPO, "enhanced_ppo", {"gamma": "high"}, gradwire.InvalidArgumentError,
     "gamma", None, "number"),
    ("unknown reference model", PPO, "enhanced_ppo", {"reference_model": "gpt-9"}, gradwire.UnknownModelError,
     "reference_model", None, "gpt-9"),
    ("missing checkpoint", PPO, "enhanced_ppo", {"reference_model": "run-aaaa/none"},
     gradwire.UnknownCheckpointError, "reference_model", None, "run-aaaa/none"),
]  # fmt: skip


@pytest.fixture
async def run(service: gradwire.ServiceClient) -> gradwire.TrainingClient:
    return await service.create_run("tiny", lora=2, head="value")


@pytest.mark.parametrize(("batch", "loss_fn", "kwargs", "error", "field", "row", "text"),
                         [case[1:] for case in CASES], ids=[case[0] for case in CASES])  # fmt: skip
async def test_the_error_names_field_row_and_rule_and_the_run_goes_on(
    run: gradwire.TrainingClient,
    batch: Any,
    loss_fn: str,
    kwargs: dict[str, Any],
    error: type[gradwire.GradwireError],
    field: str,
    row: int | None,
    text: str,
) -> None:
    with pytest.raises(error) as caught:
        await run.forward_backward(batch, loss_fn, kwargs)
    assert text in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert caught.value.field == field
    assert caught.value.row == row
    result = await run.forward_backward(GOOD, "causal_lm")
    assert result.num_loss_tokens == 3
    assert (await run.optim_step()).step == 1


async def test_what_is_queued_behind_a_failure_fails_with_its_cause_and_then_the_run_goes_on(
    run: gradwire.TrainingClient,
) -> None:
    good = run.forward_backward(GOOD, "causal_lm")
    bad = run.forward_backward({"input_ids": [[4, 99999]]}, "causal_lm")
    behind, step = run.forward_backward(GOOD, "causal_lm"), run.optim_step()
    next_fb, next_step = run.forward_backward(GOOD, "causal_lm"), run.optim_step()
    outcomes = await asyncio.gather(good, bad, behind, step, next_fb, next_step, return_exceptions=True)
    assert isinstance(outcomes[0], gradwire.LossResult)
    assert isinstance(outcomes[1], gradwire.InvalidBatchError)
    for outcome in outcomes[2:4]:
        assert isinstance(outcome, gradwire.AbortedPredecessorError)
        assert "99999" in str(outcome) or "99999" in str(outcome.__cause__)
    assert isinstance(outcomes[4], gradwire.LossResult)
    assert isinstance(outcomes[5], gradwire.OptimStepResult) and outcomes[5].step == 1


async def test_a_step_with_no_gradient_says_so(run: gradwire.TrainingClient) -> None:
    with pytest.raises(gradwire.NothingToStepError, match="forward_backward"):
        await run.optim_step()
    run.forward_backward(GOOD, "causal_lm")
    run.zero_grad()
    with pytest.raises(gradwire.NothingToStepError):
        await run.optim_step()


async def test_a_batch_of_which_nothing_is_scored_is_no_error_and_says_so(run: gradwire.TrainingClient) -> None:
    result = await run.forward_backward({"input_ids": [[4, 5, 6]], "loss_mask": [[0, 0, 0]]}, "causal_lm")
    assert (result.loss, result.num_loss_tokens) == (0.0, 0)
    assert any("no token of this batch was scored" in sentence for sentence in result.warnings)
    assert not (await run.forward_backward(GOOD, "causal_lm")).warnings


async def test_a_loss_that_needs_a_head_says_how_to_get_one(service: gradwire.ServiceClient) -> None:
    plain = await service.create_run("tiny", lora=2)
    pairs = {"chosen_input_ids": [[4, 5]], "rejected_input_ids": [[4, 6]]}
    with pytest.raises(gradwire.UnsupportedError, match='head="reward"'):
        await plain.forward_backward(pairs, "reward_modeling")
