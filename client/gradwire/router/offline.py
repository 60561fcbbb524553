"""Off-policy evaluation: estimate a policy's reward from logged decisions of another policy.

``N`` decisions ``(x_i, m_i, r_i)`` logged with propensities ``p_i``, ``M`` modes; ``pi(m | x)`` the policy's
probabilities and ``w_i = pi(m_i | x_i) / p_i``.

* IPS ``mean(w r)`` (Horvitz and Thompson 1952): unbiased if every mode that the policy takes had a positive propensity.
* SNIPS ``sum(w r) / sum(w)`` (Swaminathan and Joachims 2015): bias O(1/N), much lower variance.
* DR ``mean(sum_m pi(m | x) q(x, m) + w (r - q(x, m_i)))`` (Dudik et al. 2011, arXiv 1103.4601): consistent if either
the
  propensities or the reward model q are right.

Intervals are normal approximations, for SNIPS by the delta method. The effective sample size is
``sum(w)^2 / sum(w^2)`` (Kish).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.router.features import Floats
from gradwire.router.logs import Log, decisions_of
from gradwire.router.policy import LinearPolicy
from gradwire.router.records import LoggedDecision

Integers = npt.NDArray[np.int64]
RewardModel = Callable[[Floats], Floats]
"""``[N, F] -> [N, M]``: the expected reward of every mode, in the order of the policy's modes."""

FEW = 100
FOLDS = 5
RIDGE = 1.0


@dataclass(frozen=True)
class Estimate:
    """A mean reward per request, its standard error, and its confidence interval."""

    value: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True)
class OfflineReport:
    """The estimated reward of a policy on the requests of a log.

    Attributes:
        logged: Reward of the log's own decisions.
        ips, snips, dr: Reward of the policy, by three estimators.
        effective_sample_size: Number of the policy's own decisions that would be equally informative.
        max_weight: The largest ``w``.
        agreement: Mean over decisions of the probability that the policy gives the logged mode.
        decisions: Number of decisions with a reward; only these count.
        skipped: Number of decisions without one.
        confidence: Confidence of the intervals.
        warnings: Reasons to doubt the figures, one sentence each.
    """

    logged: Estimate
    ips: Estimate
    snips: Estimate
    dr: Estimate
    effective_sample_size: float
    max_weight: float
    agreement: float
    decisions: int
    skipped: int
    confidence: float
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        names = {"logged": self.logged, "IPS": self.ips, "SNIPS": self.snips, "DR": self.dr}
        lines = [f"{'':8}{'reward':>10}{f'{self.confidence:.0%} interval':>24}"]
        lines += [f"{n:8}{e.value:10.4f}{f'[{e.low:.4f}, {e.high:.4f}]':>24}" for n, e in names.items()]
        lines.append(
            f"{self.decisions} decisions, effectively {self.effective_sample_size:.0f}; {self.skipped} skipped"
        )
        return "\n".join([*lines, *(f"warning: {each}" for each in self.warnings)])


@dataclass(frozen=True)
class LoggedArrays:
    """A log in the columns of a policy.

    Attributes:
        x: ``[N, F]``.
        modes: ``[N]``, -1 for a mode that the policy does not have.
        propensities, rewards: ``[N]``.
        skipped: Number of decisions without a reward, which are left out.
    """

    x: Floats
    modes: Integers
    propensities: Floats
    rewards: Floats
    skipped: int


def logged_arrays(log: Log, policy: LinearPolicy) -> LoggedArrays:
    """Convert the decisions with a reward to arrays.

    Raises:
        ValueError: There are none, or a decision's features are not the policy's; names the decision.
    """
    every = decisions_of(log)
    known = [(number, each) for number, each in enumerate(every, 1) if each.reward is not None]
    source = f"{log}: " if isinstance(log, Path | str) else ""
    if not known:
        raise ValueError(
            f"{source}none of the log's {len(every)} decisions has a reward; log outcomes with RouterPolicy.update"
        )
    places = {mode: place for place, mode in enumerate(policy.modes)}
    return LoggedArrays(
        np.stack([_vector(policy, source, number, each) for number, each in known]),
        np.array([places.get(each.mode, -1) for _, each in known], np.int64),
        np.array([each.propensity for _, each in known], np.float64),
        np.array([each.reward for _, each in known], np.float64),
        len(every) - len(known),
    )


def _vector(policy: LinearPolicy, source: str, number: int, decision: LoggedDecision) -> Floats:
    try:
        return policy.features.vector(decision.features)
    except ValueError as error:
        raise ValueError(f"{source}decision {number}: {error}") from None


