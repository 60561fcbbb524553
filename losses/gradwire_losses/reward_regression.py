"""Reward models from ratings. ``B`` sequences; the reward head reads each one's last token."""

from __future__ import annotations

from pydantic import Field

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.outputs import ExplainedVariance, LossOutput, Mean
from gradwire_losses.registry import LossConfig, register_loss
from gradwire_losses.rewards import SCORE_FIELDS, ScoreRegressionConfig, score_regression


class RewardRegressionConfig(LossConfig):
    """Arguments of ``reward_regression``."""

    score_mean: float = Field(
        0.0, description="rating at which the head's output is 0: the mean of the training ratings"
    )
    score_std: float = Field(
        1.0, gt=0, description="rating points per unit of the head: the standard deviation of the training ratings"
    )


@register_loss(
    "reward_regression",
    config=RewardRegressionConfig,
    fields=SCORE_FIELDS,
    scores=("rewards",),
    metrics={
        "mse": "mean squared error of the predicted rating (score_mean + score_std * r), in rating points squared",
        "mae": "its mean absolute error, in rating points",
        "correlation": "Pearson correlation of predicted and given ratings",
        "explained_variance": "share of the ratings' variance that the predictions explain; 0 for a constant",
        "prediction_mean": "mean predicted rating",
    },
    reference="least squares; rewards of mean 0 and variance 1: Ziegler et al. 2019 (arXiv 1909.08593)",
    formula="1/B sum w (r - (s - mean) / std)^2",
    streams=True,
    head="reward",
)
def reward_regression(batch: Batch, scores: Scores, config: RewardRegressionConfig) -> LossOutput:
    """Trains the reward head on human ratings by squared error; its metrics are in rating points."""
    standardised = ScoreRegressionConfig.model_validate(config.model_dump())
    labels, predicted = batch["scores"], config.score_mean + config.score_std * scores.rewards.detach()
    error = predicted - labels
    regression = score_regression(batch, scores, standardised)
    return LossOutput(
        regression.terms,
        {
            "mse": Mean.of(error.square()),
            "mae": Mean.of(error.abs()),
            "correlation": regression.metrics["correlation"],
            "explained_variance": ExplainedVariance.of(predicted, labels),
            "prediction_mean": Mean.of(predicted),
        },
    )
