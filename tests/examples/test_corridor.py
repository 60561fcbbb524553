"""The reward of the GiGPO example."""

from __future__ import annotations

import gigpo_ppo_training
import pytest


@pytest.mark.parametrize(("last", "score", "rewards"), [("", 0.0, [0.3, 0.0]), ("open", 1.0, [0.3, 1.0])])
def test_an_episode_that_fails_is_scored_too(last: str, score: float, rewards: list[float]) -> None:
    """A failing episode ends with an empty observation after a move."""
    steps = [{"observation": "112"}, {"observation": "1k2"}]
    result = gigpo_ppo_training.opened.__reward_function__([{"role": "user", "content": last}], steps)
    assert result.score == score
    assert [each.base_reward for each in result.step_outputs] == rewards
