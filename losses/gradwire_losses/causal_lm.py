"""Supervised fine-tuning: negative log-likelihood of the scored tokens. ``T`` scored tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradwire_losses.batch import Batch, BatchError, Scores, segment_ids, select
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS, ROW_TOKENS, row_field
from gradwire_losses.outputs import ExpMean, LossOutput, Mean, Sum
from gradwire_losses.reduction import ReductionConfig, reduced
from gradwire_losses.registry import FieldSpec, ScoreName, register_loss

LABELS = FieldSpec(
    "labels",
    "int",
    ROW_TOKENS,
    "As in Hugging Face: the token's own id if it is learned, -100 if not.",
    aligned_with="input_ids",
)


class CausalLMConfig(ReductionConfig):
    """Arguments of ``causal_lm``."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of a target's probability that is spread over the whole vocabulary"
    )
    loss_type: Literal["nll", "dft"] = Field(
        "nll", description="dft: each token weighted by its own probability, without gradient (dynamic fine-tuning)"
    )


def _scores(config: CausalLMConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    return frozenset({"logprobs", "correct", "mean_logprobs"} if config.label_smoothing else {"logprobs", "correct"})


@register_loss(
    "causal_lm",
    config=CausalLMConfig,
    fields=(
        INPUT_IDS,
        LABELS,
        LOSS_MASK,
        PROMPT_LENGTHS,
        row_field("weights", ROW_TOKENS, "Weight of each token, in the loss and in the number it is averaged over."),
    ),
    scores=_scores,
    metrics={
        "perplexity": "exp of the mean negative log-likelihood of a learned token",
        "num_tokens": "number of learned tokens, without those of weight 0",
        "token_accuracy": "share of learned tokens that were the most probable one",
    },
    reference="Radford et al. 2018, Improving Language Understanding by Generative Pre-Training; dft: Wu et al. 2025 "
    "(arXiv 2508.05629)",
    formula="-1/T sum_t log p(x_t | x_<t); dft: -1/T sum_t sg(p_t) log p_t",
    streams=True,
)
def causal_lm(batch: Batch, scores: Scores, config: CausalLMConfig) -> LossOutput:
    """Mean negative log-likelihood of the learned tokens, over all tokens of the accumulation.

    The learned tokens are those that ``labels``, ``loss_mask`` and ``prompt_lengths`` leave. With ``weights`` the mean
    is weighted: it divides by the sum of weights instead of the number of tokens.

    Raises:
        BatchError: A weight is negative."""
    logprobs, lengths, weights = scores.logprobs, batch.row_lengths, batch.get("weights")
    nll = -logprobs
    losses = nll * logprobs.detach().exp() if config.loss_type == "dft" else nll
    if config.label_smoothing:
        losses = (1 - config.label_smoothing) * losses - config.label_smoothing * scores.mean_logprobs
    learned, correct = nll.detach(), scores.correct
    if weights is not None:
        on_host = batch.host["weights"]
        if (on_host < 0).any():
            row = int(segment_ids(lengths)[(on_host < 0).nonzero()[0]])
            raise BatchError(
                f"weights, row {row}: a negative weight; to lower a token's likelihood use cross_entropy",
                field="weights",
                row=row,
                rule="0 <= weight",
            )
        learned, correct = select(learned, on_host > 0), select(correct, on_host > 0)
    total, count = learned.double().sum(), len(learned)
    return LossOutput(
        terms={"nll": reduced(losses, lengths, config, weights)},
        metrics={
            "perplexity": ExpMean(total, count),
            "num_tokens": Sum(count),
            "token_accuracy": Mean.of(correct),
        },
    )
