"""Distillation on the student's own samples beyond ``on_policy_distillation``: from a teacher that reads another prompt
(SDFT, SDPO), and with weights by position (IW-OPD). ``T`` scored tokens, ``S`` rows.

Each row of a self-distillation has two sequences with the same response: after the student's prompt, and after the
teacher's, which holds what the student shall learn to do without (a demonstration, a solution, feedback).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Scores, pad, segment_sum, select, spread, unpad
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS, PROMPT_LENGTHS, REF_LOG_PROBS, ROW_TOKENS
from gradwire_losses.outputs import LossOutput, Mean, Metric, Sum, Term
from gradwire_losses.policy import clipped_surrogate, probability_ratio
from gradwire_losses.reduction import Reduction, ReductionConfig, reduced
from gradwire_losses.reference import computed_by_engine, reference_logprobs
from gradwire_losses.registry import FieldSpec, PolicyConfig, ScoreName, register_loss


class SelfDistillationConfig(PolicyConfig, ReductionConfig):
    """Arguments of ``sdft``."""

    is_clip: float | None = Field(
        2.0,
        gt=0,
        description="with old_log_probs: a token's loss is multiplied by its ratio to them, at most this; None: not",
    )
    reduction: Reduction = Field("sequence_mean", description=ReductionConfig.model_fields["reduction"].description)


class SDPOConfig(SelfDistillationConfig):
    """Arguments of ``sdpo``."""

    distillation_weight: float = Field(
        1.0, ge=0, le=1, description="weight of the distillation; the rest is that of the clipped surrogate"
    )
    clip_epsilon: float = Field(0.2, gt=0, description="for the surrogate: range of the ratio around 1")
    clip_epsilon_high: float | None = Field(None, gt=0, description="upper clip range; clip_epsilon if None")


OLD = replace(
    OLD_LOG_PROBS,
    required=False,
    description="Log-probability of each token under the policy that wrote it; if absent, the current policy.",
)
TEACHER = (
    FieldSpec(
        "teacher_input_ids",
        "int",
        ROW_TOKENS,
        "Token ids of the teacher's prompt followed by the same response.",
        required=True,
        ids=True,
        padding_mask="teacher_attention_mask",
    ),
    FieldSpec(
        "teacher_loss_mask",
        "bool",
        ROW_TOKENS,
        "1 for the tokens of that response which loss_mask scores.",
        required=True,
        aligned_with="teacher_input_ids",
    ),
)
METRICS = {
    "distillation_loss": "mean over tokens of the weighted loss",
    "reverse_kl": "mean of log p - log teacher per token, an estimate of KL(student || teacher) (nats)",
    "teacher_nll": "mean negative log-likelihood per token under the teacher (nats)",
    "is_ratio_mean": "mean weight of is_clip; 1 without",
    "num_tokens": "scored tokens of the student",
}
FORMULA = (
    "1/S sum_i 1/|y_i| sum_t min(r_t, is_clip) sg(log p_t - log teacher_t) log p_t, teacher_t after its own prompt"
)


def _scores(config: PolicyConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    return frozenset({"logprobs", "ref_logprobs"} if computed_by_engine(config, present) else {"logprobs"})


def _sides(batch: Batch, values: Tensor) -> tuple[Tensor, Tensor]:
    """``[both sequences' tokens] -> [T], [T]``: the student's and the teacher's tokens."""
    of_student = spread(torch.arange(batch.num_sequences) % 2 == 0, batch.row_lengths)
    return select(values, of_student), select(values, ~of_student)


def _distillation(
    batch: Batch, scores: Scores, config: SelfDistillationConfig
) -> tuple[Tensor, Tensor, Tensor, dict[str, Metric]]:
    """``[T]`` losses, ``[T]`` log-probabilities and ``[S]`` lengths of the student, and the metrics.

    Raises:
        BatchError: The two sequences of a row do not have the same scored tokens.
    """
    lengths = batch.row_lengths.view(-1, 2)
    own_tokens, theirs = _sides(batch, batch.host.targets)
    uneven = lengths[:, 0] != lengths[:, 1]
    if bool(uneven.any()) or not torch.equal(own_tokens, theirs):
        wrong = uneven.clone()
        if not bool(uneven.any()):
            wrong = segment_sum((own_tokens != theirs).long(), lengths[:, 0]) > 0
        row = int(wrong.nonzero()[0])
        raise BatchError(
            f"teacher_input_ids, row {row}: the tokens that teacher_loss_mask scores are not those that loss_mask "
            f"scores ({lengths[row, 1]} and {lengths[row, 0]} tokens): both are the student's response",
            field="teacher_input_ids",
            row=row,
            rule="the same response after both prompts",
        )
    logprobs, live = _sides(batch, scores.logprobs)
    given = reference_logprobs(batch, scores)
    teacher = live.detach() if given is None else _sides(batch, given)[1]
    gap = (logprobs - teacher).detach()
    losses, weight = gap * logprobs, torch.ones_like(gap)
    if config.is_clip is not None and "old_log_probs" in batch.fields:
        old = _sides(batch, batch["old_log_probs"])[0]
        weight = probability_ratio(logprobs.detach(), old).clamp(max=config.is_clip)
        losses = losses * weight
    return (
        losses,
        logprobs,
        lengths[:, 0],
        {
            "distillation_loss": Mean.of(losses),
            "reverse_kl": Mean.of(gap),
            "teacher_nll": Mean.of(-teacher),
            "is_ratio_mean": Mean.of(weight),
            "num_tokens": Sum(len(losses)),
        },
    )


@register_loss(
    "sdft",
    config=SelfDistillationConfig,
    fields=(INPUT_IDS, LOSS_MASK, OLD, *TEACHER),
    scores=_scores,
    metrics=METRICS,
    reference="Shenfeld et al. 2026, Self-Distillation Enables Continual Learning (arXiv 2601.19897)",
    formula=FORMULA,
    streams=True,
)
def sdft(batch: Batch, scores: Scores, config: SelfDistillationConfig) -> LossOutput:
    """Learns from itself given more: the policy's own samples, judged by a teacher whose prompt holds a demonstration.

    ``reference_model`` names the teacher: ``"base"``, ``"ema"``, any other; without it, the current policy. The loss
    is that of the sampled tokens (TRL: ``distillation_mode="sampled_token"``).
    """
    losses, _, lengths, metrics = _distillation(batch, scores, config)
    return LossOutput({"distillation": reduced(losses, lengths, config)}, metrics)


@register_loss(
    "sdpo",
    config=SDPOConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        OLD,
        FieldSpec(
            "advantages",
            "float",
            ("[rows]", "[rows, tokens]"),
            "Advantage of each row or token; required with distillation_weight below 1.",
            aligned_with="input_ids",
        ),
        *TEACHER,
    ),
    scores=_scores,
    metrics=METRICS | {"policy_loss": "the clipped surrogate; NaN with distillation_weight 1"},
    reference="Huebotter et al. 2026, Reinforcement Learning via Self-Distillation (arXiv 2601.20802)",
    formula="w ("
    + FORMULA
    + ") + (1 - w) 1/S sum_i 1/|y_i| sum_t max(-r_t A_t, -clip(r_t) A_t), w distillation_weight",
    streams=True,
)
def sdpo(batch: Batch, scores: Scores, config: SDPOConfig) -> LossOutput:
    """Learns from feedback by self-distillation: the teacher is the policy that has read a solution or an error.

    As ``sdft``, mixed with PPO's surrogate by ``distillation_weight``.

    Raises:
        BatchError: ``distillation_weight`` is below 1 and the batch has no advantages."""
    losses, logprobs, lengths, metrics = _distillation(batch, scores, config)
    terms: dict[str, Term] = {}
    if config.distillation_weight:
        terms["distillation"] = reduced(losses, lengths, config).scaled(config.distillation_weight)
    policy: Metric = Mean(0.0, 0)
    if config.distillation_weight < 1:
        if "advantages" not in batch.fields:
            raise BatchError(
                "distillation_weight below 1 needs advantages, for the other part of the loss",
                field="advantages",
                rule="required with distillation_weight below 1",
            )
        advantages = _sides(batch, batch.per_token("advantages"))[0]
        old = batch.get("old_log_probs")
        ratio = probability_ratio(logprobs, logprobs.detach() if old is None else _sides(batch, old)[0])
        high = config.clip_epsilon if config.clip_epsilon_high is None else config.clip_epsilon_high
        surrogate, _ = clipped_surrogate(ratio, advantages, 1 - config.clip_epsilon, 1 + high)
        term = reduced(surrogate, lengths, config)
        policy = term.metric()
        terms["policy"] = term.scaled(1 - config.distillation_weight)
    return LossOutput(terms, metrics | {"policy_loss": policy})


