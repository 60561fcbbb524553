"""Reward models from preferences. ``P`` pairs; the reward head reads each sequence's last token."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import CHOSEN_IDS, REJECTED_IDS, row_field
from gradwire_losses.outputs import LossOutput, Mean, Std, Sum, Term
from gradwire_losses.registry import LossConfig, register_loss


class RewardModelingConfig(LossConfig):
    """Arguments of ``reward_modeling``."""

    margin: float = Field(0.0, description="target margin of the chosen reward over the rejected one")
    temperature: float = Field(1.0, gt=0, description="divides the difference; a lower value makes preferences sharper")
    center_coef: float = Field(0.0, ge=0, description="weight of (chosen + rejected)^2, which keeps rewards around 0")


@register_loss(
    "reward_modeling",
    config=RewardModelingConfig,
    layout="pairs",
    fields=(
        CHOSEN_IDS,
        REJECTED_IDS,
        row_field("margin", ("[rows]",), "Margin of each pair, added to the argument ``margin``."),
    ),
    scores=("rewards",),
    metrics={
        "preference_accuracy": "share of pairs whose chosen sequence has the higher reward",
        "reward_margin": "mean of chosen reward - rejected reward",
        "chosen_reward_mean": "mean reward of chosen sequences",
        "rejected_reward_mean": "mean reward of rejected sequences",
        "chosen_reward_std": "standard deviation of the rewards of chosen sequences",
        "rejected_reward_std": "standard deviation of the rewards of rejected sequences",
        "num_pairs": "pairs",
    },
    reference="Bradley and Terry 1952; Ouyang et al. 2022 (arXiv 2203.02155); center_coef: Eisenstein et al. 2023 "
    "(arXiv 2312.09244)",
    formula="1/P sum [-log sigmoid((r_c - r_w - margin) / temperature) + kappa (r_c + r_w)^2]",
    streams=True,
    head="reward",
)
def reward_modeling(batch: Batch, scores: Scores, config: RewardModelingConfig) -> LossOutput:
    """Bradley-Terry: the probability that the chosen sequence is preferred is a sigmoid of the rewards' difference."""
    chosen, rejected = scores.rewards.view(-1, 2).unbind(dim=1)
    margin = batch["margin"] + config.margin if "margin" in batch.fields else config.margin
    losses = -F.logsigmoid((chosen - rejected - margin) / config.temperature)
    if config.center_coef:
        losses = losses + config.center_coef * (chosen + rejected).square()
    return LossOutput(
        {"preference": Term(losses.sum(), len(losses), "pairs")},
        {
            "preference_accuracy": Mean.of(chosen > rejected),
            "reward_margin": Mean.of(chosen - rejected),
            "chosen_reward_mean": Mean.of(chosen),
            "rejected_reward_mean": Mean.of(rejected),
            "chosen_reward_std": Std.of(chosen),
            "rejected_reward_std": Std.of(rejected),
            "num_pairs": Sum(len(losses)),
        },
    )
