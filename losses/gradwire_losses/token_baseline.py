"""A baseline for every token of a group's responses: the mean reward, weighted by how far the gradient may vary there.

``B`` prompts, ``S`` responses of all prompts, ``T`` scored tokens of all responses.
"""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.batch import Batch, Scores, beside, pad, segment_ids, segment_sum, spread, unpad
from gradwire_losses.fields import GROUP_POLICY_FIELDS, SAMPLE_TOKENS, sample_field
from gradwire_losses.group_config import GRPOConfig
from gradwire_losses.grpo import (
    COMPARED_TOKENS,
    GRPO_METRICS,
    group_objective,
    grpo_scores,
    needs_whole_batch,
    old_logprobs,
    reward_advantages,
)
from gradwire_losses.outputs import LossOutput
from gradwire_losses.reduction import Reduction
from gradwire_losses.registry import ScoreName, register_loss
from gradwire_losses.sampler import sampler_weights


class TokenBaselineConfig(GRPOConfig):
    """Arguments of ``optimal_token_baseline``."""

    zero_tail: bool = Field(
        True, description="no baseline at positions that only the longest response of its group reaches, as in verl"
    )
    beta: float = Field(0.0, ge=0, description=GRPOConfig.model_fields["beta"].description)
    scale_rewards: bool = Field(False, description="always False: these advantages are not scaled")
    reduction: Reduction = Field("token_mean", description="mean over tokens")

    @model_validator(mode="after")
    def _advantages_are_its_own(self) -> Self:
        others = self.baseline != "mean" or self.advantage_scale is not None
        if others or self.scale_rewards or self.whiten_advantages or self.kl_in_reward:
            raise ValueError(
                "this loss has its own advantages: baseline, scale_rewards, advantage_scale, whiten_advantages and "
                "kl_in_reward belong to grpo"
            )
        return self


def optimal_token_advantages(
    rewards: Tensor,
    energies: Tensor,
    places: Tensor,
    row_lengths: Tensor,
    group_sizes: Tensor,
    *,
    zero_tail: bool,
) -> Tensor:
    """``[T]``: ``R_i - B_t``, ``B_t = sum_i R_i W_it / sum_i W_it`` over the group's responses with a token at place t.

    ``W_it`` is the sum of the energies up to t. Where only one response of a group has tokens it is 0.

    Args:
        rewards: ``[S]``.
        energies: ``[T]``: the squared length of the gradient in the logits, ``1 - 2 p_t + sum_v p_t(v)^2``.
        places: ``[T]`` int64, on the host: tokens of a group with equal places are compared.
        row_lengths: ``[S]``.
        group_sizes: ``[B]``.
        zero_tail: Whether ``B_t`` is 0 beyond the last place of all other responses of the group.
    """
    returns = spread(rewards, row_lengths)
    reached = unpad(pad(energies, row_lengths)[0].cumsum(1), row_lengths)
    owners = segment_ids(row_lengths)
    groups = segment_ids(group_sizes)[owners]
    width = int(places.max()) + 1 if len(places) else 1
    cells = beside(groups * width + places, returns)
    empty = returns.new_zeros(len(group_sizes) * width)
    above = empty.index_add(0, cells, returns * reached)[cells]
    baseline = above / (empty.index_add(0, cells, reached)[cells] + 1e-8)
    if zero_tail:
        ends = torch.zeros_like(row_lengths).scatter_reduce(0, owners, places + 1, "amax")
        by_group, _ = pad(ends, group_sizes)
        second = by_group.topk(2, dim=1).values[:, 1] if by_group.shape[1] > 1 else torch.zeros_like(group_sizes)
        baseline = torch.where(beside(places >= second[groups], baseline), 0.0, baseline)
    alone = segment_sum((row_lengths > 0).long(), group_sizes) == 1
    return torch.where(beside(alone[groups], returns), 0.0, returns - baseline)


def _scores(config: TokenBaselineConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed = grpo_scores(config, present)
    return needed if present & {"advantages", "sum_pi_squared"} else needed | {"collision"}


def _objective(batch: Batch, scores: Scores, config: TokenBaselineConfig, places: Tensor) -> LossOutput:
    if "advantages" in batch.fields or "rewards" not in batch.fields:
        return group_objective(batch, scores, config, *reward_advantages(batch, scores, config))
    old = old_logprobs(batch, scores)
    squares = batch["sum_pi_squared"] if "sum_pi_squared" in batch.fields else scores.collision.exp()
    energies = 1 - 2 * old.exp() + squares
    weights = sampler_weights(batch, old, config)
    if weights is not None:
        energies = energies * weights.square()
    advantages = optimal_token_advantages(
        batch["rewards"], energies, places, batch.row_lengths, batch.group_sizes, zero_tail=config.zero_tail
    )
    return group_objective(batch, scores, config, advantages, advantages)


FIELDS = (
    *GROUP_POLICY_FIELDS,
    sample_field(
        "sum_pi_squared",
        SAMPLE_TOKENS,
        "Sum over the vocabulary of the squared probabilities at each response token under the policy of "
        "old_log_probs; if absent, under the current policy.",
    ),
)
REFERENCE = (
    "verl 0.9.1's estimator of this name; Greensmith et al. 2004, Variance Reduction Techniques for Gradient Estimates"
)
FORMULA = (
    "1/T sum_t max(-r_t A_t, -clip(r_t) A_t), A_t = R_i - sum_j R_j W_jt / sum_j W_jt, "
    "W_jt = sum_{u <= t} (1 - 2 p_ju + sum_v p_ju(v)^2)"
)
_estimator = partial(
    register_loss,
    config=TokenBaselineConfig,
    layout="groups",
    fields=FIELDS,
    scores=_scores,
    metrics=GRPO_METRICS,
    reference=REFERENCE,
    streams=lambda config, present: not needs_whole_batch(config),
    whole_batch=COMPARED_TOKENS,
)


@_estimator("optimal_token_baseline", formula=FORMULA + ", over the responses with a scored token at t")
def optimal_token_baseline(batch: Batch, scores: Scores, config: TokenBaselineConfig) -> LossOutput:
    """GRPO whose baseline is one of its own at each position: the rewards' mean, weighted by the gradient so far.

    A response whose gradient has varied more up to a token has more weight in that token's baseline. A group of one
    has advantage 0 (verl: its reward). With ``sampler_correction`` the summands of W are multiplied by the squared
    weights. ``advantages`` in the batch are used unchanged."""
    places = batch.own_positions - (batch.lengths.cumsum(0) - batch.lengths)[segment_ids(batch.row_lengths)]
    return _objective(batch, scores, config, places)


@_estimator("tir_optimal_token_baseline", formula=FORMULA + ", t counts scored tokens only")
def tir_optimal_token_baseline(batch: Batch, scores: Scores, config: TokenBaselineConfig) -> LossOutput:
    """``optimal_token_baseline`` for responses with tool results: tokens are compared by their number among those that
    the policy wrote, whatever lies between."""
    owners = segment_ids(batch.row_lengths)
    places = torch.arange(len(owners)) - (batch.row_lengths.cumsum(0) - batch.row_lengths)[owners]
    return _objective(batch, scores, config, places)
