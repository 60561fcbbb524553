"""The pitfalls that need a model to show: padding, shifts, the end token, and what a reference is. Through the door.

Those of the losses by themselves: ``tests/losses/test_pitfalls.py``, which lists where each one is tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch

END = 2  # which pads, too
ROWS = [[5, 9, 11, 30, END], [40, 41], [7], [12, 33, 8, END]]


def padded(side: str) -> dict[str, np.ndarray]:
    """The rows in one array, padded with the end token on one side."""
    width = max(map(len, ROWS)) + 1
    ids, mask = np.full((len(ROWS), width), END), np.zeros((len(ROWS), width), dtype=np.int64)
    for place, row in enumerate(ROWS):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[place, where], mask[place, where] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


async def test_a_token_has_the_probability_that_the_tokens_before_it_give(
    service: gradwire.ServiceClient, tiny_model_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    run = await service.create_run("tiny")
    for row, found in zip(ROWS, await run.compute_logprobs(ROWS), strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        expected = [log_p[t - 1, row[t]].item() for t in range(1, len(row))]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    await service.delete_run(run.run_id)


async def test_left_and_right_padding_give_what_no_padding_gives(service: gradwire.ServiceClient) -> None:
    """Loss and gradient, packed or not: positions are those of the row, not of the array."""
    figures = []
    batches: list[dict[str, Any]] = [{"input_ids": ROWS}, padded("left"), padded("right")]
    for batch in batches:
        run = await service.create_run("tiny", lora={"rank": 4}, seed=3)
        result = await run.forward_backward(batch, "causal_lm")
        step = await run.optim_step(learning_rate=1e-3)
        figures.append((result.loss, result.metrics["num_tokens"], step.grad_norm))
        await service.delete_run(run.run_id)
    assert figures[0] == figures[1] == figures[2]
    assert figures[0][1] == sum(len(row) - 1 for row in ROWS)


async def test_a_reward_is_read_at_the_last_real_token_though_the_end_token_pads(
    service: gradwire.ServiceClient,
) -> None:
    """A search for the first padding token would stop before a row's own end, or find none at all."""
    run = await service.create_run("tiny", head="reward", seed=3)
    for _ in range(2):  # a fresh head may give 0 everywhere
        run.forward_backward({"chosen_input_ids": [[5, END]], "rejected_input_ids": [[5]]}, "reward_modeling")
        await run.optim_step(learning_rate=1e-2)
    expected = await run.compute_rewards(ROWS)
    for side in ("left", "right"):
        np.testing.assert_allclose(await run.compute_rewards(padded(side)), expected, rtol=1e-5)
    cut = await run.compute_rewards([row[:-1] if row[-1] == END else row for row in ROWS])
    assert (np.abs(expected - cut) > 1e-4).tolist() == [True, False, False, True]
    await service.delete_run(run.run_id)


async def test_a_reference_has_no_dropout_and_no_adapter(service: gradwire.ServiceClient) -> None:
    plain = await service.create_run("tiny")
    base = np.concatenate(await plain.compute_logprobs(ROWS))
    run = await service.create_run("tiny", lora={"rank": 4, "dropout": 0.5}, seed=3)
    batch: dict[str, Any] = {"input_ids": ROWS, "old_log_probs": [[0.0] * len(row) for row in ROWS]}
    batch["rewards"] = [1.0] * len(ROWS)
    for _ in range(3):
        run.forward_backward({"input_ids": ROWS}, "causal_lm")
        await run.optim_step(learning_rate=3e-2)
    trained = np.concatenate(await run.compute_logprobs(ROWS))
    assert np.abs(trained - base).max() > 1e-2
    kwargs = {"reference_model": "base"}
    found = (await run.forward(batch, "reinforce_plus_plus", kwargs)).metrics["kl_divergence"]
    difference = (trained - base).astype(np.float64)
    assert found == pytest.approx(float((np.exp(-difference) - 1 + difference).mean()), rel=1e-4)
    for one in (plain, run):
        await service.delete_run(one.run_id)
