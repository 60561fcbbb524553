"""Algorithms over a stand-in for the run: what they begin with, and the batches that they send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradwire
import pytest
from gradwire.rl import (
    AlgorithmConfig,
    GiGPOAlgorithm,
    GramCluster,
    GRPOAlgorithm,
    HICRAAlgorithm,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    StrategicGrams,
    reward_function,
)
from support.checking_run import ALGORITHMS, CheckingRun, Doors, arrived, collected, config, walk

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


@pytest.mark.parametrize("forget", [False, True], ids=["one row", "several rows"])
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_batches_are_what_the_losses_take(name: str, forget: bool, rule_inference: Callable[..., Any]) -> None:
    kind, head, loss = ALGORITHMS[name]
    run = CheckingRun(head)
    settings = config(ppo_epochs=2, num_minibatches=2, temperature=0.8)
    algorithm = kind(None, run, ["a"], arrived, settings, environment=Doors(forget), inference=rule_inference(walk))
    history = await algorithm.train(2, progress_bar=False)
    assert run.steps == 8
    assert {each[0] for each in run.batches} == {loss}
    assert all(each[1]["temperature"] == 0.8 for each in run.batches)
    written = sum(len(step.response_ids) for step in (await collected(algorithm))[0].steps)
    assert written > 0
    assert [metrics["train/trajectories"] for metrics in history] == [8, 8]
    assert all(0 <= metrics["rewards/reward"] <= 1 for metrics in history)
    # Each pass sees every token that the policy wrote once.
    assert history[0]["train/tokens"] == 2 * history[0]["rollouts/avg_tokens"] * 8


async def test_ppo_needs_its_critic(rule_inference: Callable[..., Any]) -> None:
    algorithm = PPOAlgorithm(None, CheckingRun(), ["a"], arrived, config(), inference=rule_inference(walk))
    with pytest.raises(
        ValueError, match=r'needs a run made with create_run\(..., head="value"\); this run has no head'
    ):
        await algorithm.train(1, progress_bar=False)


async def test_messages_are_prompts_too(rule_inference: Callable[..., Any]) -> None:
    inference = rule_inference(walk)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "left or right?"}]
    algorithm = GRPOAlgorithm(None, CheckingRun(), [messages], len_of, config(batch_size=1), inference=inference)
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert metrics["train/trajectories"] == 4
    assert set(inference.prompts) == {"system: Be brief.\nuser: left or right?\nassistant: "}


def len_of(response: str) -> int:
    return len(response)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tasks": "a"}, "tasks is one str; give a list of prompts"),
        ({"tasks": [3]}, "a task is a prompt .* got 3"),
        ({"tasks": []}, "there are no tasks"),
        ({"reward": 3}, "the reward is int; it must be a function, a scorer"),
        ({"reward": lambda answer: 1.0}, "has a parameter 'answer' that is unknown"),
        ({"run": None}, "run is NoneType; it must be a TrainingClient, as returned by `await service.create_run"),
        ({"inference": None}, "pass a service or an inference module"),
        ({"config": config(eval_every=1)}, "eval_every needs held-out tasks"),
        ({"run": object.__new__(gradwire.sync.TrainingClient)}, r"the run comes from gradwire.sync.*asyncio.run\(\)"),
        ({"config": config(group_size=1)}, "compares within a group: set group_size to at least 2"),
    ],
)
async def test_what_an_algorithm_cannot_begin_with(
    changes: dict[str, Any], error: str, rule_inference: Callable[..., Any]
) -> None:
    given = {"run": CheckingRun(), "tasks": ["a"], "reward": arrived, "config": config()}
    given |= {"inference": rule_inference(walk)} | changes
    with pytest.raises((TypeError, ValueError), match=error):
        REINFORCEAlgorithm(None, **given)


@pytest.mark.parametrize("algorithm", [GRPOAlgorithm, GiGPOAlgorithm])
async def test_what_compares_within_a_group_needs_one(algorithm: Any, rule_inference: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="compares within a group: set group_size to at least 2"):
        algorithm(None, CheckingRun(), ["a"], arrived, config(group_size=1), inference=rule_inference(walk))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_staleness": -1}, "max_staleness must not be negative"),
        ({"save_every": 1}, "save_every needs a checkpoint_dir"),
        ({"on_failure": "ignore"}, 'on_failure must be "stop" or "warn", got .ignore.'),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"reference_ema": 2.0}, "from 0 to 1; got 2.0"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        AlgorithmConfig(**changes)


async def test_hicra_marks_the_tokens_of_strategic_grams(rule_inference: Callable[..., Any]) -> None:
    grams = StrategicGrams((GramCluster(("let me see",), 4),))
    inference = rule_inference(lambda text, n: "let me see: 4" if n % 2 else "it is 5")
    run = CheckingRun()
    config = AlgorithmConfig(batch_size=3, group_size=4)
    algorithm = HICRAAlgorithm(None, run, ["a?", "b?", "c?"], is_four, config, grams=grams, inference=inference)
    [metrics] = await algorithm.train(1, progress_bar=False)
    [(loss, kwargs, batch)] = run.batches
    assert loss == "grpo" and kwargs["scale_rewards"] is False
    marked, lengths = batch["planning_mask"].tolist(), batch.row_lengths.tolist()
    expected = []
    for reward, length in zip(batch["rewards"].tolist(), lengths):
        expected += [reward == 1 and at in (0, 1, 2, 4, 5, 7, 8, 9) for at in range(length)]
    assert marked == expected and any(marked) and not all(marked)
    assert metrics["train/planning_fraction"] == pytest.approx(sum(expected) / sum(lengths))


@reward_function
def is_four(response: str) -> float:
    return float(response.endswith("4"))
