"""Regression of the policy's log-ratio on an advantage: A*-PO. ``S`` rows with a scored token."""

from __future__ import annotations

import torch
from pydantic import Field

from gradwire_losses.batch import Batch, Scores, segment_sum, select
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS, ROWS_OR_TOKENS, row_field
from gradwire_losses.outputs import LossOutput, Mean, Term
from gradwire_losses.reference import reference_logprobs
from gradwire_losses.registry import PolicyConfig, ScoreName, register_loss


class A2POConfig(PolicyConfig):
    """Arguments of ``a2po``."""

    beta2: float = Field(1e-3, gt=0, description="weight of the log-ratio to the reference")


def _scores(config: A2POConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    return frozenset({"logprobs"} if "ref_log_probs" in present else {"logprobs", "ref_logprobs"})


@register_loss(
    "a2po",
    config=A2POConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        PROMPT_LENGTHS,
        row_field("rewards", ("[rows]",), "Reward of each response.", required=True),
        row_field(
            "optimal_values",
            ("[rows]",),
            "V* of each prompt: beta1 log mean_i exp(r_i / beta1) over responses of the reference "
            "(gradwire.rl.advantages.optimal_values).",
            required=True,
        ),
        row_field(
            "ref_log_probs",
            ROWS_OR_TOKENS,
            "Log-probability of each response, or of each of its tokens, under the reference, instead of "
            "reference_model.",
        ),
    ),
    scores=_scores,
    metrics={
        "implicit_reward": "mean over responses of beta2 times the log-ratio to the reference of the response's "
        "tokens together",
        "advantage_mean": "mean of the rewards minus their prompts' optimal values",
        "reward_mean": "mean reward",
    },
    reference="Brantley et al. 2025, Accelerating RL for LLM Reasoning with Optimal Advantage Regression "
    "(arXiv 2505.20686)",
    formula="1/S sum_i (beta2 (log p(y_i) - log ref(y_i)) - (R_i - V*_i))^2",
    streams=True,
)
def a2po(batch: Batch, scores: Scores, config: A2POConfig) -> LossOutput:
    """A*-PO: least squares of a response's log-ratio to the reference on its reward minus the prompt's optimal value.

    One fresh sample a prompt suffices; the optimal value is estimated once, from the reference's samples. Sums over a
    response's scored tokens. A row without one is ignored."""
    lengths = batch.row_lengths
    there = lengths > 0
    if batch.levels.get("ref_log_probs") == "sequence":
        reference = batch["ref_log_probs"]
    else:
        per_token = reference_logprobs(batch, scores)
        assert per_token is not None
        reference = segment_sum(per_token, lengths)
    implicit = select(config.beta2 * (segment_sum(scores.logprobs, lengths) - reference), there)
    rewards = select(batch["rewards"], there)
    target = rewards - select(batch["optimal_values"], there)
    losses = torch.square(implicit - target)
    return LossOutput(
        {"regression": Term(losses.sum(), len(losses), "sequences")},
        {
            "implicit_reward": Mean.of(implicit),
            "advantage_mean": Mean.of(target),
            "reward_mean": Mean.of(rewards),
        },
    )
