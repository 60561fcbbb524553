"""Policy gradient on another policy's samples, weighted by importance. ``T`` scored tokens, ``S`` sequences.

One name, two forms of batch. With ``behavior_log_probs`` the fields are token-aligned and the loss is a mean. With
``target_tokens`` the batch is in Tinker's convention (see ``tinker.py``): ``logprobs`` and ``advantages`` belong to
predictions, and the loss is the plain sum that Tinker documents, unless the caller passes a ``reduction``."""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import Field
from torch import Tensor

from gradwire_losses.advantages import rewards_to_go
from gradwire_losses.batch import Batch, BatchError, Scores, segment_sum, select
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, REF_LOG_PROBS, ROW_TOKENS, ROWS_OR_TOKENS, row_field
from gradwire_losses.kl import KL_ESTIMATORS, KLEstimator, kl_estimate
from gradwire_losses.outputs import LossOutput, Max, Mean, Metric, Min, Sum, Term
from gradwire_losses.policy import probability_ratio
from gradwire_losses.reduction import Reduction, ReductionConfig, reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import PolicyConfig, ScoreName, register_loss
from gradwire_losses.sampler import sampler_metrics, sampler_metrics_of
from gradwire_losses.tinker import MASK, TARGET_TOKENS, written


class ImportanceSamplingConfig(ReductionConfig, PolicyConfig):
    """Arguments of ``importance_sampling``."""

    reduction: Reduction = Field(
        "token_mean",
        description="how tokens are averaged; the default with target_tokens is the sum. With behavior_log_probs "
        "[rows] there is one ratio per row and reduction must not be set",
    )
    beta: float = Field(
        0.1, ge=0, description="weight of the KL to the reference; without a reference the term is absent"
    )
    clip_ratio: float | None = Field(
        None,
        ge=1,
        description="upper bound of the ratio (truncated importance sampling), which trades bias for a bounded "
        "variance; not PPO's distance from 1. None is 10, and with target_tokens no bound",
    )
    kl_estimator: KLEstimator = Field("k3", description=KL_ESTIMATORS)


