"""What training gives back: its figures and curves, as JSON and as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from gradwire.errors import InvalidArgumentError
from gradwire.rl.extras import require

RESULTS_FILE = "training_results.json"
FIGURES = (
    "final_reward_mean", "final_reward_std", "reward_history", "kl_history", "loss_history", "value_error_history",
)  # fmt: skip


@dataclass(frozen=True)
class CalibrationBin:
    """Held-out ratings of similar prediction.

    Attributes:
        predicted: mean of the predicted scores.
        observed: mean of the ratings.
        count: ratings.
    """

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class RewardModelReport:
    """How well a reward model predicts ratings that it was not trained on. All figures are in units of the score.

    Attributes:
        num_ratings: held-out ratings; few of them make every figure here uncertain.
        mean_squared_error: of the predictions.
        baseline_error: of always predicting the mean training score: a useful model is well below.
        pearson: linear correlation of predictions and ratings; NaN where either does not vary.
        spearman: correlation of their ranks.
        calibration_error: mean of ``|predicted - observed|`` over the bins, weighted by their counts.
        bins: ratings sorted by prediction and cut into up to ten bins of equal count.
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
    """How far a training is, for a progress bar of one's own.

    Attributes:
        stage: ``"reward_model"``, ``"policy"`` or ``"export"``.
        step: steps of this stage that are done.
        total: steps of this stage; fewer are done where the reward model stops early.
        metrics: of the last step.
    """

    stage: str
    step: int
    total: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingResult:
    """A trained policy and how it came about.

    Attributes:
        model_path: folder of the policy, for ``AutoModelForCausalLM.from_pretrained``.
        reward_model_path: folder of the reward model that it was trained against.
        feedback_count: ratings that it was trained on.
        final_reward_mean, final_reward_std: of the reward model's score, over the answers of the last tenth of the
            steps; in units of the ratings.
        training_steps: steps done.
        reward_history: mean score of each step's answers.
        kl_history: mean KL of an answer to the policy that training started from, in nats, of each step.
        loss_history: the PPO loss, mean over a step's mini-batches.
        value_error_history: mean squared error of the critic before each step learned from it, in units of the ratings'
            standard deviation.
        reward_model_report: of the reward model, on held-out ratings; None where there was nothing to hold out.
        policy_checkpoint: ``"RUN_ID/NAME"`` of the policy on the server; empty where the server was the trainer's own.
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
        """Writes JSON: to this file, or to ``training_results.json`` in this folder; numbers that are none as null."""
        file = _file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".tmp")
        aside.write_text(json.dumps(_finite(asdict(self)), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        aside.replace(file)
        return file

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: when there is no such file.
            InvalidArgumentError: when it holds something else.
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
                f"{file} is not a training result ({error}); one is a JSON object with {names}",
                field="path",
                rule="written by TrainingResult.save",
            ) from error

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws reward, KL, loss and value error over the steps. Needs matplotlib (``gradwire[rlhf]``).

        Args:
            path: the file to write, its ending naming the format; None shows the figure where there is a display.

        Returns:
            The ``matplotlib`` figure.
        """
        pyplot = require("matplotlib.pyplot", "rlhf", "TrainingResult.plot")
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
        curves = {
            "reward (score)": self.reward_history,
            "KL to the start (nats an answer)": self.kl_history,
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
    """The value, null being NaN."""
    if isinstance(value, list):
        return [math.nan if each is None else each for each in value]
    return math.nan if value is None else value
