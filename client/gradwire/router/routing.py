"""Routing in production: choose the mode of a request, with its propensity and expected value."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from gradwire.router.features import Features, Floats
from gradwire.router.policy import LinearPolicy

MAX_WEIGHT = 10.0
Event = Literal["decision", "dry_run", "outcome"]


@dataclass(frozen=True)
class Decision:
    """The routing of a request.

    Attributes:
        mode: The chosen mode.
        propensity: The probability with which it was chosen: 1 without exploration.
        probabilities: Probability of every mode under the policy itself.
        value: The policy's expected reward.
    """

    mode: str
    propensity: float
    probabilities: Mapping[str, float]
    value: float


@dataclass(frozen=True)
class LoggedDecision:
    """One line of a decision log, an object in JSON.

    Attributes:
        event: ``decision`` when a request is routed, ``dry_run`` when it is only recorded, ``outcome`` when the
            reward is known. An outcome repeats features, mode and propensity, so that it is complete by itself.
        time: Unix seconds.
        features: The request's features by name; see :class:`~gradwire.router.features.FeatureSpace`.
        mode: The chosen mode; in a ``dry_run`` the mode that would have been chosen.
        propensity: The probability with which it was chosen, in (0, 1].
        reward: The reward; None while unknown.
        value: The reward that the policy expected.
        probabilities: Probability of every mode under the policy.
    """

    event: Event
    time: float
    features: Mapping[str, float | str]
    mode: str
    propensity: float
    reward: float | None = None
    value: float | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)


class RouterPolicy:
    """Routes requests with a policy, one at a time; thread-safe.

    Args:
        policy: The trained policy; :meth:`from_file` reads one.
        exploration: Share of requests whose mode is sampled from an equal mixture of the policy's probabilities
            and a uniform choice, so that every mode keeps being tried. 0: always the most likely mode.
        log: JSON Lines file to which every decision is appended; see :class:`~gradwire.router.LoggedDecision`.
        learning_rate: Learning rate of :meth:`update`.
        seed: Seed of the exploration.

    Raises:
        ValueError: An exploration outside [0, 1], a learning rate that is not positive, or exploration without a
            log: explored choices could not be told from greedy ones.
    """

    def __init__(
        self,
        policy: LinearPolicy,
        *,
        exploration: float = 0.0,
        log: Path | str | None = None,
        learning_rate: float = 0.1,
        seed: int | None = None,
    ) -> None:
        if not 0.0 <= exploration <= 1.0:
            raise ValueError(f"exploration must be from 0 to 1, got {exploration}")
        if not learning_rate > 0:
            raise ValueError(f"learning_rate must be greater than 0, got {learning_rate}")
        if exploration and log is None:
            raise ValueError("exploration needs a log: pass log=, the file for its decisions and propensities")
        self.policy = policy
        self._exploration, self._rate = exploration, learning_rate
        self._log = None if log is None else Path(log)
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @classmethod
    def from_file(
        cls,
        path: Path | str,
        *,
        exploration: float = 0.0,
        log: Path | str | None = None,
        learning_rate: float = 0.1,
        seed: int | None = None,
    ) -> RouterPolicy:
        """Read the policy of a ``policy_state.npz``; never unpickles.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not a policy, or an argument is invalid (see the class).
        """
        policy = LinearPolicy.load(path)
        return cls(policy, exploration=exploration, log=log, learning_rate=learning_rate, seed=seed)

    def route(self, features: Features) -> Decision:
        """Choose the mode for a request, and log the decision if there is a log.

        Args:
            features: By name, or in the policy's order; see :meth:`~gradwire.router.FeatureSpace.vector`.

        Raises:
            ValueError: Features are missing, unknown or not finite.
        """
        with self._lock:
            decision = self._decide(self._seen(features))
        if self._log is not None:
            self._write("decision", features, decision)
        return decision

    def dry_run(self, features: Features) -> None:
        """Record the choice that :meth:`route` would make, with its propensity, without choosing.

        Raises:
            ValueError: There is no log, or the features are invalid (see :meth:`route`).
        """
        if self._log is None:
            raise ValueError("a dry run only records: pass log=, the file for its records")
        with self._lock:
            decision = self._decide(self._seen(features))
        self._write("dry_run", features, decision)

    def update(self, features: Features, mode: str, reward: float, *, propensity: float | None = None) -> None:
        """Learn from one outcome: a policy-gradient step with the value as baseline, and a step of the value.

        ``advantage = reward - value``; the policy's step is ``w advantage`` times the gradient of ``log p(mode)``, with
        ``w = p(mode) / propensity``, at most 10, which corrects for exploration. The outcome is logged.

        Args:
            features: The request's features, as passed to :meth:`route`.
            mode: The mode that answered it.
            reward: The reward.
            propensity: Propensity of the :class:`Decision`; by default the mode's current propensity.

        Raises:
            ValueError: An unknown mode, a reward that is not finite, or a propensity outside (0, 1].
        """
        if not math.isfinite(reward):
            raise ValueError(f"reward must be a finite number, got {reward}")
        if propensity is not None and not 0.0 < propensity <= 1.0:
            raise ValueError(f"propensity must be a probability above 0, got {propensity}")
        with self._lock:
            x = self._seen(features)
            if mode not in self.policy.modes:
                raise ValueError(f"there is no mode {mode!r}; this policy has {', '.join(self.policy.modes)}")
            chosen = self.policy.modes.index(mode)
            probabilities, value = self._predict(x)
            likely = self._behaviour(probabilities)[chosen] if propensity is None else propensity
            if likely <= 0.0:
                raise ValueError(f"without exploration {mode!r} is never chosen here: pass propensity=")
            before = Decision(mode, likely, dict(zip(self.policy.modes, probabilities)), value)
            self._learn(x, chosen, reward, probabilities, value, likely)
        if self._log is not None:
            self._write("outcome", features, before, float(reward))

    def reload(self, path: Path | str) -> None:
        """Go on with the policy of another file, while other threads route: each request has the old one or the new.

        What :meth:`update` taught the old policy is lost, unless the new one was trained from a :meth:`save` of it.

        Raises:
            FileNotFoundError: There is no such file. The old policy stays.
            ValueError: The file is not a policy. The old policy stays.
        """
        policy = LinearPolicy.load(path)
        with self._lock:
            self.policy = policy

    def save(self, path: Path | str) -> None:
        """Write the current policy."""
        with self._lock:
            self.policy.save(path)

    def _seen(self, features: Features) -> Floats:
        """``[columns]``: the input of the policy's weights."""
        space = self.policy.features
        return space.expand(space.vector(features))

    def _predict(self, x: Floats) -> tuple[list[float], float]:
        """Return the probabilities of all modes and the value, as plain floats, which are faster than arrays for a
        few modes."""
        parameters = self.policy.parameters
        logits = (x @ parameters["policy_weight"] + parameters["policy_bias"]).tolist()
        highest = max(logits)
        weights = [math.exp(logit - highest) for logit in logits]
        total = sum(weights)
        return [weight / total for weight in weights], float(x @ parameters["value_weight"] + parameters["value_bias"])

    def _behaviour(self, probabilities: list[float]) -> list[float]:
        """Return the actual probabilities of choosing each mode, including exploration."""
        explored = self._exploration
        floor = 0.5 * explored / len(probabilities)
        mixed = [0.5 * explored * probability + floor for probability in probabilities]
        mixed[probabilities.index(max(probabilities))] += 1.0 - explored
        return mixed

    def _decide(self, x: Floats) -> Decision:
        probabilities, value = self._predict(x)
        chosen, propensity = probabilities.index(max(probabilities)), 1.0
        if self._exploration:
            behaviour = self._behaviour(probabilities)
            chosen = self._random.choices(range(len(behaviour)), behaviour)[0]
            propensity = behaviour[chosen]
        return Decision(self.policy.modes[chosen], propensity, dict(zip(self.policy.modes, probabilities)), value)

    def _learn(
        self, x: Floats, chosen: int, reward: float, probabilities: list[float], value: float, propensity: float
    ) -> None:
        advantage = reward - value
        weight = min(probabilities[chosen] / propensity, MAX_WEIGHT)
        by_logits = -weight * advantage * np.array(probabilities)
        by_logits[chosen] += weight * advantage
        # Normalised by the size of x, so that the rate does not depend on the number of features.
        rate, parameters = self._rate / (1.0 + float(x @ x)), self.policy.parameters
        self.policy.parameters = {
            "policy_weight": parameters["policy_weight"] + rate * np.outer(x, by_logits),
            "policy_bias": parameters["policy_bias"] + rate * by_logits,
            "value_weight": parameters["value_weight"] + rate * advantage * x,
            "value_bias": np.asarray(parameters["value_bias"] + rate * advantage),
        }

    def _write(self, event: Event, features: Features, decision: Decision, reward: float | None = None) -> None:
        named: Mapping[str, float | str] = (
            features
            if isinstance(features, Mapping)
            else dict(zip(self.policy.features.names, np.asarray(features, dtype=np.float64).tolist()))
        )
        record = LoggedDecision(
            event,
            time.time(),
            dict(named),
            decision.mode,
            decision.propensity,
            reward,
            decision.value,
            dict(decision.probabilities),
        )
        line = json.dumps(asdict(record), default=float) + "\n"
        with self._lock:
            assert self._log is not None
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(line)
