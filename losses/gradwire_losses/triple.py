"""Preferences with a third response to learn from: TPO. ``P`` triples whose three responses have a scored token."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradwire_losses.batch import Batch, Scores, beside, segment_sum, select
from gradwire_losses.fields import PAIR_FIELDS, ROW_TOKENS
from gradwire_losses.outputs import LossOutput, Term
from gradwire_losses.preference import Pairs, pair_metrics, pair_metrics_of, smoothed_sigmoid
from gradwire_losses.registry import FieldSpec, LossConfig, register_loss


class TPOConfig(LossConfig):
    """Arguments of ``tpo``."""

    beta: float = Field(0.01, gt=0, description="weight of the difference of log-probabilities")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="assumed probability that a preference is inverted")
    loss_type: Literal["sigmoid", "hinge", "ipo", "tpo-l"] = Field(
        "sigmoid",
        description="sigmoid, hinge: of log-probabilities. ipo, tpo-l: of means over tokens, tpo-l with a margin",
    )
    tpo_alpha: float = Field(1.0, ge=0, description="weight of the gold responses' likelihood")
    tpo_l_gamma: float = Field(0.5, ge=0, description="for tpo-l: target margin of the chosen reward")


@register_loss(
    "tpo",
    config=TPOConfig,
    layout="pairs",
    fields=(
        *PAIR_FIELDS,
        FieldSpec(
            "gold_input_ids",
            "int",
            ROW_TOKENS,
            "Token ids of prompt and gold response, the best of the three.",
            required=True,
            ids=True,
            padding_mask="gold_attention_mask",
        ),
        FieldSpec(
            "gold_loss_mask",
            "bool",
            ROW_TOKENS,
            "1 for tokens of the gold response; by default all but the first.",
            aligned_with="gold_input_ids",
        ),
    ),
    metrics=pair_metrics_of(
        "beta times the response's log-probability, or its mean per token with loss_type ipo or tpo-l",
        num_pairs="number of triples whose three responses have a scored token; others are left out of all figures",
    )
    | {"nll_loss": "mean negative log-likelihood per token of the gold responses (nats)"},
    reference="Saeidi et al. 2024, Triple Preference Optimization (arXiv 2405.16681)",
    formula="-1/P sum log sigmoid(b (log p_c - log p_w)) + alpha NLL(gold); tpo-l: b (m_c - m_w) - gamma, m means",
    streams=True,
)
def tpo(batch: Batch, scores: Scores, config: TPOConfig) -> LossOutput:
    """Prefers the chosen to the rejected response, and in the same step learns a third, the gold one; no reference.

    The likelihood is a mean over all tokens of the gold responses, as in TRL, whose dataset calls them ``reference``.
    A triple in which a response has no scored token is ignored."""
    lengths = batch.row_lengths.view(-1, 3)
    complete = (lengths > 0).all(dim=1)
    counts = select(lengths, complete)
    sums = select(segment_sum(scores.logprobs, batch.row_lengths).view(-1, 3), complete)
    pairs = Pairs(sums[:, :2], beside(counts[:, :2], sums).to(sums.dtype), complete, int(counts[:, 0].sum()))
    values = pairs.mean_logprobs if config.loss_type in ("ipo", "tpo-l") else pairs.logprobs
    difference = values[:, 0] - values[:, 1]
    if config.loss_type == "hinge":
        losses = (1 - config.beta * difference).relu()
    elif config.loss_type == "ipo":
        losses = (difference - 0.5 / config.beta).square()
    else:
        margin = config.tpo_l_gamma if config.loss_type == "tpo-l" else 0.0
        losses = smoothed_sigmoid(config.beta * difference - margin, config.label_smoothing)
    nll = Term(-sums[:, 2].sum(), int(counts[:, 2].sum()), "tokens")
    terms = {"preference": Term(losses.sum(), len(losses), "pairs")}
    if config.tpo_alpha:
        terms["nll"] = nll.scaled(config.tpo_alpha)
    return LossOutput(terms, {"nll_loss": nll.metric()} | pair_metrics(pairs, config.beta * values))
