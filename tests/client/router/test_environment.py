"""The synthetic world, its Gymnasium face and the rollouts."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire.router import LinearPolicy, RouterEnvironment
from gradwire.router.trainer import collect, concatenate
from gradwire.router.world import MODES, RewardWeights, World
from gymnasium.utils.env_checker import check_env


@pytest.mark.filterwarnings("ignore:.*alternative render modes.*")
@pytest.mark.parametrize("episode_length", [1, 3, 6])
def test_gymnasium_accepts_it(episode_length: int) -> None:
    check_env(RouterEnvironment(episode_length))


def test_an_episode_is_the_planners_step_and_its_agents() -> None:
    environment = RouterEnvironment()
    for action, mode in enumerate(MODES):
        _, info = environment.reset(seed=action)
        assert info["action_mask"].all()
        rewards, over = [], False
        while not over:
            observation, reward, over, truncated, info = environment.step(np.int64(action if not rewards else 0))
            rewards.append(reward)
            assert not truncated
            assert info["action_mask"].tolist() == [column == action for column in range(len(MODES))]
            assert environment.observation_space.contains(observation)
        assert len(rewards) == mode.steps
        assert info["mode"] == mode.name
        with pytest.raises(RuntimeError, match="call reset"):
            environment.step(np.int64(0))


def test_a_seed_decides_an_episode() -> None:
    def play(seed: int) -> list[float]:
        environment = RouterEnvironment()
        environment.reset(seed=seed)
        return [environment.step(np.int64(4))[1] for _ in range(4)]

    assert play(3) == play(3) != play(4)


@pytest.mark.parametrize("zero_when_wrong", [False, True])
@pytest.mark.parametrize("episode_length", [2, 6])
def test_expected_rewards_are_the_mean_of_played_ones(episode_length: int, zero_when_wrong: bool) -> None:
    world = World(episode_length, RewardWeights(0.7, 0.5, 0.3, 0.1, 1.3, zero_when_wrong))
    rng = np.random.default_rng(0)
    request = world.draw(rng, 1)
    for mode in range(len(MODES)):
        played = world.play(np.repeat(request, 60_000, axis=0), np.full(60_000, mode), rng)
        error = played.reward.std() / np.sqrt(60_000)
        assert abs(played.reward.mean() - world.expected(request)["reward"][0, mode]) < 4.5 * error
        assert (played.steps == min(MODES[mode].steps, episode_length)).all()
        if zero_when_wrong:
            assert (played.reward[~played.success] == 0).all()


def test_a_mode_that_is_cut_short_succeeds_less() -> None:
    request = World().draw(np.random.default_rng(0), 50)
    whole, cut = (World(length).expected(request)["quality"] for length in (6, 2))
    assert (whole[:, :3] == cut[:, :3]).all()  # these need two steps at most
    assert (whole[:, 3:] > cut[:, 3:]).all()


def test_rollouts_are_whole_episodes_of_the_environment() -> None:
    world = World(4)
    policy = LinearPolicy(world.features, world.modes)
    rollout = collect(world, policy, np.random.default_rng(0), environments=50, rollout_length=8)
    steps = rollout.episodes.steps
    assert 50 * 8 <= steps.sum() == len(rollout.x) < 50 * (8 + 4)
    rows, mask = rollout.padded(rollout.rewards)
    assert mask.sum(1).tolist() == steps.tolist()
    assert rows.sum(1) == pytest.approx(rollout.episodes.reward)
    assert (rows[~mask] == 0).all()
    assert rollout.values.shape == rollout.rewards.shape
    environment = RouterEnvironment(4)
    for episode in np.flatnonzero(steps > 2)[:20]:
        start = rollout.starts[episode]
        observation, _ = environment.reset(options={"features": rollout.x[start]})
        for step in range(steps[episode]):
            assert observation == pytest.approx(rollout.x[start + step], abs=1e-6)
            observation, *_ = environment.step(np.int64(rollout.modes[episode]))


def test_joined_rollouts_keep_every_episode() -> None:
    world = World()
    policy = LinearPolicy(world.features, world.modes)
    parts = [collect(world, policy, np.random.default_rng(seed), 3, 5) for seed in range(3)]
    whole = concatenate(parts)
    assert whole.x[whole.starts].tolist() == np.concatenate([part.x[part.starts] for part in parts]).tolist()
    assert whole.episodes.reward.sum() == pytest.approx(sum(part.episodes.reward.sum() for part in parts))
