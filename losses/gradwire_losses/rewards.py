"""Reward models beyond pairs: scores, rankings, steps, ratings. They train the head of a run with ``head="reward"``."""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Scores, beside, pad, segment_ids, select
from gradwire_losses.fields import GROUP_FIELDS, INPUT_IDS, ROW_TOKENS, row_field, sample_field
from gradwire_losses.outputs import Correlation, ExplainedVariance, LossOutput, Mean, Std, Sum, Term
from gradwire_losses.reduction import ReductionConfig, reduced
from gradwire_losses.registry import LossConfig, register_loss

SCORE_FIELDS = (
    INPUT_IDS,
    row_field("scores", ("[rows]",), "The score of each sequence.", required=True),
    row_field("weights", ("[rows]",), "Weight of each row; 1 by default."),
)


class ScoreRegressionConfig(LossConfig):
    """Arguments of ``score_regression``."""

    loss_type: Literal["mse", "huber"] = Field("mse", description="squared error, or huber: linear beyond huber_delta")
    huber_delta: float = Field(1.0, gt=0, description="where huber turns linear, on the normalised scale")
    score_min: float | None = Field(None, description="with score_max: scores are mapped from this range to 0 ... 1")
    score_max: float | None = Field(None, description="with score_min")
    score_mean: float | None = Field(None, description="with score_std: scores are standardised by these")
    score_std: float | None = Field(None, gt=0, description="with score_mean")

    @model_validator(mode="after")
    def _normalised_one_way(self) -> Self:
        ranged, standardised = self.score_min is not None, self.score_mean is not None
        if ranged != (self.score_max is not None) or standardised != (self.score_std is not None):
            raise ValueError("score_min goes with score_max, and score_mean with score_std")
        if ranged and standardised:
            raise ValueError("normalise scores by a range or by mean and deviation, not by both")
        if self.score_min is not None and self.score_max is not None and self.score_min >= self.score_max:
            raise ValueError("score_min is not below score_max")
        return self

    def normalised(self, scores: Tensor) -> Tensor:
        """The training target of the head."""
        if self.score_min is not None and self.score_max is not None:
            return (scores - self.score_min) / (self.score_max - self.score_min)
        if self.score_mean is not None and self.score_std is not None:
            return (scores - self.score_mean) / self.score_std
        return scores


@register_loss(
    "score_regression",
    config=ScoreRegressionConfig,
    fields=SCORE_FIELDS,
    scores=("rewards",),
    metrics={
        "mse": "mean squared error, on the normalised scale",
        "mae": "mean absolute error, on the normalised scale",
        "correlation": "Pearson correlation of predicted and given scores",
        "prediction_mean": "mean prediction",
        "prediction_std": "standard deviation of the predictions",
    },
    reference="least squares; Huber 1964",
    formula="1/B sum w (r - y)^2, y the score, normalised",
    streams=True,
    head="reward",
)
def score_regression(batch: Batch, scores: Scores, config: ScoreRegressionConfig) -> LossOutput:
    """Trains the reward head on the score of each sequence, read at its last token.

    Raises:
        BatchError: A score is outside ``score_min`` ... ``score_max``.
    """
    labels, predicted = batch["scores"], scores.rewards
    if config.score_min is not None and config.score_max is not None:
        stated = batch.host["scores"]
        outside = (stated < config.score_min) | (stated > config.score_max)
        if outside.any():
            row = int(outside.nonzero()[0])
            raise BatchError(
                f"scores, row {row}: {stated[row].item():g}; it is outside score_min ... score_max",
                field="scores",
                row=row,
                rule=f"{config.score_min:g} <= score <= {config.score_max:g}",
            )
    target = config.normalised(labels)
    error = predicted - target
    if config.loss_type == "huber":
        losses = F.huber_loss(predicted, target.to(predicted.dtype), reduction="none", delta=config.huber_delta)
    else:
        losses = error.square()
    if "weights" in batch.fields:
        losses = losses * batch["weights"]
    return LossOutput(
        {"regression": Term(losses.sum(), len(losses), "sequences")},
        {
            "mse": Mean.of(error.square()),
            "mae": Mean.of(error.abs()),
            "correlation": Correlation.of(predicted, target),
            "prediction_mean": Mean.of(predicted),
            "prediction_std": Std.of(predicted),
        },
    )


class PlackettLuceConfig(LossConfig):
    """Arguments of ``plackett_luce``."""

    temperature: float = Field(1.0, gt=0, description="divides the rewards; a lower value makes preferences sharper")
    top_k: int | None = Field(None, ge=1, description="number of first ranks that count; all by default")


RANKED_FIELDS = tuple(field for field in GROUP_FIELDS if field.name in ("prompt_ids", "response_ids", "response_masks"))


