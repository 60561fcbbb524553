"""Masks say what is scored, padding is dropped, and nothing else leaves a row's context."""

from __future__ import annotations

from typing import Any

import gradwire
import numpy as np
import pytest
from transformers import AutoConfig

GRPO = {"reference_model": "base", "beta": 0.1}


@pytest.fixture
def pad(tiny_model_path: Any) -> int:
    return int(AutoConfig.from_pretrained(tiny_model_path).pad_token_id)


async def trained(service: gradwire.ServiceClient, batch: dict[str, Any]) -> tuple[gradwire.LossResult, float]:
    """A step on a fresh run: the loss's result and the gradient's norm."""
    run = await service.create_run("tiny", lora={"rank": 4}, seed=3)
    run.forward_backward({"input_ids": [[5, 6, 7, 8]]}, "causal_lm")
    await run.optim_step(learning_rate=1e-2)  # away from the reference
    result = await run.forward_backward(batch, "grpo", GRPO, outputs=("logprobs",))
    norm = (await run.optim_step(learning_rate=1e-3)).grad_norm
    await service.delete_run(run.run_id)
    return result, norm


@pytest.mark.parametrize("side", ["left", "right"])
async def test_grpos_documented_batch_trains_on_no_pad_token(
    service: gradwire.ServiceClient, rng: np.random.Generator, pad: int, side: str
) -> None:
    """``prompt_ids`` padded and without a mask of their own, ``response_ids`` with ``response_masks``."""
    prompts = [[20, 21, 22, 23, 24], [30, 31], [40, 41, 42]]
    responses = rng.integers(5, 60, (3, 2, 6))
    lengths = np.array([[6, 2], [3, 5], [1, 4]])
    masks = (np.arange(6) < lengths[..., None]).astype(np.int64)
    rewards = np.array([[1.0, 0.0], [0.5, 2.0], [0.0, 1.0]])
    prompt_ids = np.full((3, 5), pad)
    for row, prompt in zip(prompt_ids, prompts):
        row[slice(5 - len(prompt), 5) if side == "left" else slice(len(prompt))] = prompt
    documented = {
        "prompt_ids": prompt_ids,
        "response_ids": np.where(masks == 1, responses, pad),
        "rewards": rewards,
        "response_masks": masks,
    }
    ragged = {
        "prompt_ids": prompts,
        "response_ids": [[responses[b, n, : lengths[b, n]].tolist() for n in range(2)] for b in range(3)],
        "rewards": rewards.tolist(),
    }
    (found, norm), (expected, expected_norm) = await trained(service, documented), await trained(service, ragged)
    assert found.num_tokens == expected.num_tokens == 2 * sum(map(len, prompts)) + lengths.sum()
    assert found.num_loss_tokens == lengths.sum()
    for ours, theirs in zip(found.outputs["logprobs"], expected.outputs["logprobs"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert dict(found.metrics) == pytest.approx(dict(expected.metrics), rel=0, abs=0, nan_ok=True)
    assert norm == expected_norm > 0
    assert not any("prompt_ids" in warning for warning in found.warnings)

    other = dict(documented, prompt_ids=np.where(prompt_ids == pad, 2, prompt_ids))  # the end token as filler
    result, _ = await trained(service, other)
    told = [warning for warning in result.warnings if warning.startswith("prompt_ids: ")]
    assert len(told) == 1 and "runs of token 2" in told[0] and result.num_tokens > found.num_tokens


async def test_a_mask_says_what_is_scored_and_drops_no_context(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny", lora=2)
    prompt, response = [5, 9, 11], [20, 21, 22, 23]
    [expected] = await run.compute_logprobs([prompt + response])
    expected = expected[len(prompt) - 1 :]  # of the response's tokens
    for mask in ([1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0]):
        scored = [one for one, there in zip(expected, mask) if there]
        plain = {"input_ids": [prompt + response], "loss_mask": [[0] * len(prompt) + mask]}
        grouped = {"prompt_ids": [prompt], "response_ids": [[response]], "response_masks": [[mask]], "rewards": [[1.0]]}
        row = await run.forward(plain, "causal_lm", outputs=("logprobs",))
        group = await run.forward(grouped, "grpo", outputs=("logprobs",))
        assert row.num_tokens == len(prompt + response)
        np.testing.assert_allclose(row.outputs["logprobs"][0], scored, rtol=1e-5)
        np.testing.assert_allclose(group.outputs["logprobs"][0], scored, rtol=1e-5)
    await service.delete_run(run.run_id)