def evaluate_offline(
    log: Log,
    policy: LinearPolicy | Path | str,
    *,
    greedy: bool = True,
    confidence: float = 0.95,
    reward_model: RewardModel | None = None,
) -> OfflineReport:
    """Estimate the reward of a policy on the requests of a log.

    Args:
        log: A file (JSON Lines, or CSV by its ending) or the decisions; those without a reward are skipped.
        policy: A policy or its file.
        greedy: The policy takes its most likely mode, as :meth:`~gradwire.router.RouterPolicy.route` does without
            exploration; False: it samples from its probabilities.
        confidence: Confidence of the intervals.
        reward_model: Reward model for DR; by default a ridge regression per mode, fitted to the other folds of the log
            (five), so that no decision is judged by a model that has seen its reward.

    Raises:
        ValueError: The log has no rewards, features that the policy does not have, a propensity that is not above 0
            and at most 1, or a reward that is not finite.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    policy = policy if isinstance(policy, LinearPolicy) else LinearPolicy.load(policy)
    data = logged_arrays(log, policy)
    target = target_probabilities(policy, data.x, greedy)
    chosen, rows = np.maximum(data.modes, 0), np.arange(len(data.modes))
    agreement = np.where(data.modes >= 0, target[rows, chosen], 0.0)
    weights = agreement / data.propensities
    expected = cross_fitted(data, len(policy.modes)) if reward_model is None else np.asarray(reward_model(data.x))
    if expected.shape != target.shape:
        raise ValueError(f"reward_model returned the shape {list(expected.shape)}, not {list(target.shape)}")
    quantile = NormalDist().inv_cdf(0.5 + confidence / 2)

    def estimate(rounds: Floats, value: float | None = None) -> Estimate:
        value = float(rounds.mean()) if value is None else value
        error = float(rounds.std(ddof=1) / np.sqrt(len(rounds))) if len(rounds) > 1 else float("inf")
        return Estimate(value, error, value - quantile * error, value + quantile * error)

    return OfflineReport(
        logged=estimate(data.rewards),
        ips=estimate(weights * data.rewards),
        snips=_self_normalised(weights, data.rewards, estimate),
        dr=estimate((target * expected).sum(axis=1) + weights * (data.rewards - expected[rows, chosen])),
        effective_sample_size=effective_sample_size(weights),
        max_weight=float(weights.max()),
        agreement=float(agreement.mean()),
        decisions=len(rows),
        skipped=data.skipped,
        confidence=confidence,
        warnings=tuple(_warnings(policy, data, target, weights)),
    )


def target_probabilities(policy: LinearPolicy, x: Floats, greedy: bool) -> Floats:
    """``[N, F] -> [N, M]``: the probability of each mode under the target policy."""
    logprobs = policy.logprobs(x)
    if not greedy:
        return np.exp(logprobs)
    taken: Floats = np.eye(len(policy.modes))[logprobs.argmax(axis=1)]
    return taken


def effective_sample_size(weights: Floats) -> float:
    """``sum(w)^2 / sum(w^2)``; 0 if all weights are 0."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares if squares else 0.0


def _self_normalised(weights: Floats, rewards: Floats, estimate: Callable[[Floats, float], Estimate]) -> Estimate:
    mean = float(weights.mean())
    if not mean:
        return Estimate(*[float("nan")] * 4)  # the policy takes none of the logged decisions
    value = float((weights * rewards).mean()) / mean
    return estimate(weights * (rewards - value) / mean, value)


def cross_fitted(data: LoggedArrays, num_modes: int, *, folds: int = FOLDS, ridge: float = RIDGE) -> Floats:
    """``[N, M]``: expected rewards, for each decision from regressions on the other folds."""
    fold, result = np.arange(len(data.x)) % folds, np.zeros((len(data.x), num_modes))
    for each in range(min(folds, len(data.x))):
        inside = fold == each
        outside = ~inside if not inside.all() else inside  # a log of a single decision
        weight, bias = fit_rewards(data.x[outside], data.modes[outside], data.rewards[outside], num_modes, ridge)
        result[inside] = data.x[inside] @ weight + bias
    return result


def fit_rewards(
    x: Floats, modes: Integers, rewards: Floats, num_modes: int, ridge: float = RIDGE
) -> tuple[Floats, Floats]:
    """Fit ridge regressions of the rewards of each mode: weights ``[F, M]`` and biases ``[M]``.

    Features are standardised for the penalty; a mode without decisions gets the overall mean.
    """
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scaled = (x - mean) / np.where(scale > 0, scale, 1.0)
    weight, bias = np.zeros((x.shape[1], num_modes)), np.full(num_modes, float(rewards.mean()))
    for mode in range(num_modes):
        own = modes == mode
        if own.any():
            centre, level = scaled[own].mean(axis=0), float(rewards[own].mean())
            features = scaled[own] - centre
            gram = features.T @ features + ridge * np.eye(x.shape[1])
            solved = np.linalg.solve(gram, features.T @ (rewards[own] - level)) / np.where(scale > 0, scale, 1.0)
            weight[:, mode] = solved
            bias[mode] = level - (mean + centre * np.where(scale > 0, scale, 1.0)) @ solved
    return weight, bias


def _warnings(policy: LinearPolicy, data: LoggedArrays, target: Floats, weights: Floats) -> Sequence[str]:
    warnings = []
    if (data.propensities == 1.0).all():
        warnings.append("every propensity is 1: the log has no information about modes that were not taken")
    logged = np.bincount(data.modes[data.modes >= 0], minlength=len(policy.modes)) > 0
    unseen = float(target[:, ~logged].sum() / len(target))
    if unseen > 0:
        names = [mode for mode, seen, share in zip(policy.modes, logged, target.sum(axis=0)) if share and not seen]
        warnings.append(f"the policy takes {', '.join(names)} on {unseen:.1%} of requests, and the log never does")
    foreign = int((data.modes < 0).sum())
    if foreign:
        warnings.append(f"{foreign} decisions took a mode that the policy does not have; they have weight 0")
    size = effective_sample_size(weights)
    if size < FEW:
        warnings.append(f"the effective sample size is {size:.0f}: intervals of so few decisions are too narrow")
    return warnings
