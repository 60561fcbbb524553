"""Complete episodes of many environments at once, and PPO updates of the router's policy on them, without files.

``E`` environments, ``N`` episodes, ``C`` columns of the policy, ``T`` steps of all episodes one after the other.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.rl.advantages import gae
from gradwire.rl.hicra import HICRACreditAssigner
from gradwire.router.features import Floats
from gradwire.router.policy import LinearPolicy
from gradwire.router.ppo import Adam, MiniBatch, Objective, loss_and_gradients
from gradwire.router.settings import RouterSettings
from gradwire.router.world import Episodes, Integers, World


@dataclass(frozen=True)
class Rollout:
    """Episodes under one policy.

    Attributes:
        episodes: Outcomes of the episodes.
        x: ``[T, C]``, the policy's input at each step.
        starts: ``[N]``, index of each episode's first step: its planner's step, the only one with a decision.
        modes, logprobs: ``[N]``, the decisions and their log-probabilities.
        values: ``[T]``, outputs of the policy's value head.
        rewards: ``[T]``.
    """

    episodes: Episodes
    x: Floats
    starts: Integers
    modes: Integers
    logprobs: Floats
    values: Floats
    rewards: Floats

    @property
    def step_of(self) -> Integers:
        """``[T]``: the index of each step in its episode, from 0."""
        return _steps_within(self.episodes.steps)

    def padded(self, numbers: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """``[T] -> [N, longest]`` and its mask: one row per episode, zeros after its end."""
        steps = self.episodes.steps
        mask = np.arange(steps.max(initial=1)) < steps[:, None]
        rows = np.zeros(mask.shape)
        rows[mask] = numbers
        return rows, mask


def _steps_within(steps: Integers) -> Integers:
    return np.arange(steps.sum()) - np.repeat(steps.cumsum() - steps, steps)


def collect(
    world: World, policy: LinearPolicy, rng: np.random.Generator, environments: int, rollout_length: int
) -> Rollout:
    """Collect episodes until each environment has taken ``rollout_length`` steps; the last episode is completed.

    Each environment draws its next request when its episode ends, so that all are in a planner's step at once: a wave
    of decisions is one matrix product. An environment that has taken its steps leaves the waves.
    """
    taken = np.zeros(environments, dtype=np.int64)
    waves: list[tuple[Floats, Integers, Floats, Episodes]] = []
    while len(active := np.flatnonzero(taken < rollout_length)):
        x = world.draw(rng, len(active))
        seen = policy.features.expand(x)
        modes, logprobs = policy.act(seen, rng)
        episodes = world.play(x, modes, rng)
        taken[active] += episodes.steps
        waves.append((seen, modes, logprobs, episodes))
    return _join(world, policy, waves)


def _join(world: World, policy: LinearPolicy, waves: list[tuple[Floats, Integers, Floats, Episodes]]) -> Rollout:
    requests, modes, logprobs = (np.concatenate([wave[part] for wave in waves]) for part in range(3))
    episodes = Episodes(
        **{name: np.concatenate([getattr(wave[3], name) for wave in waves]) for name in vars(waves[0][3])}
    )
    steps = episodes.steps
    starts = steps.cumsum() - steps
    x = world.at_step(np.repeat(requests, steps, axis=0), _steps_within(steps), np.repeat(steps, steps))
    rewards = np.repeat(episodes.step_reward, steps)
    rewards[starts + steps - 1] += episodes.last_reward
    return Rollout(episodes, x, starts, modes, logprobs, policy.values(x), rewards)


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """Concatenate rollouts under the same policy, in order."""
    if len(rollouts) == 1:
        return rollouts[0]
    episodes = Episodes(
        **{
            name: np.concatenate([getattr(each.episodes, name) for each in rollouts])
            for name in vars(rollouts[0].episodes)
        }
    )
    joined = {
        name: np.concatenate([getattr(each, name) for each in rollouts])
        for name in ("x", "modes", "logprobs", "values", "rewards")
    }
    return Rollout(episodes=episodes, starts=episodes.steps.cumsum() - episodes.steps, **joined)


Figures = dict[str, float | None]
Span = Callable[[str], AbstractContextManager[object]]

SHARD = 256  # environments with their own random numbers: the result does not depend on the number of workers
EARLY_STOP = 1.5  # factor of target_kl
LEARNED = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class PPOTrainer:
    """A policy and its updates.

    Args:
        settings: Settings of the rollout, the trainer and HICRA; the caller checks their switches.
        seed: Seed of all random numbers.
        span: Opens a trace span around a part of an update.

    Attributes:
        policy: The trained policy; initially uniform over modes.
        updates: Number of updates so far.
        skipped: Number of updates without a step because all credits were zero.
    """

    def __init__(self, settings: RouterSettings, seed: int, span: Span = lambda name: nullcontext()) -> None:
        self._settings, self._span = settings, span
        trainer, rollout = settings.trainer, settings.rollout
        self.world = World(rollout.episode_length, trainer.reward_weights.weights())
        features = self.world.features
        self.policy = LinearPolicy(features.with_interactions() if trainer.interactions else features, self.world.modes)
        self._adam = Adam(self.policy, trainer.learning_rate, trainer.max_grad_norm)
        self._objective = Objective(
            trainer.clip_epsilon, trainer.value_clip_epsilon, trainer.value_coef, trainer.entropy_coef
        )
        self._assigner = HICRACreditAssigner(**settings.hicra.model_dump())
        full, rest = divmod(rollout.environments, SHARD)
        self._shards = [SHARD] * full + [rest] * (rest > 0)
        own, *shards = np.random.SeedSequence(seed).spawn(1 + len(self._shards))
        self._rng = np.random.default_rng(own)
        self._shard_rngs = [np.random.default_rng(each) for each in shards]
        self._pool: Executor | None = None
        self.updates = self.skipped = 0
        self._steps = 0
        self._earlier_successes = 0.0

    def close(self) -> None:
        """Stop the worker processes, if there are any."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def update(self) -> Figures:
        """Run one rollout and the PPO steps on it.

        Returns:
            The metrics of the update; those of PPO are None if it was skipped.
        """
        with self._span("rollout"):
            rollout = self._collect()
        self.updates += 1
        self._steps += len(rollout.rewards)
        figures = self._rollout_figures(rollout)
        credits, of_hicra = self._credits(rollout)
        if credits is None:
            self.skipped += 1
            learned: Figures = dict.fromkeys((*LEARNED, "explained_variance"))
            learned |= {"optimizer_steps": 0.0, "stopped_early": 0.0}
        else:
            with self._span("optimise"):
                learned = self._learn(rollout, credits)
        return figures | learned | of_hicra | {"skipped_updates": float(self.skipped)}

    def _collect(self) -> Rollout:
        length, workers = self._settings.rollout.rollout_length, self._settings.rollout.workers
        if workers == 1:
            return concatenate(
                [
                    collect(self.world, self.policy, rng, environments, length)
                    for rng, environments in zip(self._shard_rngs, self._shards)
                ]
            )
        if self._pool is None:
            # Ctrl-C is handled by this process, which stops its workers itself.
            self._pool = ProcessPoolExecutor(
                workers, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
            )
        waiting = [
            self._pool.submit(_collect_there, self.world, self.policy, rng, environments, length)
            for rng, environments in zip(self._shard_rngs, self._shards)
        ]
        done = [each.result() for each in waiting]
        self._shard_rngs = [rng for _, rng in done]
        return concatenate([rollout for rollout, _ in done])

    def _rollout_figures(self, rollout: Rollout) -> Figures:
        episodes = rollout.episodes
        shares = np.bincount(rollout.modes, minlength=len(self.world.modes)) / len(rollout.modes)
        return {
            "update": float(self.updates),
            "steps": float(self._steps),
            "episodes": float(len(episodes.steps)),
            "mean_reward": float(episodes.reward.mean()),
            "success_rate": float(episodes.success.mean()),
            "mean_quality": float(episodes.quality.mean()),
            "mean_cost": float(episodes.cost.mean()),
            "mean_latency": float(episodes.latency.mean()),
            "mean_depth": float(episodes.steps.mean()),
            **{f"share_{mode}": float(share) for mode, share in zip(self.world.modes, shares)},
        }

    def _credits(self, rollout: Rollout) -> tuple[Floats | None, Figures]:
        """Return each step's credit ``[T]``, None if all are zero; and HICRA's metrics."""
        if not self._assigner.enabled:
            return rollout.rewards, {}
        rows, mask = rollout.padded(rollout.rewards)
        credits = self._assigner(rows, mask)[mask]
        figures: Figures = dict(self._assigner.metrics)
        figures["hicra_success_total"] = self._successes
        return (credits if credits.any() else None), figures

    @property
    def _successes(self) -> float:
        """Count trajectories with a positive sum of rewards, including those before a resumption."""
        return self._earlier_successes + self._assigner.metrics.get("hicra_success_total", 0.0)

    def _learn(self, rollout: Rollout, credits: Floats) -> Figures:
        trainer = self._settings.trainer
        advantages, returns = gae(
            credits, rollout.values, rollout.episodes.steps, gamma=trainer.gamma, gae_lambda=trainer.gae_lambda
        )
        spread = float(returns.var())
        explained = 1.0 - float((returns - rollout.values).var()) / spread if spread > 0 else 0.0
        self._adam.learning_rate = self._learning_rate()
        sums = dict.fromkeys(LEARNED, 0.0)
        taken, stopped = 0, False
        for batch in self._mini_batches(rollout, advantages, returns):
            figures, gradients = loss_and_gradients(self.policy, batch, self._objective)
            stopped = trainer.target_kl is not None and figures["approx_kl"] > EARLY_STOP * trainer.target_kl
            if stopped:
                break
            figures["grad_norm"] = self._adam.step(gradients)
            taken += 1
            for name in LEARNED:
                sums[name] += figures[name]
        learned: Figures = {name: total / max(taken, 1) for name, total in sums.items()}
        return learned | {
            "explained_variance": explained,
            "optimizer_steps": float(taken),
            "stopped_early": float(stopped),
        }

    def _learning_rate(self) -> float:
        """Learning rate of this update; constant under the autopilot, whose number of updates is unknown."""
        trainer = self._settings.trainer
        if not trainer.anneal_learning_rate or self._settings.autopilot.enabled:
            return trainer.learning_rate
        return trainer.learning_rate * max(0.0, 1.0 - (self.updates - 1) / trainer.updates)

    def _mini_batches(self, rollout: Rollout, advantages: Floats, returns: Floats) -> Iterator[MiniBatch]:
        """Yield ``epochs`` passes over the steps in a new order each, in parts of about ``mini_batch_size``."""
        trainer, total = self._settings.trainer, len(returns)
        episode_of = np.full(total, -1)
        episode_of[rollout.starts] = np.arange(len(rollout.starts))
        for _ in range(trainer.epochs):
            for rows in np.array_split(self._rng.permutation(total), -(-total // trainer.mini_batch_size)):
                episodes = episode_of[rows]
                decisions = np.flatnonzero(episodes >= 0)
                episodes = episodes[decisions]
                gains = advantages[rollout.starts[episodes]]
                if trainer.normalize_advantages and len(gains) > 1:
                    gains = (gains - gains.mean()) / (gains.std() + 1e-8)
                yield MiniBatch(
                    rollout.x[rows],
                    rollout.values[rows],
                    returns[rows],
                    decisions,
                    rollout.modes[episodes],
                    rollout.logprobs[episodes],
                    gains,
                )

    def state(self) -> dict[str, Any]:
        """Return the state as arrays, from which :meth:`load` continues exactly."""
        numbers = {
            "updates": self.updates,
            "skipped": self.skipped,
            "steps": self._steps,
            "successes": self._successes,
            "rngs": [rng.bit_generator.state for rng in (self._rng, *self._shard_rngs)],
        }
        arrays: dict[str, Any] = {f"policy.{name}": array for name, array in self.policy.parameters.items()}
        arrays |= {f"adam.{name}": array for name, array in self._adam.state().items()}
        return arrays | {"trainer": np.array(json.dumps(numbers))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`."""
        numbers = json.loads(str(state["trainer"]))
        self.updates, self.skipped, self._steps = (numbers[name] for name in ("updates", "skipped", "steps"))
        self._earlier_successes = numbers["successes"]
        for rng, stored in zip((self._rng, *self._shard_rngs), numbers["rngs"]):
            rng.bit_generator.state = stored
        self.policy.parameters = {name: state[f"policy.{name}"] for name in self.policy.parameters}
        self._adam.load({name.removeprefix("adam."): state[name] for name in state if name.startswith("adam.")})


def _collect_there(
    world: World, policy: LinearPolicy, rng: np.random.Generator, environments: int, length: int
) -> tuple[Rollout, np.random.Generator]:
    """Run :func:`collect` in a worker; also returns the random generator's new state."""
    return collect(world, policy, rng, environments, length), rng