@register_loss(
    "plackett_luce",
    config=PlackettLuceConfig,
    layout="groups",
    fields=(
        *RANKED_FIELDS,
        sample_field("ranks", ("[rows, samples]",), "Rank of each response, lower is better; by default their order."),
    ),
    scores=("rewards",),
    metrics={
        "top_accuracy": "share of groups whose best response alone has the highest reward",
        "pair_accuracy": "share of pairs within groups that rewards and ranks order alike; equal rewards do not",
        "reward_mean": "mean reward per response",
        "reward_std": "standard deviation of the rewards",
        "num_groups": "number of groups with two or more responses",
    },
    reference="Plackett 1975; Luce 1959; Rafailov et al. 2023, appendix A.3 (arXiv 2305.18290)",
    formula="-1/G sum_g sum_k log(exp(r_(k)) / sum_{j >= k} exp(r_(j))), (k) the k-th best",
    streams=True,
    head="reward",
)
def plackett_luce(batch: Batch, scores: Scores, config: PlackettLuceConfig) -> LossOutput:
    """Bradley-Terry for lists: a softmax of rewards chooses the best response, then the best of the rest, and so on.

    A mean over groups; a group of one response is ignored.

    Raises:
        BatchError: Two responses of a group have the same rank.
    """
    sizes, rewards = batch.group_sizes, scores.rewards
    if "ranks" in batch.fields:
        ranks, there = pad(batch.host["ranks"], sizes, fill=torch.inf)
        order = ranks.argsort(dim=1, stable=True)
        ranked = ranks.gather(1, order)
        tied = ((ranked[:, 1:] == ranked[:, :-1]) & there[:, 1:]).any(dim=1)
        if tied.any():
            row = int(tied.nonzero()[0])
            raise BatchError(
                f"ranks, row {row}: two responses have the same rank",
                field="ranks",
                row=row,
                rule="ranks differ in a group",
            )
        padded, mask = pad(rewards, sizes)
        padded = padded.gather(1, beside(order, padded))
    else:
        padded, mask = pad(rewards, sizes)
    several = sizes > 1
    padded, mask, sizes = select(padded, several) / config.temperature, select(mask, several), sizes[several]
    # For each rank, the log of the sum over this rank and all after it.
    remaining = torch.logcumsumexp(padded.masked_fill(~mask, -torch.inf).flip(1), dim=1).flip(1)
    last = (sizes - 1 if config.top_k is None else (sizes - 1).clamp(max=config.top_k))[:, None]
    losses = select((remaining - padded).flatten(), (torch.arange(padded.shape[1]) < last).flatten())

    places = torch.arange(padded.shape[1], device=padded.device)
    better = (places[:, None] < places)[None] & mask[:, :, None] & mask[:, None, :]
    ordered = (padded[:, :, None] > padded[:, None, :]) & better
    as_high = (padded.masked_fill(~mask, -torch.inf) >= padded[:, :1]).sum(dim=1)
    return LossOutput(
        {"ranking": Term(losses.sum(), len(padded), "groups")},
        {
            "top_accuracy": Mean.of(as_high == 1),
            "pair_accuracy": Mean(ordered.sum(), int((sizes * (sizes - 1)).sum()) // 2),
            "reward_mean": Mean.of(rewards),
            "reward_std": Std.of(rewards),
            "num_groups": Sum(len(padded)),
        },
    )


class ProcessRewardConfig(ReductionConfig):
    """Arguments of ``process_reward``; ``reduction`` counts labelled tokens only, one per step."""


@register_loss(
    "process_reward",
    config=ProcessRewardConfig,
    fields=(
        INPUT_IDS,
        row_field(
            "step_labels",
            ROW_TOKENS,
            "At the last token of each step, the probability that the step is right (0, 1, or between); else -100.",
            required=True,
        ),
    ),
    scores=("token_rewards",),
    metrics={
        "step_accuracy": "share of steps whose prediction agrees with the label, both thresholded at 0.5",
        "row_accuracy": "share of rows in which all steps agree",
        "step_probability": "mean probability given to a step",
        "num_steps": "labelled steps",
    },
    reference="Lightman et al. 2023, Let's Verify Step by Step (arXiv 2305.20050); soft labels: Wang et al. 2023, "
    "Math-Shepherd (arXiv 2312.08935)",
    formula="-1/N sum_steps [y log sigmoid(r) + (1 - y) log sigmoid(-r)]",
    streams=True,
    head="reward",
)
def process_reward(batch: Batch, scores: Scores, config: ProcessRewardConfig) -> LossOutput:
    """Predicts whether each step of a solution is right, with the reward head at the step's last token.

    A mean over steps, or as ``reduction`` says.

    Raises:
        BatchError: A label is below 0 or above 1 and not -100.
    """
    labels, logits, on_host = batch["step_labels"], scores.token_rewards, batch.host["step_labels"]
    outside = (on_host < 0) | (on_host > 1)
    if outside.any():
        token = int(outside.nonzero()[0])
        row = int(segment_ids(batch.row_lengths)[token])
        raise BatchError(
            f"step_labels, row {row}: {on_host[token].item():g}; a label is a probability, or -100 where no step ends",
            field="step_labels",
            row=row,
            rule="0 <= label <= 1, or -100",
        )
    losses = -labels * F.logsigmoid(logits) - (1 - labels) * F.logsigmoid(-logits)
    right = (logits > 0) == (labels > 0.5)
    rows, _ = pad(right, batch.row_lengths, fill=True)
    return LossOutput(
        {"steps": reduced(losses, batch.row_lengths, config)},
        {
            "step_accuracy": Mean.of(right),
            "row_accuracy": Mean.of(select(rows.all(dim=1), batch.row_lengths > 0)),
            "step_probability": Mean.of(logits.sigmoid()),
            "num_steps": Sum(len(losses)),
        },
    )


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
