"""Simulated A/B tests, many at once, with a look at the comparison after every rating.

``python tests/support/ab_tests.py [SIMULATIONS]`` prints the first table of benchmarks/measurements.md.

Letters in comments: S simulations, U users.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gradwire_feedback.statistics.user_effects import BLOCK, MIN_USERS, Scores, boundaries
from numpy.typing import NDArray

ALPHA = 0.05
FIXED_Z = 1.96
"""Of a test of the same size that looks once, at a number of answers fixed before."""
POWER = 0.8
CHUNK = 40_000
"""Simulations at once times users, so that their arrays stay in the cache."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Scenario:
    """Users who give several scores each, in random order.

    Attributes:
        users, answers: How many users, and answers of each.
        spread: Standard deviation of the users' means.
        drift: The mean moves from 0.4 to 0.6.
        ramp: The versions other than the first have a tenth of the users for two fifths of the time, then equal shares.
        versions: How many.
        effect: What the last version adds to each score; scores are then not grades, whose ends would shrink it.
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

    def __str__(self) -> str:
        words = [f"{self.users} x {self.answers}", f"spread {self.spread}", f"{self.versions} versions"]
        words += [word for word in ("drift", "ramp", "binary") if getattr(self, word)]
        return ", ".join(words + ([f"effect {self.effect}"] if self.effect else []))

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
        elif self.effect:
            values = rng.normal(mean, 0.25)
        else:
            values = np.round(4 * np.clip(rng.normal(mean, 0.25), 0, 1)) / 4
        return Scores(values, users, versions, np.where(early, 0, 1).astype(np.int64))


@dataclass(frozen=True)
class Look:
    """The comparisons after one more answer; arrays are [S].

    Attributes:
        answers: Answers of the two versions until then.
        enough: Whether both versions have enough users; the rest is not meaningful before.
        difference: The estimated difference.
        error: Its standard error.
        radius: Half the width of its interval.
    """

    answers: Ints
    enough: NDArray[np.bool_]
    difference: Floats
    error: Floats
    radius: Floats


def looks(drawn: list[Scores], baseline: int, other: int, alpha: float) -> Iterator[Look]:
    """The comparisons of simulations with equally many users and answers, after every answer.

    The same as difference_interval of the answers until then, from sums by user that are kept between the looks.
    """
    sims, size = np.arange(len(drawn)), int(max(each.users.max() for each in drawn)) + 1
    values, users, versions, deployments = (
        np.stack([getattr(each, name) for each in drawn]) for name in ("values", "users", "versions", "deployments")
    )
    done_products, done_squares = np.zeros((2, len(drawn), size))  # [S, U], of the blocks that are full
    sums, counts, treated = np.zeros((3, len(drawn), size))  # [S, U], of the block that fills
    given, answers, squares = np.zeros((2, len(drawn), size)), np.zeros((2, len(drawn))), np.zeros((2, len(drawn)))
    block = np.full(len(drawn), -1)  # the deployment of the block that fills

    def parts(rows: slice | Ints = slice(None)) -> tuple[Floats, Floats]:
        """Sums over a user's answers of treatment times score, and of treatment squared, each less its block's mean."""
        many = np.maximum(counts[rows].sum(1, keepdims=True), 1)
        about = treated[rows] - (treated[rows] * counts[rows]).sum(1, keepdims=True) / many
        centred = sums[rows] - sums[rows].sum(1, keepdims=True) / many * counts[rows]
        return done_products[rows] + about * centred, done_squares[rows] + about * about * counts[rows]

    for time in range(values.shape[1]):
        pair = np.isin(versions[:, time], (baseline, other))
        new = np.flatnonzero(pair & ((counts.sum(1) == BLOCK) | (deployments[:, time] != block)))
        if len(new):
            done_products[new], done_squares[new] = parts(new)
            sums[new] = counts[new] = treated[new] = 0
            block[new] = deployments[new, time]
        if not pair.any():
            continue
        rows, user = sims[pair], users[pair, time]
        side = (versions[pair, time] == other).astype(np.int64)
        sums[rows, user] += values[pair, time]
        counts[rows, user] += 1
        treated[rows, user] = side
        answers[side, rows] += 1
        squares[side, rows] += 2 * given[side, rows, user] + 1
        given[side, rows, user] += 1
        enough = (answers**2 / np.maximum(squares, 1) >= MIN_USERS).all(0)
        if not enough.any():
            continue
        product, square = parts()
        weight = np.maximum(square.sum(1), 1e-12)
        difference = product.sum(1) / weight
        shares = (product - difference[:, None] * square) / np.maximum(1 - square / weight[:, None], 1e-2)
        variance = np.einsum("su,su->s", shares, shares)
        radius = boundaries(variance, alpha) / weight
        yield Look(answers.sum(0).astype(np.int64), enough, difference, np.sqrt(variance) / weight, radius)


@dataclass(frozen=True)
class Outcome:
    """What became of simulated tests.

    Attributes:
        settled: Share in which some difference was ever settled.
        missed: Share in which an interval ever missed its effect.
        answers: Answers of the two versions after which the last version's difference was found in half of the tests,
            and in four fifths; infinite if never.
        fixed: Answers after which a test that looks only then finds it in four fifths.
    """

    settled: float
    missed: float
    answers: tuple[float, float]
    fixed: float


def simulate(scenario: Scenario, simulations: int, seed: int = 0) -> Outcome:
    rng = np.random.default_rng(seed)
    total = scenario.users * scenario.answers
    settled, missed, found = np.zeros(simulations, bool), np.zeros(simulations, bool), np.full(simulations, np.inf)
    rejections, looked = np.zeros(total + 1), np.zeros(total + 1)
    chunk_size = max(CHUNK // scenario.users, 1)
    for start in range(0, simulations, chunk_size):
        drawn = [scenario.draw(rng) for _ in range(min(chunk_size, simulations - start))]
        chunk = slice(start, start + len(drawn))
        for other in range(1, scenario.versions):
            last = other == scenario.versions - 1
            effect = scenario.effect * last
            for look in looks(drawn, 0, other, ALPHA / (scenario.versions - 1)):
                missed[chunk] |= look.enough & (np.abs(look.difference - effect) > look.radius)
                clear = look.enough & (np.abs(look.difference) > look.radius)
                settled[chunk] |= clear
                if last:
                    found[chunk] = np.where(clear, np.minimum(found[chunk], look.answers), found[chunk])
                    np.add.at(looked, look.answers, 1)
                    np.add.at(rejections, look.answers, look.enough & (np.abs(look.difference) > FIXED_Z * look.error))
    enough = np.flatnonzero((looked >= simulations / 2) & (rejections >= POWER * looked))
    return Outcome(
        float(settled.mean()),
        float(missed.mean()),
        (
            float(np.sort(found)[simulations // 2]),
            float(np.sort(found)[min(int(POWER * simulations), simulations - 1)]),
        ),
        float(enough[0]) if len(enough) else np.inf,
    )


EQUAL = [
    Scenario(users, answers, spread, drift, ramp, versions)
    for (users, answers), spread, drift, ramp, versions in itertools.product(
        ((50, 40), (100, 20)), (0.0, 0.2), (False, True), (False, True), (2, 3, 4, 5)
    )
]
EQUAL += [Scenario(1000, 2, *rest) for rest in itertools.product((0.0, 0.2), (False, True), (False, True))]
EQUAL += [Scenario(1000, 2, 0.2, True, True, versions) for versions in (3, 5)]
EQUAL += [Scenario(100, 20, 0.2, True, True, binary=True), Scenario(1000, 1), Scenario(1000, 1, drift=True, ramp=True)]
DIFFERENT = [
    Scenario(4000, 1, effect=0.05),
    Scenario(1000, 1, effect=0.1),
    Scenario(2000, 2, spread=0.1, drift=True, effect=0.05),
    Scenario(1000, 2, spread=0.1, drift=True, effect=0.1),
    Scenario(1000, 2, spread=0.1, drift=True, ramp=True, effect=0.1),
    Scenario(400, 10, spread=0.2, effect=0.1),
]


def main() -> None:
    simulations = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print("| scenario | false verdicts | coverage |\n| --- | --- | --- |")
    for scenario in EQUAL:
        found = simulate(scenario, simulations)
        print(f"| {scenario} | {found.settled:.1%} | {1 - found.missed:.1%} |", flush=True)
    print("| scenario | found | answers, half | answers, four fifths | fixed horizon | coverage |")
    print("| --- | --- | --- | --- | --- | --- |")
    for scenario in DIFFERENT:
        found = simulate(scenario, simulations)
        half, most = found.answers
        print(
            f"| {scenario} | {found.settled:.1%} | {half:g} | {most:g} | {found.fixed:g} | {1 - found.missed:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
