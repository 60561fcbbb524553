"""Evaluation of a policy on held-out requests, compared with other routers.

``N`` requests, ``M`` modes. Every router below is greedy and is judged by the expected outcome of its choices,
which the synthetic world knows: the figures have no sampling noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gradwire.router.features import Floats
from gradwire.router.policy import LinearPolicy
from gradwire.router.world import Integers, World

NEIGHBOURS = 40
NEIGHBOUR_REQUESTS = 2000
NEIGHBOUR_SEED = 77
BUDGETS = np.linspace(0.0, 1.0, 11)
CALL_TARGETS = (0.5, 0.8)
CHUNK = 512


@dataclass(frozen=True)
class RouterFigures:
    """A router's averages over requests.

    Attributes:
        name: Name of the router.
        reward, quality, cost, latency: Expected values of its choices.
        recovered: Its share of the reward gap between the best single mode and the oracle.
        apgr: Average performance gap recovered over budgets; None for a router that cannot rank requests.
        cpt: By target, the smallest share of strong-model calls that recovers that much of the quality gap.
        pgr: Performance gap recovered at each budget in ``BUDGETS``.
    """

    name: str
    reward: float
    quality: float
    cost: float
    latency: float
    recovered: float
    apgr: float | None = None
    cpt: Mapping[str, float] | None = None
    pgr: tuple[float, ...] = ()


@dataclass(frozen=True)
class Report:
    """Routers on the same held-out requests.

    Attributes:
        routers: The policy first, then the best single mode, the oracle, random and k nearest neighbours.
        weak, strong: The modes between which PGR is measured: the cheapest, and the one of best quality.
        requests: Number of requests.
        shares: By mode, the share of requests that the policy sends there.
        reward_by_seed: The policy's mean reward on each seed's requests.
    """

    routers: tuple[RouterFigures, ...]
    weak: str
    strong: str
    requests: int
    shares: Mapping[str, float]
    reward_by_seed: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class HeldOut:
    """Fixed held-out requests, and the expected outcome of each mode on them.

    Args:
        world: The world of the requests.
        seeds: One set of requests per seed.
        episodes: Requests per seed.
    """

    def __init__(self, world: World, seeds: Sequence[int], episodes: int) -> None:
        self._world, self._seeds = world, len(seeds)
        # The extra word separates these requests from those of a training with the same seed.
        rngs = [np.random.default_rng([int.from_bytes(b"held out", "big"), seed]) for seed in seeds]
        self.x: Floats = np.concatenate([world.draw(rng, episodes) for rng in rngs])
        self.tables = world.expected(self.x)

    def mean_reward(self, policy: LinearPolicy) -> float:
        """Mean reward of the policy's most likely modes.

        Raises:
            ValueError: The policy has other features or modes than the synthetic world.
        """
        self._check(policy)
        return float(self._chosen("reward", policy.act(self.x)[0]).mean())

    def _check(self, policy: LinearPolicy) -> None:
        world = self._world
        if (policy.features.names, policy.modes) != (world.features.names, world.modes):
            raise ValueError(
                "this policy has other features or modes than the synthetic world: evaluate it on logged decisions "
                "(--log)"
            )

    def _chosen(self, table: str, modes: Integers) -> Floats:
        chosen: Floats = self.tables[table][np.arange(len(modes)), modes]
        return chosen

    def report(self, policy: LinearPolicy) -> Report:
        """Compare the policy with the best single mode, the oracle, random and k nearest neighbours."""
        self._check(policy)
        modes, reward = self._world.modes, self.tables["reward"]
        weak = int(self.tables["cost"].mean(0).argmin())
        strong = int(self.tables["quality"].mean(0).argmax())
        single, best = int(reward.mean(0).argmax()), reward.argmax(1)
        floor, ceiling = float(reward[:, single].mean()), float(reward.max(1).mean())
        logits, neighbours = policy.logits(self.x), nearest_neighbours(self._world, self.x)
        quality, noise = self.tables["quality"], np.random.default_rng(NEIGHBOUR_SEED).random(len(self.x))
        choices: list[tuple[str, Integers | None, Floats | None]] = [
            ("policy", logits.argmax(1), logits[:, strong] - logits[:, weak]),
            (f"single: {modes[single]}", np.full(len(self.x), single), None),
            ("oracle", best, quality[:, strong] - quality[:, weak]),
            ("random", None, noise),
            (f"{NEIGHBOURS} neighbours", neighbours.argmax(1), neighbours[:, strong] - neighbours[:, weak]),
        ]
        routers = []
        for name, chosen, scores in choices:
            means = {
                table: float((self.tables[table].mean(1) if chosen is None else self._chosen(table, chosen)).mean())
                for table in ("reward", "quality", "cost", "latency")
            }
            gap = ceiling - floor
            recovered = (means["reward"] - floor) / gap if gap > 0 else 0.0
            routers.append(
                RouterFigures(name, **means, recovered=recovered, **self._ranking(scores, weak, strong))  # type: ignore[arg-type]
            )
        shares = np.bincount(logits.argmax(1), minlength=len(modes)) / len(self.x)
        by_seed = self._chosen("reward", logits.argmax(1)).reshape(self._seeds, -1).mean(1)
        return Report(
            tuple(routers),
            modes[weak],
            modes[strong],
            len(self.x),
            dict(zip(modes, shares.tolist())),
            tuple(by_seed.tolist()),
        )

    def _ranking(self, scores: Floats | None, weak: int, strong: int) -> dict[str, Any]:
        if scores is None or weak == strong:
            return {}
        quality = self.tables["quality"]
        curve = recovered_by_calls(quality[:, weak], quality[:, strong], scores)
        pgr = np.interp(BUDGETS, np.linspace(0.0, 1.0, len(curve)), curve)
        return {
            "apgr": float(np.trapezoid(pgr, BUDGETS)),
            "cpt": {f"{target:.0%}": calls_to_reach(curve, target) for target in CALL_TARGETS},
            "pgr": tuple(pgr.tolist()),
        }


def recovered_by_calls(weak: Floats, strong: Floats, scores: Floats) -> Floats:
    """``[N + 1]``: performance gap recovered (PGR) when the strong model answers 0, 1, ..., N requests.

    Those with the highest scores go to the strong model first; 0 is the weak model's mean quality, 1 the strong one's.
    Ong et al. 2024, arXiv 2406.18665.

    Args:
        weak, strong: ``[N]``, quality of each model's answer.
        scores: ``[N]``, a router's preference for the strong model."""
    gained = np.concatenate([[0.0], (strong - weak)[np.argsort(-scores, kind="stable")].cumsum()])
    total = gained[-1]
    curve: Floats = gained / total if total else np.zeros(len(gained))
    return curve


def calls_to_reach(curve: Floats, target: float) -> float:
    """CPT: smallest share of strong-model calls that recovers ``target`` of the gap; arXiv 2406.18665."""
    return float(np.argmax(curve >= target - 1e-12)) / (len(curve) - 1)


def nearest_neighbours(world: World, x: Floats) -> Floats:
    """``[N, M]``: the mean reward of each mode over the nearest of 2,000 other requests, each answered in every mode.

    It uses every mode's outcome on each request, whereas PPO sees only that of the chosen mode.
    """
    rng = np.random.default_rng([int.from_bytes(b"neighbours", "big"), NEIGHBOUR_SEED])
    known = world.draw(rng, NEIGHBOUR_REQUESTS)
    rewards = np.stack(
        [world.play(known, np.full(len(known), mode), rng).reward for mode in range(len(world.modes))], axis=1
    )
    means = []
    for part in np.array_split(x, -(-len(x) // CHUNK)):
        distances = (part**2).sum(1)[:, None] - 2.0 * part @ known.T + (known**2).sum(1)
        means.append(rewards[np.argpartition(distances, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]].mean(1))
    return np.concatenate(means)
