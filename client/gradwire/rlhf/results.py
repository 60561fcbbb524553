"""Results of a training: metrics and curves, as JSON and as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from gradwire.errors import InvalidArgumentError
from gradwire.extras import require
from gradwire.whole_files import replace_json

RESULTS_FILE = "training_results.json"
FIGURES = (
    "final_reward_mean", "final_reward_std", "reward_history", "kl_history", "loss_history", "value_error_history",
)  # fmt: skip


@dataclass(frozen=True)
class CalibrationBin:
    """Held-out ratings with similar predictions.

    Attributes:
        predicted: Mean of the predicted scores.
        observed: Mean of the ratings.
        count: Number of ratings.
    """

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class RewardModelReport:
    """Quality of a reward model on held-out ratings. All figures are in units of the score.

    Attributes:
        num_ratings: Number of held-out ratings; with few, every figure here is uncertain.
        mean_squared_error: Mean squared error of the predictions.
        baseline_error: Mean squared error of always predicting the mean training score; a useful model is well below.
        pearson: Linear correlation of predictions and ratings; NaN if either does not vary.
        spearman: Rank correlation.
        calibration_error: Mean of ``|predicted - observed|`` over the bins, weighted by their counts.
        bins: Ratings sorted by prediction and split into up to ten bins of equal count.
    """

    num_ratings: int
    mean_squared_error: float
    baseline_error: float
    pearson: float
    spearman: float
    calibration_error: float
    bins: tuple[CalibrationBin, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        bins = tuple(CalibrationBin(**each) for each in values["bins"])
        return cls(**{name: _number(value) for name, value in values.items()} | {"bins": bins})


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training, for custom progress bars.

    Attributes:
        stage: ``"reward_model"``, ``"policy"`` or ``"export"``.
        step: Number of finished steps of this stage.
        total: Number of steps of this stage; the reward model may stop earlier.
        metrics: Metrics of the last step.
    """

    stage: str
    step: int
    total: int
    metrics: Mapping[str, float] = field(default_factory=dict)


OnProgress = Callable[[TrainingProgress], None]


class ProgressLogger:
    """Calls a function after each step of a stage.

    Args:
        first: Number that the stage's loop gives its first step.
    """

    def __init__(self, on_progress: OnProgress, stage: str, total: int, first: int = 1) -> None:
        self._on_progress, self._stage, self._total, self._first = on_progress, stage, total, first

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        step = iteration + 1 - self._first
        self._on_progress(TrainingProgress(self._stage, step, self._total, dict(metrics)))

    def close(self) -> None:
        """Do nothing: the function belongs to the caller."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training: the policy, the reward model and the metrics.

    Attributes:
        model_path: Folder of the policy, for ``AutoModelForCausalLM.from_pretrained``.
        reward_model_path: Folder of the reward model that it was trained against.
        feedback_count: Number of ratings.
        final_reward_mean, final_reward_std: Mean and standard deviation of the reward model's score over the answers of
            the last tenth of the steps, in units of the ratings.
        training_steps: Number of finished steps.
        reward_history: Mean score of each step's answers.
        kl_history: Mean KL of an answer to the initial policy per step, in nats.
        loss_history: PPO loss, mean over a step's mini-batches.
        value_error_history: Mean squared error of the critic before each step's update, in units of the ratings'
            standard deviation.
        reward_model_report: Quality of the reward model on held-out ratings; None if none were held out.
        policy_checkpoint: ``"RUN_ID/NAME"`` of the policy on the server; empty if the trainer started its own server.
    """

    model_path: str
    reward_model_path: str | None
    feedback_count: int
    final_reward_mean: float
    final_reward_std: float
    training_steps: int
    reward_history: list[float]
    kl_history: list[float]
    loss_history: list[float]
    value_error_history: list[float]
    reward_model_report: RewardModelReport | None = None
    policy_checkpoint: str = ""

    def save(self, path: str | Path) -> Path:
        """Write JSON to this file, or to ``training_results.json`` in this folder; NaN is written as null."""
        file = _file(path)
        replace_json(file, _finite(asdict(self)), indent=1)
        return file

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by :meth:`save`.

        Raises:
            FileNotFoundError: There is no such file.
            InvalidArgumentError: The file holds something else.
        """
        file = _file(path)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            report = values.pop("reward_model_report", None)
            known = {name: _number(value) if name in FIGURES else value for name, value in values.items()}
            return cls(**known, reward_model_report=None if report is None else RewardModelReport.from_json(report))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            names = ", ".join(each.name for each in fields(cls))
            raise InvalidArgumentError(
                f"{file} is not a training result ({error}); it must be a JSON object with {names}",
                field="path",
                rule="written by TrainingResult.save",
            ) from error

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot reward, KL, loss and value error over the steps. Needs matplotlib (``gradwire[rlhf]``).

        Args:
            path: File to write; its ending selects the format. None shows the figure if there is a display.

        Returns:
            The ``matplotlib`` figure.
        """
        pyplot = require("matplotlib.pyplot", "rlhf", "TrainingResult.plot")
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
        curves = {
            "reward (score)": self.reward_history,
            "KL to the initial policy (nats per answer)": self.kl_history,
            "loss": self.loss_history,
            "value error": self.value_error_history,
        }
        for axis, (title, curve) in zip(axes.flat, curves.items()):
            axis.plot(range(1, len(curve) + 1), curve, linewidth=1.2)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path)
        elif require("matplotlib", "rlhf", "TrainingResult.plot").get_backend().lower() != "agg":
            pyplot.show()
        pyplot.close(figure)
        return figure


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".json" else path / RESULTS_FILE


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _number(value: Any) -> Any:
    """Convert a value, reading null as NaN."""
    if isinstance(value, list):
        return [math.nan if each is None else each for each in value]
    return math.nan if value is None else value
