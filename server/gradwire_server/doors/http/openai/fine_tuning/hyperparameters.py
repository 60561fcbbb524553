"""Translation of OpenAI's hyperparameters, ``auto`` included, to settings of our recipes.

The rules of ``auto``, for R rows with T tokens together (four bytes of the file count as one):

* ``batch_size``: the power of two whose rows have about 8192 tokens, at most 32, and at most an eighth of the rows;
  with ``reinforcement`` at most 8 problems;
* ``n_epochs``: as many as make 100 steps, from 1 to 10;
* ``learning_rate_multiplier``: 1. It multiplies the rate that the recipe chooses for the model;
* ``beta``: 0.1; ``eval_interval``: once an epoch; ``eval_samples``: 64; ``compute_multiplier``: 1, which is 8
  answers to each problem.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.doors.http.openai.requests import unsupported
from gradwire_server.errors import invalid

BYTES_PER_TOKEN = 4
STEP_TOKENS = 8192
MOST_ROWS, MOST_PROBLEMS = 32, 8
AIMED_STEPS, MOST_EPOCHS = 100, 10
GROUP_SIZE = 8
RECIPES = {"supervised": "sft", "dpo": "dpo", "reinforcement": "grpo"}
AUTO = "auto"


@dataclass(frozen=True)
class Bounds:
    """The range of a hyperparameter's values."""

    least: float
    most: float
    whole: bool = True

    def check(self, name: str, value: Any) -> None:
        """Check a value."""
        kind = int if self.whole else (int, float)
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not (fits and (self.least <= value if self.whole else self.least < value) and value <= self.most):
            number = "a whole number" if self.whole else "a number"
            bounds = f"from {self.least:g}" if self.whole else f"above {self.least:g}"
            bounds += (
                "" if math.isinf(self.most) else f" to {self.most:g}" if self.whole else f", {self.most:g} at most"
            )
            raise invalid(f'{name} is {json.dumps(value)[:50]}; it must be "auto" or {number} {bounds}', name)


SHARED = {
    "n_epochs": Bounds(1, 50),
    "batch_size": Bounds(1, 256),
    "learning_rate_multiplier": Bounds(0, 1e6, whole=False),
}
OF_METHOD: Mapping[str, Mapping[str, Bounds]] = {
    "supervised": SHARED,
    "dpo": SHARED | {"beta": Bounds(0, 2, whole=False)},
    "reinforcement": SHARED
    | {
        "compute_multiplier": Bounds(0, 10, whole=False),
        "eval_interval": Bounds(1, 1_000_000),
        "eval_samples": Bounds(1, 10_000),
    },
}
EFFORTS = ("default", "low", "medium", "high")


@dataclass
class Resolved:
    """The resolved hyperparameters and settings of a job.

    Attributes:
        numbers: The hyperparameters, none of them ``auto``.
        settings: Settings of the recipe.
        warnings: Sentences on requested settings that have no effect.
    """

    numbers: dict[str, Any]
    settings: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def resolve(
    method: str, requested: Mapping[str, Any], file: jobs.File, model: pb.ModelInfo, param: str, *, evaluates: bool
) -> Resolved:
    """Resolve hyperparameters.

    Args:
        param: The request's parameter that holds them.
        evaluates: Whether there is a validation file.

    Raises:
        ServiceError: INVALID_ARGUMENT for one that is out of range; UNSUPPORTED for an effort.
    """
    known = OF_METHOD[method]
    warnings = [f"{name} is no hyperparameter of {method}; it has no effect" for name in requested if name not in known]
    asked = {name: requested.get(name) for name in known}
    for name, value in asked.items():
        if value is None:
            asked[name] = AUTO
        elif value != AUTO:
            known[name].check(f"{param}.{name}", value)
    if method == "reinforcement" and requested.get("reasoning_effort") is not None:
        effort = requested["reasoning_effort"]
        if effort not in EFFORTS:
            raise invalid(f"{param}.reasoning_effort must be one of {', '.join(EFFORTS)}", f"{param}.reasoning_effort")
        if effort != "default":
            raise unsupported("models here have no efforts of reasoning: leave it out", f"{param}.reasoning_effort")
        warnings = [each for each in warnings if not each.startswith("reasoning_effort")]

    def chosen(name: str, auto: Any) -> Any:
        return auto if asked[name] == AUTO else asked[name]

    rows = max(file.num_lines, 1)
    batch = chosen("batch_size", _auto_batch(rows, file.size_bytes, method))
    per_epoch = math.ceil(rows / batch)
    epochs = chosen("n_epochs", min(max(math.ceil(AIMED_STEPS / per_epoch), 1), MOST_EPOCHS))
    multiplier = chosen("learning_rate_multiplier", 1.0)
    numbers = {"n_epochs": epochs, "batch_size": batch, "learning_rate_multiplier": multiplier}
    settings = {
        "epochs": epochs, "batch_size": batch, "learning_rate_multiplier": multiplier, "held_out": 0.0, "save_every": 0,
        "eval_every": per_epoch if evaluates else 0, "max_tokens": model.context_length,
    }  # fmt: skip
    if method == "dpo":
        numbers["beta"] = settings["beta"] = chosen("beta", 0.1)
    if method == "reinforcement":
        numbers["eval_interval"] = chosen("eval_interval", per_epoch)
        numbers["eval_samples"] = settings["eval_problems"] = chosen("eval_samples", 64)
        numbers["compute_multiplier"] = chosen("compute_multiplier", 1.0)
        settings["group_size"] = max(2, round(GROUP_SIZE * numbers["compute_multiplier"]))
        settings["eval_every"] = numbers["eval_interval"] if evaluates else 0
    return Resolved(numbers, settings, warnings)


def _auto_batch(rows: int, size_bytes: int, method: str) -> int:
    tokens = max(size_bytes / BYTES_PER_TOKEN / rows, 1.0)
    most = min(MOST_PROBLEMS if method == "reinforcement" else MOST_ROWS, max(rows // 8, 1))
    return 1 << int(math.log2(min(max(STEP_TOKENS / tokens, 1.0), most)))
