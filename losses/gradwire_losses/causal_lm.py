"""Supervised fine-tuning: negative log-likelihood of the scored tokens. ``T`` scored tokens."""

from __future__ import annotations

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, ROW_TOKENS
from gradwire_losses.outputs import ExpMean, LossOutput, Mean, Sum, Term
from gradwire_losses.registry import FieldSpec, LossConfig, register_loss

LABELS = FieldSpec(
    "labels",
    "int",
    ROW_TOKENS,
    "As in Hugging Face: the token's own id where it is learned, -100 where not.",
    aligned_with="input_ids",
)


@register_loss(
    "causal_lm",
    fields=(INPUT_IDS, LABELS, LOSS_MASK),
    scores=("logprobs", "correct"),
    metrics={
        "perplexity": "exp of the mean negative log-likelihood of a token",
        "num_tokens": "learned tokens",
        "token_accuracy": "share of learned tokens that were the most probable one",
    },
    reference="Radford et al. 2018, Improving Language Understanding by Generative Pre-Training",
    formula="-1/T sum_t log p(x_t | x_<t)",
    streams=True,
)
def causal_lm(batch: Batch, scores: Scores, config: LossConfig) -> LossOutput:
    """Mean negative log-likelihood of the learned tokens, over all tokens of the accumulation."""
    nll = -scores.logprobs
    total, count = nll.detach().double().sum().item(), batch.num_scored
    return LossOutput(
        terms={"nll": Term(nll.sum(), count, "tokens")},
        metrics={
            "perplexity": ExpMean(total, count),
            "num_tokens": Sum(count),
            "token_accuracy": Mean.of(scores.correct.float()),
        },
    )
