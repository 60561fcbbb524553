"""PPO's documented bounds as hints in results, and the learning rate of steps that are given none."""

from __future__ import annotations

import re
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire_proto import rates
from support.batches import VOCAB, causal_lm

ROWS = np.random.default_rng(0).integers(5, VOCAB, (4, 11))
KWARGS = {"whiten_advantages": False}
FIRST_STEPS = 5


def hints(result: gradwire.LossResult) -> dict[tuple[str, str], str]:
    """``(metric, side and bound) -> advice`` of the hints; alarms have wider bounds."""
    bounds = {"kl_divergence": "most 0.05", "clip_fraction": "most 0.3|least 0.1", "explained_variance": "least 0.5"}
    bounds["advantage_std"] = "most 2|least 0.5"
    found = {}
    for warning in result.warnings:
        for metric, sides in bounds.items():
            if told := re.match(rf"{metric} is \S+, usually at ({sides}): (.*)", warning):
                found[metric, told[1]] = told[2]
    return found


def batch(logprobs: list[Any], moved: float, scale: float) -> dict[str, Any]:
    """A batch whose writer gave tokens a log-probability that is lower by ``moved``, with rewards of this size."""
    old = np.zeros(ROWS.shape, np.float32)
    old[:, 1:] = np.stack(logprobs) - moved
    rewards = scale * np.random.default_rng(1).normal(size=ROWS.shape)
    return {"input_ids": ROWS, "old_log_probs": old, "rewards": rewards}


async def test_hints_come_after_the_first_steps_once_a_spell_and_name_the_setting(
    service: gradwire.ServiceClient,
) -> None:
    run = await service.create_run("tiny", head="value")
    logprobs = await run.compute_logprobs(ROWS.tolist())

    async def step(moved: float, scale: float) -> dict[tuple[str, str], str]:
        result = await run.forward_backward(batch(logprobs, moved, scale), "enhanced_ppo", KWARGS)
        await run.optim_step(learning_rate=0.0)
        return hints(result)

    for _ in range(FIRST_STEPS):
        assert await step(2.0, 10.0) == {}
    told = await step(2.0, 10.0)
    assert set(told) == {
        ("kl_divergence", "most 0.05"),
        ("clip_fraction", "most 0.3"),
        ("explained_variance", "least 0.5"),
        ("advantage_std", "most 2"),
    }
    assert "learning_rate" in told["clip_fraction", "most 0.3"]
    assert "learning_rate" in told["kl_divergence", "most 0.05"] and "beta" in told["kl_divergence", "most 0.05"]
    assert "value_loss_coef" in told["explained_variance", "least 0.5"]
    assert "whiten_advantages" in told["advantage_std", "most 2"]
    assert await step(2.0, 10.0) == {}
    low = await step(0.01, 0.01)  # hardly moved, and hardly rewarded
    assert set(low) == {("clip_fraction", "least 0.1"), ("advantage_std", "least 0.5")}
    assert "clip_epsilon" in low["clip_fraction", "least 0.1"]
    again = await step(2.0, 10.0)  # another spell, but the critic explained nothing all along
    assert set(again) == set(told) - {("explained_variance", "least 0.5")}
    await service.delete_run(run.run_id)


@pytest.mark.parametrize(
    ("settings", "learned"),
    [({"head": "value"}, "policy"), ({"kind": "rl"}, "policy"), ({}, "answers"), ({"head": "reward"}, "scores")],
    ids=["value", "rl", "plain", "reward"],
)
async def test_steps_without_a_rate_take_that_of_what_the_run_learns(
    service: gradwire.ServiceClient, rng: np.random.Generator, settings: dict[str, Any], learned: rates.Learned
) -> None:
    [model] = await service.list_models()
    rate = rates.learning_rate(learned, model.hidden_size, adapter=False)
    rows, after = causal_lm(rng, 4, VOCAB), []
    for given in (None, rate):
        run = await service.create_run("tiny", seed=1, **settings)
        await run.forward_backward(rows, "causal_lm")
        assert (await run.optim_step(given)).learning_rate == rate
        after.append(np.concatenate(await run.compute_logprobs(rows)))
        await service.delete_run(run.run_id)
    np.testing.assert_array_equal(*after)