def _scores(config: ImportanceSamplingConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs"}
    return frozenset(needed | {"ref_logprobs"} if computed_by_engine(config, present) else needed)


def _behavior(batch: Batch) -> tuple[str, bool]:
    """The field with the other policy's log-probabilities, and whether the batch is in Tinker's convention."""
    tinker = batch.target_tokens is not None
    needed, foreign = ("logprobs", "behavior_log_probs") if tinker else ("behavior_log_probs", "logprobs")
    form = "with target_tokens" if tinker else "without target_tokens"
    if needed not in batch.fields:
        raise BatchError(f"importance_sampling needs {needed} {form}", field=needed, rule=f"required {form}")
    for name in (foreign, *(("rewards",) if tinker else ())):
        if name in batch.fields:
            raise BatchError(f"importance_sampling takes no {name} {form}", field=name, rule=f"not {form}")
    return needed, tinker


def _token_advantages(batch: Batch) -> Tensor:
    """``[T]``: the batch's advantages, or each token's rewards to go."""
    if (given := batch.get("advantages")) is not None:
        return given if batch.levels["advantages"] == "token" else batch.per_token("advantages")
    if batch.levels["rewards"] == "token":
        return rewards_to_go(batch["rewards"], batch.row_lengths)
    return batch.per_token("rewards")


def _predictions(batch: Batch, config: ImportanceSamplingConfig) -> tuple[Tensor, Tensor, ImportanceSamplingConfig]:
    """In Tinker's convention: which of ``[T]`` count, their number per row, and the arguments, with a sum by
    default."""
    there = written(batch)
    if "reduction" not in config.model_fields_set:
        config = config.model_copy(update={"reduction": "sum"})
    return there, segment_sum(there.long(), batch.row_lengths), config


def _loss_sum(weighted: Tensor, kl: Tensor | None, config: ImportanceSamplingConfig) -> Sum:
    whole = weighted if kl is None else weighted + config.beta * kl
    return Sum(whole.detach().double().sum())


def _row_rewards(batch: Batch) -> Mean:
    """Mean over rows with a scored token."""
    if "rewards" not in batch.fields:
        return Mean(0.0, 0)
    rewards, lengths = batch["rewards"], batch.row_lengths
    by_row = segment_sum(rewards, lengths) if batch.levels["rewards"] == "token" else rewards
    return Mean.of(select(by_row, lengths > 0))


def _sequence_advantages(batch: Batch) -> Tensor:
    """``[S]``: the batch's advantages or rewards; per-token ones are added."""
    name = "advantages" if "advantages" in batch.fields else "rewards"
    values = batch[name]
    return segment_sum(values, batch.row_lengths) if batch.levels[name] == "token" else values


@register_loss(
    "importance_sampling",
    config=ImportanceSamplingConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        row_field(
            "behavior_log_probs",
            ROWS_OR_TOKENS,
            "Log-probability of each token, or of each row's scored tokens together (one ratio per row), under the "
            "policy that wrote them; required without target_tokens.",
        ),
        row_field(
            "rewards",
            ROWS_OR_TOKENS,
            "Reward of each row, which counts for all of its tokens, or for each token, which counts for it and those "
            "before it (rewards to go); required without advantages.",
        ),
        row_field(
            "advantages", ROWS_OR_TOKENS, "Advantage of each row or token; overrides the advantages from rewards."
        ),
        REF_LOG_PROBS,
        replace(TARGET_TOKENS, required=False),
        row_field("logprobs", ROW_TOKENS, "behavior_log_probs of the targets, with target_tokens."),
        MASK,
    ),
    scores=_scores,
    metrics={
        "policy_loss": "the weighted surrogate",
        "is_ratio_mean": "mean importance ratio (per token, or per row for behavior_log_probs [rows])",
        "is_ratio_max": "largest ratio, before truncation",
        "is_ratio_min": "smallest ratio",
        "clipped_fraction": "share of ratios above clip_ratio, which give no gradient",
        "kl_divergence": "mean KL per token to the reference (nats), by kl_estimator; NaN without a reference",
        "advantage_mean": "mean advantage per token or row",
        "reward_mean": "mean over rows of the row's total reward; NaN without rewards",
        **sampler_metrics_of("behavior_log_probs [rows, tokens], or logprobs"),
        "loss:sum": "with target_tokens: the sum over predictions, whatever reduction says; NaN without",
    },
    reference="Precup et al. 2000; truncation: Ionides 2008, Truncated Importance Sampling; target_tokens: Tinker's "
    "documentation",
    formula="-1/T sum_t min(exp(log p_t - log b_t), c) A_t + beta KL_t, or with rows for tokens; with target_tokens "
    "-sum_t exp(log p_t - log b_t) A_t",
    streams=True,
)
def importance_sampling(batch: Batch, scores: Scores, config: ImportanceSamplingConfig) -> LossOutput:
    """Policy gradient on another policy's samples: advantages weighted by the ratio of the two policies' probabilities.

    With ``behavior_log_probs [rows, tokens]`` each token has its ratio and the loss is a mean over tokens, or as
    ``reduction`` says; a row's reward counts for all of its tokens, token rewards for the tokens up to them. With
    ``[rows]`` a row has one ratio, that of all of its scored tokens together, and the loss is a mean over rows; the KL
    of a row is the sum over its tokens. Beyond ``clip_ratio`` the loss is flat. Advantages are used unchanged: no
    baseline is subtracted. If a batch has both, the loss uses the advantages, and the rewards only enter the metrics.

    With ``target_tokens``, the loss is the sum over predictions of ratio times advantage, with ratios to ``logprobs``;
    a ``reduction`` overrides the sum.

    Raises:
        BatchError: The batch has neither ``rewards`` nor ``advantages``; or no
            ``behavior_log_probs``; or, with ``target_tokens``, other fields than ``logprobs`` and ``advantages``.
    """
    behavior, tinker = _behavior(batch)
    if not {"rewards", "advantages"} & set(batch.fields):
        raise BatchError(
            "importance_sampling needs rewards or advantages; the batch has neither",
            field="rewards",
            rule="rewards or advantages",
        )
    lengths, logprobs = batch.row_lengths, scores.logprobs
    reference = reference_logprobs(batch, scores)
    kl = None if reference is None else kl_estimate(logprobs, reference, config.kl_estimator)
    bound = math.inf if tinker else 10.0
    bound = bound if config.clip_ratio is None else config.clip_ratio
    by_token = batch.levels[behavior] == "token"
    old = batch[behavior]
    if tinker:
        there, lengths, config = _predictions(batch, config)
        logprobs, old = select(logprobs, there), select(old, there)
        ratio = probability_ratio(logprobs, old)
        advantages, kl = select(batch["advantages"], there), None if kl is None else select(kl, there)
    elif by_token:
        ratio, advantages = probability_ratio(logprobs, old), _token_advantages(batch)
    else:
        there = lengths > 0
        ratio = select(probability_ratio(segment_sum(logprobs, lengths), old), there)
        advantages = select(_sequence_advantages(batch), there)
    weighted = -(ratio.clamp(max=bound) * advantages)
    if by_token:
        policy = reduced(weighted, lengths, config)
        penalty = None if kl is None else reduced(kl, lengths, config)
    else:
        if config.reduction != "token_mean":
            raise BatchError(
                f"reduction {config.reduction!r} applies to per-token ratios: with one ratio per row the loss is a "
                "mean over "
                "rows. Leave reduction out, or pass behavior_log_probs [rows, tokens]",
                field="reduction",
                rule="only with behavior_log_probs [rows, tokens] or target_tokens",
            )
        policy = Term(weighted.sum(), len(ratio), "sequences")
        penalty = None if kl is None else Term(kl.sum(), len(ratio), "sequences")
    terms = {"policy": policy}
    if config.beta and penalty is not None:
        terms["kl"] = penalty.scaled(config.beta)
    metrics: dict[str, Metric] = {
        "policy_loss": policy.metric(),
        "is_ratio_mean": Mean.of(ratio),
        "is_ratio_max": Max.of(ratio),
        "is_ratio_min": Min.of(ratio),
        "clipped_fraction": Mean.of(ratio > bound),
        "kl_divergence": Mean(0.0, 0) if kl is None else Mean.of(kl),
        "advantage_mean": Mean.of(advantages),
        "reward_mean": _row_rewards(batch),
        **sampler_metrics(batch, logprobs, old if by_token else None),
        "loss:sum": _loss_sum(weighted, kl, config) if tinker else Mean(0.0, 0),
    }
    return LossOutput(terms, metrics)
