"""Simulated A/B tests, with a look at the comparison after every rating.

``python tests/support/ab_tests.py [SIMULATIONS]`` prints what becomes of each scenario.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gradwire_feedback.statistics.user_effects import BLOCK, MIN_USERS, Scores, boundary

ALPHA = 0.05


@dataclass(frozen=True)
class Scenario:
    """Users who give several scores each, in random order.

    Attributes:
        users, answers: How many users, and answers of each.
        spread: Standard deviation of the users' means.
        drift: The mean moves from 0.4 to 0.6.
        ramp: The versions other than the first have a tenth of the users for two fifths of the time, then equal shares.
        versions: How many.
        effect: What the last version adds to each score.
        binary: Scores of 0 and 1 instead of five grades.
    """

    users: int
    answers: int
    spread: float = 0.0
    drift: bool = False
    ramp: bool = False
    versions: int = 2
    effect: float = 0.0
    binary: bool = False

    def draw(self, rng: np.random.Generator) -> Scores:
        count = self.users * self.answers
        users = rng.permutation(np.repeat(np.arange(self.users), self.answers))
        time = np.arange(count) / count
        early = (time < 0.4) & self.ramp
        place = rng.random(self.users)[users]
        others = self.versions - 1
        versions = np.where(
            early, np.where(place < 0.1, 1 + np.floor(place * 10 * others), 0), np.floor(place * self.versions)
        ).astype(np.int64)
        mean = 0.5 + (0.2 * (time - 0.5) if self.drift else 0.0) + rng.normal(0, self.spread, self.users)[users]
        mean = mean + self.effect * (versions == others)
        if self.binary:
            values = (rng.random(count) < np.clip(mean, 0, 1)).astype(np.float64)
        else:
            values = np.round(4 * np.clip(rng.normal(mean, 0.25), 0, 1)) / 4
        return Scores(values, users, versions, np.where(early, 0, 1).astype(np.int64))


def looks(scores: Scores, baseline: int, other: int, alpha: float) -> Iterator[tuple[int, float, float]]:
    """The number of answers, the difference and the interval's half width, after every answer of the two versions.

    The same as difference_interval of the answers until then, from sums that are kept between the looks.
    """
    pair = scores.only(baseline, other)
    values, users, deployments = pair.values, pair.users, pair.deployments
    treated = (pair.versions == other).astype(np.float64)
    size = int(users.max(initial=0)) + 1
    products, squares, start = np.zeros(size), np.zeros(size), 0
    given, sums, sums2 = np.zeros((2, size)), np.zeros(2), np.zeros(2)
    for end in range(1, len(values) + 1):
        side, user = int(treated[end - 1]), users[end - 1]
        if end - 1 - start == BLOCK or deployments[end - 1] != deployments[start]:
            done = slice(start, end - 1)
            centred, about = values[done] - values[done].mean(), treated[done] - treated[done].mean()
            products += np.bincount(users[done], centred * about, size)
            squares += np.bincount(users[done], about * about, size)
            start = end - 1
        sums[side] += 1
        sums2[side] += 2 * given[side, user] + 1
        given[side, user] += 1
        if min(sums) == 0 or min(sums**2 / np.maximum(sums2, 1)) < MIN_USERS:
            continue
        now = slice(start, end)
        centred, about = values[now] - values[now].mean(), treated[now] - treated[now].mean()
        product = products + np.bincount(users[now], centred * about, size)
        square = squares + np.bincount(users[now], about * about, size)
        weight = square.sum()
        difference = product.sum() / weight
        parts = (product - difference * square) / np.maximum(1 - square / weight, 1e-2)
        yield end, difference, boundary(float(parts @ parts), alpha) / weight


@dataclass(frozen=True)
class Outcome:
    """What became of simulated tests.

    Attributes:
        settled: Share in which some difference was ever settled.
        missed: Share in which an interval ever missed its effect.
        answers: Median number of answers of the two versions when a difference was found; infinite if never in half.
    """

    settled: float
    missed: float
    answers: float


def simulate(scenario: Scenario, simulations: int, seed: int = 0) -> Outcome:
    rng = np.random.default_rng(seed)
    settled, missed, answers = 0, 0, []
    for _ in range(simulations):
        scores = scenario.draw(rng)
        found, wrong = math.inf, False
        for other in range(1, scenario.versions):
            effect = scenario.effect * (other == scenario.versions - 1)
            for end, difference, radius in looks(scores, 0, other, ALPHA / (scenario.versions - 1)):
                wrong |= abs(difference - effect) > radius
                if abs(difference) > radius:
                    found = min(found, end)
                    if scenario.effect:
                        break
        settled += found < math.inf
        missed += wrong
        answers.append(found)
    return Outcome(settled / simulations, missed / simulations, float(np.median(answers)))


EQUAL = (
    Scenario(1000, 1),
    Scenario(1000, 1, drift=True, ramp=True),
    Scenario(100, 20, spread=0.2),
    Scenario(100, 20, spread=0.2, drift=True),
    Scenario(100, 20, spread=0.2, ramp=True),
    Scenario(100, 20, spread=0.2, drift=True, ramp=True),
    Scenario(100, 20, spread=0.2, drift=True, ramp=True, binary=True),
    Scenario(50, 40, spread=0.2),
    Scenario(50, 40, spread=0.2, drift=True, ramp=True),
    Scenario(400, 5, spread=0.2, drift=True, versions=3),
    Scenario(500, 4, spread=0.1, drift=True, ramp=True, versions=5),
)
DIFFERENT = (
    Scenario(4000, 1, effect=0.05),
    Scenario(1000, 1, effect=0.1),
    Scenario(2000, 2, spread=0.1, drift=True, effect=0.05),
    Scenario(1000, 2, spread=0.1, drift=True, effect=0.1),
    Scenario(400, 10, spread=0.2, effect=0.1),
)


def main() -> None:
    simulations = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for scenario in EQUAL + DIFFERENT:
        print(scenario, simulate(scenario, simulations if not scenario.effect else simulations // 5), flush=True)


if __name__ == "__main__":
    main()
