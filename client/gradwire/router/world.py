"""A synthetic world of requests and collaboration modes: arithmetic and seeded random numbers, no live traffic.

``N`` requests, ``F`` features, ``M`` modes. Every law below broadcasts: modes ``[N]`` give one number per request,
modes ``[M]`` with requests ``[N, 1]`` a table.

An episode is one request. Its first step is the planner's: the policy chooses a mode. Each further step is the work of
an agent that the mode calls, without a decision. A mode of ``n`` planned steps of which ``t = min(n, episode_length)``
are taken succeeds with probability

    p = sigmoid(skill[mode, domain] - slope[mode] difficulty - 3 (1 - t / n))

costs ``price (0.5 + length) t / n`` and takes ``seconds (0.5 + length) (1 + 2 load) t / n``, ``load`` being that of the
mode's provider. The answer's graded quality is ``p + p (1 - p) u`` with ``u`` uniform in [-1, 1], so ``p`` on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.router.features import FeatureSpace, Floats

Integers = npt.NDArray[np.int64]

DOMAINS = ("chat", "code", "math", "search")
PROVIDERS = ("small", "large", "tools")
STAGE = ("step", "remaining")
FEATURES = FeatureSpace(
    (
        "length",
        "difficulty",
        *(f"domain={domain}" for domain in DOMAINS),
        "urgency",
        "budget",
        *(f"load_{provider}" for provider in PROVIDERS),
        *STAGE,
    ),
    STAGE,
)
LONGEST = 6
UNFINISHED_PENALTY = 3.0


@dataclass(frozen=True)
class Mode:
    """One way to answer a request.

    Attributes:
        name: Name of the mode.
        steps: Planned steps: the planner's and one per agent it calls.
        provider: Provider whose load slows it down.
        price: Price of a request of average length, in units of the most expensive mode's.
        seconds: Time without load, in units of the slowest mode's.
        slope: Decrease of the success logit with difficulty.
        skill: Logit of success on the easiest request, by domain in the order of ``DOMAINS``.
    """

    name: str
    steps: int
    provider: str
    price: float
    seconds: float
    slope: float
    skill: tuple[float, float, float, float]


MODES = (
    Mode("small", 1, "small", 0.04, 0.06, 5.0, (3.2, 2.0, 1.6, 0.4)),
    Mode("large", 1, "large", 0.30, 0.22, 3.6, (3.6, 3.2, 2.8, 1.0)),
    Mode("review", 2, "small", 0.16, 0.25, 4.2, (3.0, 3.6, 2.2, 0.6)),
    Mode("planner_worker", 3, "large", 0.55, 0.50, 2.6, (2.4, 4.2, 3.0, 1.8)),
    Mode("debate", 4, "large", 0.80, 0.60, 2.2, (2.6, 2.8, 4.4, 1.2)),
    Mode("research", LONGEST, "tools", 0.70, 1.00, 2.4, (2.0, 2.2, 2.0, 4.4)),
)


@dataclass(frozen=True)
class RewardWeights:
    """Weights of the reward: ``reward = quality q + success s - cost c - latency l - depth n``.

    Attributes:
        quality: Weight of the answer's grade in [0, 1].
        cost: Weight of its cost, scaled by ``1.5 - budget`` of the request.
        latency: Weight of its time, scaled by ``0.5 + urgency`` of the request.
        depth: Penalty per step.
        success: Bonus for a right answer.
        zero_when_wrong: A wrong answer earns 0 in every step, whatever it cost.
    """

    quality: float = 1.0
    cost: float = 0.6
    latency: float = 0.4
    depth: float = 0.02
    success: float = 1.0
    zero_when_wrong: bool = False


@dataclass(frozen=True)
class Episodes:
    """Outcomes of ``N`` requests, each answered in one mode.

    Attributes:
        steps: ``[N]``, steps taken, including the planner's.
        step_reward: ``[N]``, reward of every step: quality, cost, latency and depth, in equal parts.
        last_reward: ``[N]``, additional reward of the last step: for success.
        success: ``[N]`` bool.
        quality, cost, latency: ``[N]``.
    """

    steps: Integers
    step_reward: Floats
    last_reward: Floats
    success: npt.NDArray[np.bool_]
    quality: Floats
    cost: Floats
    latency: Floats

    @property
    def reward(self) -> Floats:
        """``[N]``: reward of the whole episode."""
        return self.step_reward * self.steps + self.last_reward


class World:
    """The requests, the modes' laws and the reward.

    Args:
        episode_length: Maximum number of steps of an episode; a mode that plans more stops there, and succeeds less
            often.
        weights: Weights of the reward.

    Raises:
        ValueError: ``episode_length`` is below 1.
    """

    def __init__(self, episode_length: int = LONGEST, weights: RewardWeights | None = None) -> None:
        if episode_length < 1:
            raise ValueError(f"episode_length must be at least 1, got {episode_length}")
        self.features, self.modes = FEATURES, tuple(mode.name for mode in MODES)
        self.weights = weights or RewardWeights()
        planned = np.array([mode.steps for mode in MODES])
        self.steps: Integers = np.minimum(planned, episode_length).astype(np.int64)
        self._done = self.steps / planned
        self._skill = np.array([mode.skill for mode in MODES]) - UNFINISHED_PENALTY * (1.0 - self._done)[:, None]
        self._slope = np.array([mode.slope for mode in MODES])
        self._price = np.array([mode.price for mode in MODES]) * self._done
        self._seconds = np.array([mode.seconds for mode in MODES]) * self._done
        self._provider = np.array([PROVIDERS.index(mode.provider) for mode in MODES])
        column = {name: index for index, name in enumerate(FEATURES.names)}
        self._length, self._difficulty = column["length"], column["difficulty"]
        self._urgency, self._budget = column["urgency"], column["budget"]
        self._domain, self._load = column[f"domain={DOMAINS[0]}"], column[f"load_{PROVIDERS[0]}"]
        self._step, self._remaining = column["step"], column["remaining"]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw new requests, ``[count, F]``; short ones are more frequent than long ones, all else is uniform."""
        x = np.zeros((count, len(FEATURES)))
        x[:, : self._step] = rng.random((count, self._step))
        x[:, self._length] **= 2
        domains = slice(self._domain, self._domain + len(DOMAINS))
        x[:, domains] = 0.0
        x[np.arange(count), self._domain + rng.integers(len(DOMAINS), size=count)] = 1.0
        return x

    def laws(self, x: Floats, modes: Integers) -> tuple[Floats, Floats, Floats]:
        """Compute the probability of success, cost and latency.

        Args:
            x: ``[N, F]``.
            modes: ``[N]``, one per request; or ``[N, M]``, several.
        """

        def of_request(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return numbers if modes.ndim == 1 else numbers[:, None]

        domain = of_request(x[:, self._domain : self._domain + len(DOMAINS)].argmax(1))
        logit = self._skill[modes, domain] - self._slope[modes] * of_request(x[:, self._difficulty])
        size = 0.5 + of_request(x[:, self._length])
        load = x[of_request(np.arange(len(x))), self._load + self._provider[modes]]
        return 1.0 / (1.0 + np.exp(-logit)), self._price[modes] * size, self._seconds[modes] * size * (1.0 + 2.0 * load)

    def _paid(self, x: Floats, modes: Integers, quality: Floats, cost: Floats, latency: Floats) -> Floats:
        """Reward of the episode without its success term, with the shape of ``modes``."""
        weights = self.weights
        dear, urgent = 1.5 - x[:, self._budget], 0.5 + x[:, self._urgency]
        if modes.ndim == 2:
            dear, urgent = dear[:, None], urgent[:, None]
        result: Floats = (
            weights.quality * quality
            - weights.cost * cost * dear
            - weights.latency * latency * urgent
            - weights.depth * self.steps[modes]
        )
        return result

    def play(self, x: Floats, modes: Integers, rng: np.random.Generator) -> Episodes:
        """Answer each request ``[N, F]`` in its mode ``[N]``."""
        return self.outcome(x, modes, rng.random((2, len(x))))

    def outcome(self, x: Floats, modes: Integers, luck: Floats) -> Episodes:
        """Like :meth:`play`, with ``luck [2, N]`` uniform in [0, 1): the first row decides success, the second the
        grade."""
        chance, cost, latency = self.laws(x, modes)
        success = luck[0] < chance
        quality = chance + chance * (1.0 - chance) * (2.0 * luck[1] - 1.0)
        steps = self.steps[modes]
        each = self._paid(x, modes, quality, cost, latency) / steps
        last = self.weights.success * success
        if self.weights.zero_when_wrong:
            each = each * success
        return Episodes(steps, each, last, success, quality, cost, latency)

    def expected(self, x: Floats) -> Mapping[str, Floats]:
        """Expected ``reward``, ``quality``, ``cost`` and ``latency`` of every mode, each ``[N, M]``."""
        modes = np.broadcast_to(np.arange(len(self.modes)), (len(x), len(self.modes)))
        chance, cost, latency = self.laws(x, modes)
        paid = self._paid(x, modes, chance, cost, latency)
        reward = (chance * paid if self.weights.zero_when_wrong else paid) + self.weights.success * chance
        return {"reward": reward, "quality": chance, "cost": cost, "latency": latency}

    def at_step(self, x: Floats, step: npt.ArrayLike, steps: npt.ArrayLike) -> Floats:
        """Set the stage columns of ``x`` for a step; at step 0 the mode is not yet known.

        Args:
            x: ``[N, F]``; changed in place.
            step: ``[N]``, from 0.
            steps: ``[N]``, of the episode.
        """
        step, steps = np.asarray(step), np.asarray(steps)
        x[:, self._step] = step / LONGEST
        x[:, self._remaining] = np.where(step > 0, (steps - step) / LONGEST, 0.0)
        return x