class IWOPDConfig(PolicyConfig, ReductionConfig):
    """Arguments of ``iw_opd``."""

    gamma: float = Field(
        0.5, ge=0, description="how much more the first token counts than the last; 0: all tokens alike"
    )


@register_loss(
    "iw_opd",
    config=IWOPDConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        PROMPT_LENGTHS,
        OLD,
        replace(
            REF_LOG_PROBS, description="Log-probability of each token under the teacher, instead of reference_model."
        ),
    ),
    scores=lambda config, present: frozenset(
        {"logprobs"} if "ref_log_probs" in present else {"logprobs", "ref_logprobs"}
    ),
    metrics={
        "policy_loss": "the weighted policy gradient",
        "reverse_kl": "mean of log p_old - log teacher, an estimate of KL(student || teacher) per token (nats)",
        "advantage_mean": "mean weighted advantage per token",
        "weight_mean": "mean weight per token, between 1 and 1 + gamma",
        "num_tokens": "scored tokens",
    },
    reference="On the Position Bias of On-Policy Distillation 2026 (arXiv 2606.22600)",
    formula="-1/T sum_t w_t A_t log p_t, A_t = log teacher_t - log p_old,t, "
    "w_t = 1 + gamma (1 - sum_{u < t} |A_u| / sum_u |A_u|)",
    streams=True,
)
def iw_opd(batch: Batch, scores: Scores, config: IWOPDConfig) -> LossOutput:
    """On-policy distillation that counts early tokens more, from which later differences to the teacher follow.

    A token's weight falls with the share of its row's differences that lies before it. Neither weights nor advantages
    have a gradient; there is no ratio, so each batch is for one step."""
    logprobs, lengths = scores.logprobs, batch.row_lengths
    teacher, given = reference_logprobs(batch, scores), batch.get("old_log_probs")
    assert teacher is not None
    gap = teacher - (logprobs.detach() if given is None else given)
    sizes = gap.abs()
    total = segment_sum(sizes, lengths)
    before = unpad(pad(sizes, lengths)[0].cumsum(1), lengths) - sizes
    weights = 1 + config.gamma * (1 - before / spread(total, lengths).clamp(min=1e-8))
    advantages = weights * gap
    term = reduced(-logprobs * advantages, lengths, config)
    return LossOutput(
        {"policy": term},
        {
            "policy_loss": term.metric(),
            "reverse_kl": Mean.of(-gap),
            "advantage_mean": Mean.of(advantages),
            "weight_mean": Mean.of(weights),
            "num_tokens": Sum(batch.num_scored),
        },
    )
