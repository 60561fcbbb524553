"""A logged decision: features, choice and reward. One JSON object per line, or one row of a CSV file.

JSON Lines::

    {"event": "outcome", "time": 1767225600.0, "features": {"length": 0.2, "difficulty": 0.7, "domain": "code", ...},
     "mode": "review", "propensity": 0.31, "reward": 1.42, "value": 1.1, "probabilities": {"small": 0.2, ...}}

CSV: columns ``mode``, ``propensity`` and ``reward``, and one column per feature, named as in the policy (a category is
one column, ``domain``); ``event``, ``time`` and ``value`` are optional."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Event = Literal["decision", "dry_run", "outcome"]
EVENTS: tuple[Event, ...] = ("decision", "dry_run", "outcome")
CSV_COLUMNS = ("event", "time", "mode", "propensity", "reward", "value")


@dataclass(frozen=True)
class LoggedDecision:
    """One line of a decision log.

    Attributes:
        features: The request's features by name; see :class:`~gradwire.router.features.FeatureSpace`.
        mode: The chosen mode; in a ``dry_run`` the mode that would have been chosen.
        propensity: The probability with which the logging policy chose it, in (0, 1].
        reward: The reward; None while unknown. Only lines with a reward can be trained on.
        event: ``decision`` when a request is routed, ``dry_run`` when it is only recorded, ``outcome`` when the
            reward is known. An outcome repeats features, mode and propensity, so that it is complete by itself.
        value: The reward that the logging policy expected; None if it has no estimate.
        probabilities: Probability of every mode under the logging policy; empty if unknown.
        time: Unix seconds; None if unknown.
    """

    features: Mapping[str, float | str]
    mode: str
    propensity: float
    reward: float | None = None
    event: Event = "outcome"
    value: float | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    time: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object of a JSON line."""
        return {
            "event": self.event,
            "time": self.time,
            "features": dict(self.features),
            "mode": self.mode,
            "propensity": self.propensity,
            "reward": self.reward,
            "value": self.value,
            "probabilities": dict(self.probabilities),
        }
