"""Train a policy on logged decisions, without new requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradwire.router.features import FeatureSpace, Floats
from gradwire.router.logs import Log, decisions_of
from gradwire.router.offline import LoggedArrays, cross_fitted, fit_rewards, logged_arrays
from gradwire.router.policy import LinearPolicy
from gradwire.router.ppo import Adam
from gradwire.router.records import LoggedDecision


def train_offline(
    log: Log,
    policy: LinearPolicy | None = None,
    *,
    steps: int = 500,
    learning_rate: float = 0.05,
    entropy_coef: float = 0.01,
    max_weight: float = 20.0,
) -> LinearPolicy:
    """Train on logged decisions by gradient ascent on the doubly robust estimate of the policy's reward.

    The rewards are scaled to variance 1 first, so that ``entropy_coef`` does not depend on their scale. The
    value head becomes a regression of the new policy's estimated rewards. Evaluate the result on another log, with
    :func:`~gradwire.router.evaluate_offline`: on its own log the estimate is too optimistic.

    Args:
        log: A file or decisions; those without a reward are skipped.
        policy: Initial policy; it is not changed. By default a uniform one over the log's modes and features: a
            feature whose values are texts is a category.
        steps: Steps of Adam, each on the whole log; the same log gives the same policy.
        learning_rate: Learning rate of Adam, on standardised features.
        entropy_coef: Weight of an entropy bonus, which keeps similar choices open.
        max_weight: Upper bound of the weight ``1 / propensity`` of a decision.

    Raises:
        ValueError: The log has no rewards, or features that the policy does not have.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if policy is None:
        every = decisions_of(log)
        log, policy = every, LinearPolicy(feature_space_of(every), sorted({each.mode for each in every}))
    data = logged_arrays(log, policy)
    seen = policy.features.expand(data.x)
    mean, deviation = seen.mean(axis=0), seen.std(axis=0)
    scale = np.where(deviation > 0, deviation, 1.0)
    scores = _doubly_robust_scores(data, len(policy.modes), max_weight)
    learner = _rescaled(policy, mean, scale)
    adam, x = Adam(learner, learning_rate, max_grad_norm=float("inf")), (seen - mean) / scale
    unit = float(data.rewards.std()) or 1.0
    for _ in range(steps):
        logprobs = learner.logprobs(x)
        probabilities = np.exp(logprobs)
        # d/d logits of sum_m p_m s_m is p (s - sum p s), and of the entropy -p (log p + H).
        gains = scores / unit - entropy_coef * logprobs
        by_logits = -probabilities * (gains - (probabilities * gains).sum(axis=1, keepdims=True)) / len(x)
        zeros = {name: np.zeros_like(learner.parameters[name]) for name in ("value_weight", "value_bias")}
        adam.step({"policy_weight": x.T @ by_logits, "policy_bias": by_logits.sum(axis=0), **zeros})
    result = _rescaled(learner, -mean / scale, 1.0 / scale)
    earned = (np.exp(result.logprobs(seen)) * scores).sum(axis=1)
    weight, bias = fit_rewards(seen, np.zeros(len(earned), np.int64), earned, 1)
    result.parameters |= {"value_weight": weight[:, 0], "value_bias": bias[0]}
    return LinearPolicy(policy.features, policy.modes, dict(result.parameters))


def _doubly_robust_scores(data: LoggedArrays, num_modes: int, max_weight: float) -> Floats:
    """``[N, M]``: the doubly robust estimate of each mode's reward on each request."""
    scores = cross_fitted(data, num_modes)
    rows = np.flatnonzero(data.modes >= 0)
    modes, weights = data.modes[rows], np.minimum(1.0 / data.propensities[rows], max_weight)
    scores[rows, modes] += weights * (data.rewards[rows] - scores[rows, modes])
    return scores


def _rescaled(policy: LinearPolicy, mean: Floats, scale: Floats) -> LinearPolicy:
    """Convert a policy on columns ``(x - mean) / scale`` to one on ``x``."""
    changed: dict[str, npt.ArrayLike] = {}
    for head in ("policy", "value"):
        weight, bias = policy.parameters[f"{head}_weight"], policy.parameters[f"{head}_bias"]
        changed[f"{head}_weight"] = weight * (scale[:, None] if weight.ndim == 2 else scale)
        changed[f"{head}_bias"] = bias + mean @ weight
    return LinearPolicy(policy.features, policy.modes, changed)


def feature_space_of(decisions: list[LoggedDecision]) -> FeatureSpace:
    """Return the features of a log, in the order of the first decision; texts become categories of their values.

    Raises:
        ValueError: There is no decision, or a decision has other features than the first.
    """
    if not decisions:
        raise ValueError("the log is empty")
    names: list[str] = []
    for feature, first in decisions[0].features.items():
        if isinstance(first, str):
            values = {str(each.features[feature]) for each in decisions if feature in each.features}
            names += [f"{feature}={value}" for value in sorted(values)]
        else:
            names.append(feature)
    known = set(decisions[0].features)
    for number, each in enumerate(decisions, 1):
        if set(each.features) != known:
            other = ", ".join(sorted(set(each.features) ^ known))
            raise ValueError(f"decision {number} and the first differ in the features {other}")
    return FeatureSpace(tuple(names))
