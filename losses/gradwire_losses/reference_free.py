"""Preference losses that need no reference: SimPO, ORPO, CPO. ``P`` pairs, ``m`` mean log-probabilities per token."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import PAIR_FIELDS
from gradwire_losses.kl import exp_minus_one
from gradwire_losses.outputs import LossOutput, Mean, Metric, Term
from gradwire_losses.preference import Pairs, log1mexp, pair_metrics, pair_metrics_of, read_pairs, smoothed_sigmoid
from gradwire_losses.registry import LossConfig, register_loss

MEAN_REWARD = "beta times the mean log-probability of the response's tokens"
CHOSEN_NLL = "mean negative log-likelihood per token of the chosen responses (nats), averaged by nll_reduction"
NLLReduction = Literal["sequence_mean", "token_mean"]


class NLLConfig(LossConfig):
    """Arguments of a loss that also trains on the chosen responses."""

    nll_reduction: NLLReduction = Field(
        "sequence_mean",
        description="how the chosen responses' likelihood is averaged: over pairs, of a token's mean (the papers), or "
        "over all of their tokens (TRL, within a micro-batch)",
    )


def nll_term(pairs: Pairs, config: NLLConfig) -> Term:
    """The negative log-likelihood of the chosen responses."""
    if config.nll_reduction == "sequence_mean":
        return Term(pairs.chosen_nll().sum(), len(pairs.logprobs), "pairs")
    return Term(-pairs.logprobs[:, 0].sum(), pairs.chosen_tokens, "tokens")


class SimPOConfig(LossConfig):
    """Arguments of ``simpo``."""

    beta: float = Field(2.0, gt=0, description="weight of the difference of mean log-probabilities")
    gamma: float = Field(0.5, ge=0, description="target margin of the chosen reward over the rejected one")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="assumed probability that a preference is inverted")


@register_loss(
    "simpo",
    config=SimPOConfig,
    layout="pairs",
    fields=PAIR_FIELDS,
    metrics=pair_metrics_of(MEAN_REWARD),
    reference="Meng et al. 2024, SimPO (arXiv 2405.14734)",
    formula="-1/P sum log sigmoid(b (m_c - m_w) - gamma)",
    streams=True,
)
def simpo(batch: Batch, scores: Scores, config: SimPOConfig) -> LossOutput:
    """Preference loss on mean log-probabilities, so that length gives no advantage; no reference, a target margin."""
    pairs = read_pairs(batch, scores)
    rewards = config.beta * pairs.mean_logprobs
    losses = smoothed_sigmoid(rewards[:, 0] - rewards[:, 1] - config.gamma, config.label_smoothing)
    return LossOutput({"preference": Term(losses.sum(), len(losses), "pairs")}, pair_metrics(pairs, rewards))


class ORPOConfig(NLLConfig):
    """Arguments of ``orpo``."""

    beta: float = Field(
        0.1, ge=0, description="weight of the odds ratio relative to the likelihood (lambda in the paper)"
    )


@register_loss(
    "orpo",
    config=ORPOConfig,
    layout="pairs",
    fields=PAIR_FIELDS,
    metrics=pair_metrics_of(MEAN_REWARD)
    | {
        "nll_loss": CHOSEN_NLL,
        "log_odds_ratio": "mean of the log of chosen odds over rejected odds",
        "log_odds_chosen": "mean of log sigmoid of that, as in the loss",
    },
    reference="Hong et al. 2024, ORPO (arXiv 2403.07691)",
    formula="NLL(chosen) - b/P sum log sigmoid(log odds(m_c) - log odds(m_w)), odds(m) = e^m / (1 - e^m)",
    streams=True,
)
def orpo(batch: Batch, scores: Scores, config: ORPOConfig) -> LossOutput:
    """Trains on the chosen responses and, in the same step, on their odds over the rejected ones; no reference.

    The likelihood is that of the response, as in the paper; TRL's includes the prompt.
    """
    pairs = read_pairs(batch, scores)
    means = pairs.mean_logprobs
    odds = means - log1mexp(means)
    log_ratio = odds[:, 0] - odds[:, 1]
    gain = F.logsigmoid(log_ratio)
    nll = nll_term(pairs, config)
    metrics: dict[str, Metric] = {
        "nll_loss": nll.metric(),
        "log_odds_ratio": Mean.of(log_ratio),
        "log_odds_chosen": Mean.of(gain),
    }
    terms = {"nll": nll, "odds": Term(-config.beta * gain.sum(), len(gain), "pairs")}
    return LossOutput(terms, metrics | pair_metrics(pairs, config.beta * means))


class CPOConfig(NLLConfig):
    """Arguments of ``cpo``."""

    beta: float = Field(0.1, gt=0, description="weight of the difference of log-probabilities")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="assumed probability that a preference is inverted")
    loss_type: Literal["sigmoid", "hinge", "ipo"] = Field(
        "sigmoid", description="as for dpo; ipo on mean log-probabilities"
    )
    cpo_alpha: float = Field(1.0, ge=0, description="weight of the chosen responses' likelihood")
    alpha: float = Field(
        0.0, description="AlphaPO: rewards (1 - p^-alpha) / alpha instead of log p, on means; 0 is log p"
    )


def _alpha_rewards(means: Tensor, alpha: float) -> Tensor:
    return -exp_minus_one(-alpha * means) / alpha


@register_loss(
    "cpo",
    config=CPOConfig,
    layout="pairs",
    fields=PAIR_FIELDS,
    metrics=pair_metrics_of(
        "beta times the response's log-probability, or its mean per token with loss_type ipo; with alpha, beta times "
        "(1 - p^-alpha) / alpha of that mean"
    )
    | {"nll_loss": CHOSEN_NLL},
    reference="Xu et al. 2024, Contrastive Preference Optimization (arXiv 2401.08417); alpha: Gupta et al. 2025, "
    "AlphaPO (arXiv 2501.03884)",
    formula="-1/P sum log sigmoid(b (log p_c - log p_w)) + alpha NLL(chosen)",
    streams=True,
)
def cpo(batch: Batch, scores: Scores, config: CPOConfig) -> LossOutput:
    """DPO with a uniform reference, plus the chosen responses' likelihood to stay near the data."""
    pairs = read_pairs(batch, scores)
    values = pairs.mean_logprobs if config.alpha or config.loss_type == "ipo" else pairs.logprobs
    values = _alpha_rewards(values, config.alpha) if config.alpha else values
    difference = values[:, 0] - values[:, 1]
    if config.loss_type == "hinge":
        losses = (1 - config.beta * difference).relu()
    elif config.loss_type == "ipo":
        losses = (difference - 0.5 / config.beta).square()
    else:
        losses = smoothed_sigmoid(config.beta * difference, config.label_smoothing)
    nll = nll_term(pairs, config)
    terms = {"preference": Term(losses.sum(), len(losses), "pairs")}
    if config.cpo_alpha:
        terms["nll"] = nll.scaled(config.cpo_alpha)
    return LossOutput(terms, {"nll_loss": nll.metric()} | pair_metrics(pairs, config.beta * values))
