"""The best evaluation so far, and how long ago it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.errors import InvalidArgumentError

LOWER = ("loss", "nll", "perplexity", "divergence", "kl", "error")
"""Parts of the names of metrics that are better when they are lower."""


def sign_of(metric: str) -> int:
    """1 if a metric is better when it is higher, -1 if it is when it is lower."""
    return -1 if any(part in metric for part in LOWER) else 1


class Best:
    """Follows one metric of the evaluations.

    Args:
        metric: Its name, as ``loss``; "" follows none.
        patience: Evaluations without a better value after which the training should end; 0: never.

    Attributes:
        state: ``value`` and ``step`` of the best evaluation, and ``waited``, the evaluations since.
    """

    def __init__(self, metric: str, patience: int) -> None:
        self._metric, self._patience = metric.removeprefix("eval/"), patience
        self.state: dict[str, Any] = {}

    @property
    def out_of_patience(self) -> bool:
        """Whether as many evaluations as ``patience`` were no better."""
        return bool(self._patience) and self.state.get("waited", 0) >= self._patience

    def is_better(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take the metrics of an evaluation; return whether it is the best so far.

        Raises:
            InvalidArgumentError: The evaluation has no such metric.
        """
        if not self._metric:
            return False
        if f"eval/{self._metric}" not in metrics:
            known = ", ".join(name.removeprefix("eval/") for name in metrics)
            raise InvalidArgumentError(f"best_by is {self._metric!r}; evaluations have {known}", field="best_by")
        value = metrics[f"eval/{self._metric}"]
        sign = sign_of(self._metric)
        if "value" not in self.state or sign * value > sign * self.state["value"]:
            self.state = {"value": value, "step": step, "waited": 0}
            return True
        self.state = {**self.state, "waited": self.state["waited"] + 1}
        return False

    def __str__(self) -> str:
        return f"{self._metric} was best at step {self.state.get('step')}: {self.state.get('value'):.4g}"
