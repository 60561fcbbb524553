"""Simulated A/B tests with a look at the comparison every 50 answers.

``python tests/support/ab_tests.py [SIMULATIONS]`` prints the tables of docs/feedback.md.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from gradwire_feedback.statistics.user_effects import MIN_USERS, Contrast, Scores, contrast, number_of_users

ALPHA = 0.05
LOOK = 50
FIXED_Z = 1.96
"""Of a test of the same size that looks once, at a number of answers fixed before."""
POWER = 0.8


@dataclass(frozen=True)
class Scenario:
    """Users who give several scores each, in random order.

    Attributes:
        users, answers: How many users, and answers of most of them.
        busy, times: A share of the users gives this many times as many answers.
        shares: What the versions other than the first have of the users together; several follow one another.
        spread: Standard deviation of the users' means.
        drift: The mean moves from 0.4 to 0.6.
        versions: How many.
        effect: What the last version adds to each score; scores are then not grades, whose ends would shrink it.
        binary: Scores of 0 and 1 instead of five grades.
    """

    users: int
    answers: int
    busy: float = 0.0
    times: int = 1
    shares: tuple[float, ...] = (0.5,)
    spread: float = 0.0
    drift: bool = False
    versions: int = 2
    effect: float = 0.0
    binary: bool = False

    def __str__(self) -> str:
        words = [f"{self.users} x {self.answers}", " then ".join(f"{share:.0%}" for share in self.shares)]
        words += [f"{self.busy:.0%} answer {self.times} times as often"] * (self.busy > 0)
        words += [f"spread {self.spread}", f"{self.versions} versions"]
        words += [word for word in ("drift", "binary") if getattr(self, word)]
        return ", ".join(words + ([f"effect {self.effect}"] if self.effect else []))

    def draw(self, rng: np.random.Generator) -> Scores:
        many = np.where(np.arange(self.users) < self.busy * self.users, self.times, 1) * self.answers
        users = rng.permutation(np.repeat(np.arange(self.users), many))
        count = len(users)
        stages = np.arange(count) * len(self.shares) // count
        others = self.versions - 1
        weights = {n: [1 - share] + [share / others] * others for n, share in enumerate(self.shares)}
        distances = rng.exponential(size=(self.users, self.versions))  # the draw of draw_version
        versions = np.argmin(distances[users] / np.array([weights[n] for n in stages.tolist()]), axis=1)
        mean = 0.5 + (0.2 * (np.arange(count) / count - 0.5) if self.drift else 0.0)
        mean = mean + rng.normal(0, self.spread, self.users)[users] + self.effect * (versions == others)
        if self.binary:
            values = (rng.random(count) < np.clip(mean, 0, 1)).astype(np.float64)
        elif self.effect:
            values = rng.normal(mean, 0.25)
        else:
            values = np.round(4 * np.clip(rng.normal(mean, 0.25), 0, 1)) / 4
        return Scores(values, users, versions, stages, weights)


def looks(scores: Scores, baseline: int, other: int) -> Iterator[tuple[int, Contrast]]:
    """The contrasts after every so many answers, and these numbers, from when both versions have enough users."""
    pair = scores.only(baseline, other)
    for end in range(LOOK, len(pair) + 1, LOOK):
        until = pair.where(slice(end))
        if min(number_of_users(until.only(version)) for version in (baseline, other)) >= MIN_USERS:
            yield end, contrast(until, baseline, other)


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
    settled, missed, found = np.zeros(simulations, bool), np.zeros(simulations, bool), np.full(simulations, np.inf)
    rejected: dict[int, list[bool]] = {}
    alpha = ALPHA / (scenario.versions - 1)
    for number in range(simulations):
        scores = scenario.draw(rng)
        for other in range(1, scenario.versions):
            last = other == scenario.versions - 1
            for answers, look in looks(scores, 0, other):
                missed[number] |= look.excludes(scenario.effect * last, alpha)
                if look.excludes(0.0, alpha):
                    settled[number] = True
                    found[number] = min(found[number], answers) if last else found[number]
                if last:
                    rejected.setdefault(answers, []).append(abs(look.total) > FIXED_Z * math.sqrt(look.variance(0.0)))
    enough = [n for n, each in rejected.items() if len(each) >= simulations / 2 and np.mean(each) >= POWER]
    half, most = (float(np.sort(found)[min(int(share * simulations), simulations - 1)]) for share in (0.5, POWER))
    return Outcome(float(settled.mean()), float(missed.mean()), (half, most), float(min(enough, default=np.inf)))


ACTIVITY = (
    Scenario(1000, 4, spread=0.2),
    Scenario(1000, 3, 0.02, 20, spread=0.2),
    Scenario(1000, 2, 0.05, 15, spread=0.2),
)
SHARES = ((0.02,), (0.05,), (0.1,), (0.25,), (0.5,), (0.1, 0.5, 0.9))
EQUAL = [
    replace(users, shares=shares, drift=drift)
    for users, shares, drift in itertools.product(ACTIVITY, SHARES, (False, True))
]
EQUAL += [replace(ACTIVITY[2], shares=shares, spread=0.0) for shares in SHARES]
EQUAL += [replace(ACTIVITY[2], shares=shares, binary=True) for shares in SHARES]
EQUAL += [
    replace(ACTIVITY[2], shares=shares, drift=True, versions=versions)
    for shares, versions in itertools.product(((0.1,), (0.75,), (0.1, 0.5, 0.9)), (3, 5))
]
EQUAL += [Scenario(50, 40, spread=0.2), Scenario(100, 20, shares=(0.1, 0.5), drift=True), Scenario(2000, 1)]
DIFFERENT = [
    replace(users, shares=shares, drift=True, effect=effect)
    for effect, users, shares in itertools.product((0.1, 0.2), ACTIVITY, SHARES)
]
DIFFERENT += [Scenario(4000, 1, effect=0.05), Scenario(1000, 1, effect=0.1), Scenario(400, 10, spread=0.2, effect=0.1)]


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
