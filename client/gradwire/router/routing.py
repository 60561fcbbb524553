"""A trained policy in production: which mode answers this request, how likely and at what expected value."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradwire.router.features import Features, Floats
from gradwire.router.policy import LinearPolicy
from gradwire.router.records import Event, LoggedDecision

MAX_WEIGHT = 10.0


@dataclass(frozen=True)
class Decision:
    """Who answers a request.

    Attributes:
        mode: the chosen one.
        propensity: the probability with which it was chosen: 1 without exploration.
        probabilities: of every mode under the policy itself.
        value: the reward that the policy expects.
    """

    mode: str
    propensity: float
    probabilities: Mapping[str, float]
    value: float


class RouterPolicy:
    """A policy that routes requests, one at a time; safe to use from several threads.

    Args:
        policy: the trained one; :meth:`from_file` reads it.
        exploration: the share of requests whose mode is drawn from the policy's probabilities, mixed half and half
            with a uniform choice, so that every mode keeps being tried. 0: always the most likely mode.
        log: a JSON Lines file that every decision is appended to; see :class:`~gradwire.router.LoggedDecision`.
        learning_rate: of :meth:`update`.
        seed: of the exploration.

    Raises:
        ValueError: for an exploration outside [0, 1], a learning rate that is not positive, and exploration without a
            log: what was drawn could not be told from what was chosen.
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
            raise ValueError(f"exploration is a share from 0 to 1; this is {exploration}")
        if not learning_rate > 0:
            raise ValueError(f"learning_rate must be greater than 0; this is {learning_rate}")
        if exploration and log is None:
            raise ValueError("exploration is logged: give log=, the file for its decisions and propensities")
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
        """The policy of a ``policy_state.npz``; never unpickles.

        Raises:
            FileNotFoundError: when there is no such file.
            ValueError: when it is no policy, and as of the class.
        """
        policy = LinearPolicy.load(path)
        return cls(policy, exploration=exploration, log=log, learning_rate=learning_rate, seed=seed)

    def route(self, features: Features) -> Decision:
        """Choose the mode for a request; logged where there is a log.

        Args:
            features: by name, or in the policy's order; see :meth:`~gradwire.router.FeatureSpace.vector`.

        Raises:
            ValueError: for features that are missing, unknown or not finite.
        """
        x = self._seen(features)
        with self._lock:
            decision = self._decide(x)
        if self._log is not None:
            self._write("decision", features, decision)
        return decision

    def dry_run(self, features: Features) -> None:
        """Record what :meth:`route` would choose, with its propensity, and choose nothing.

        Raises:
            ValueError: when there is no log, and for features as of :meth:`route`.
        """
        if self._log is None:
            raise ValueError("a dry run only records: give log=, the file for its records")
        x = self._seen(features)
        with self._lock:
            decision = self._decide(x)
        self._write("dry_run", features, decision)

    def update(self, features: Features, mode: str, reward: float, *, propensity: float | None = None) -> None:
        """Learn from one outcome: a step of policy gradient with the value as its baseline, and one of the value.

        ``advantage = reward - value``; the policy's step is ``w advantage`` times the gradient of ``log p(mode)``, with
        ``w = p(mode) / propensity``, at most 10, which corrects for exploration. The outcome is logged.

        Args:
            features: of the request, as given to :meth:`route`.
            mode: that answered it.
            reward: what it earned.
            propensity: of the :class:`Decision`; when absent, what the policy as it is now gives that mode.

        Raises:
            ValueError: for an unknown mode, a reward that is not finite, and a propensity outside (0, 1].
        """
        x = self._seen(features)
        if mode not in self.policy.modes:
            raise ValueError(f"there is no mode {mode!r}; this policy has {', '.join(self.policy.modes)}")
        if not math.isfinite(reward):
            raise ValueError(f"reward must be a finite number; this is {reward}")
        if propensity is not None and not 0.0 < propensity <= 1.0:
            raise ValueError(f"propensity is a probability above 0; this is {propensity}")
        chosen = self.policy.modes.index(mode)
        with self._lock:
            probabilities, value = self._predict(x)
            likely = self._behaviour(probabilities)[chosen] if propensity is None else propensity
            if likely <= 0.0:
                raise ValueError(f"without exploration {mode!r} is never chosen here: give propensity=")
            before = Decision(mode, likely, dict(zip(self.policy.modes, probabilities)), value)
            self._learn(x, chosen, reward, probabilities, value, likely)
        if self._log is not None:
            self._write("outcome", features, before, float(reward))

    def save(self, path: Path | str) -> None:
        """Write the policy as it is now."""
        with self._lock:
            self.policy.save(path)

    def _seen(self, features: Features) -> Floats:
        """``[columns]``: what the policy's weights are applied to."""
        space = self.policy.features
        return space.expand(space.vector(features))

    def _predict(self, x: Floats) -> tuple[list[float], float]:
        """Probabilities of all modes and the value; plain floats, which for a handful are faster than arrays."""
        parameters = self.policy.parameters
        logits = (x @ parameters["policy_weight"] + parameters["policy_bias"]).tolist()
        highest = max(logits)
        weights = [math.exp(logit - highest) for logit in logits]
        total = sum(weights)
        return [weight / total for weight in weights], float(x @ parameters["value_weight"] + parameters["value_bias"])

    def _behaviour(self, probabilities: list[float]) -> list[float]:
        """The probabilities with which modes are in fact chosen."""
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
        # Normalised by the size of x, so that the rate means the same for any number of features.
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
            named,
            decision.mode,
            decision.propensity,
            reward,
            event,
            decision.value,
            decision.probabilities,
            time.time(),
        )
        line = json.dumps(record.to_json(), default=float) + "\n"
        with self._lock:
            assert self._log is not None
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(line)
