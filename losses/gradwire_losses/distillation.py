"""Distillation: the policy learns from a teacher's distributions, computed by the server or stored with the batch.

``T`` scored tokens, ``K`` most probable teacher tokens at each, ``V`` vocabulary. ``reference_model`` names the
teacher; it must have the student's vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradwire_losses.advantages import rewards_to_go
from gradwire_losses.batch import Batch, BatchError, Scores
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS, REF_LOG_PROBS, row_field
from gradwire_losses.kl import kl_estimate
from gradwire_losses.outputs import LossOutput, Mean, Metric, Sum
from gradwire_losses.policy import probability_ratio
from gradwire_losses.reduction import ReductionConfig, reduced
from gradwire_losses.reference import reference_logprobs
from gradwire_losses.registry import (
    DivergenceConfig,
    FieldSpec,
    PolicyConfig,
    ScoreName,
    TemperatureConfig,
    register_loss,
)
from gradwire_losses.sampler import sampler_metrics, sampler_metrics_of

TOKEN_CANDIDATES = ("[rows, tokens, candidates]",)


class GKDConfig(DivergenceConfig, ReductionConfig):
    """Arguments of ``gkd``."""


@register_loss(
    "gkd",
    config=GKDConfig,
    fields=(INPUT_IDS, LOSS_MASK),
    scores=("divergence", "logprobs"),
    metrics={
        "divergence": "mean divergence per token (nats)",
        "nll": "mean negative log-likelihood per token under the student (nats)",
        "num_tokens": "scored tokens",
    },
    reference="Agarwal et al. 2023, On-Policy Distillation of Language Models (arXiv 2306.13649)",
    formula="1/T sum_t [beta KL(T_t || M_t) + (1 - beta) KL(S_t || M_t)], M = beta T + (1 - beta) S; "
    "beta 0: KL(T || S), beta 1: KL(S || T)",
    streams=True,
)
def gkd(batch: Batch, scores: Scores, config: GKDConfig) -> LossOutput:
    """Generalised knowledge distillation: the Jensen-Shannon divergence to the teacher over the whole vocabulary.

    The responses may come from the student, the teacher, or a data set.
    """
    term = reduced(scores.divergence, batch.row_lengths, config)
    return LossOutput(
        {"divergence": term},
        {
            "divergence": Mean.of(scores.divergence),
            "nll": Mean.of(-scores.logprobs),
            "num_tokens": Sum(batch.num_scored),
        },
    )


class OnPolicyDistillationConfig(PolicyConfig, ReductionConfig):
    """Arguments of ``on_policy_distillation``."""

    kl_coef: float = Field(1.0, gt=0, description="weight of the reverse KL in a token's advantage")
    gamma: float = Field(
        0.0,
        ge=0,
        le=1,
        description="discount of the KL of later tokens in a token's advantage; 0: only its own KL",
    )


def _on_policy_scores(config: OnPolicyDistillationConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    return frozenset({"logprobs"} if "ref_log_probs" in present else {"logprobs", "ref_logprobs"})


@register_loss(
    "on_policy_distillation",
    config=OnPolicyDistillationConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        replace(
            OLD_LOG_PROBS,
            required=False,
            description="Log-probability of each token under the policy that wrote it; if absent, the current policy.",
        ),
        replace(
            REF_LOG_PROBS, description="Log-probability of each token under the teacher, instead of reference_model."
        ),
    ),
    scores=_on_policy_scores,
    metrics={
        "policy_loss": "the weighted surrogate",
        "reverse_kl": "mean of log p_old - log teacher, an estimate of KL(student || teacher) per token (nats)",
        "advantage_mean": "mean advantage per token",
        "ratio_mean": "mean importance ratio per token",
        "approx_kl": "mean KL per token from the policy of old_log_probs to the current one, by k3 (nats)",
        "num_tokens": "scored tokens",
        **sampler_metrics_of("old_log_probs"),
    },
    reference="Lu et al. 2025, On-Policy Distillation (Thinking Machines Lab); Gu et al. 2023, MiniLLM "
    "(arXiv 2306.08543)",
    formula="-1/T sum_t r_t A_t, A_t = -kl_coef (log p_old(x_t) - log teacher(x_t))",
    streams=True,
)
def on_policy_distillation(batch: Batch, scores: Scores, config: OnPolicyDistillationConfig) -> LossOutput:
    """Policy gradient on the student's own samples: a token's advantage is its negative reverse KL to the teacher."""
    logprobs = scores.logprobs
    teacher = reference_logprobs(batch, scores)
    assert teacher is not None
    old = batch.get("old_log_probs")
    if old is None:
        old = logprobs.detach()
    reverse_kl = old - teacher
    advantages = rewards_to_go(-config.kl_coef * reverse_kl, batch.row_lengths, config.gamma)
    ratio = probability_ratio(logprobs, old)
    policy = reduced(-ratio * advantages, batch.row_lengths, config)
    metrics: dict[str, Metric] = {
        "policy_loss": policy.metric(),
        "reverse_kl": Mean.of(reverse_kl),
        "advantage_mean": Mean.of(advantages),
        "ratio_mean": Mean.of(ratio),
        "approx_kl": Mean.of(kl_estimate(old, logprobs, "k3")),
        "num_tokens": Sum(batch.num_scored),
        **sampler_metrics(batch, logprobs, batch.get("old_log_probs")),
    }
    return LossOutput({"policy": policy}, metrics)


class TopKDistillationConfig(TemperatureConfig, ReductionConfig):
    """Arguments of ``top_k_distillation``."""

    tail: Literal["bucket", "renormalise", "ignore"] = Field(
        "bucket",
        description="treatment of the teacher's other tokens. bucket: one further outcome with the remaining "
        "probability. renormalise: none; the teacher's K probabilities are scaled to sum to 1 (so logits work as "
        "well). ignore: left out of the sum",
    )


@register_loss(
    "top_k_distillation",
    config=TopKDistillationConfig,
    fields=(
        INPUT_IDS,
        LOSS_MASK,
        FieldSpec(
            "teacher_token_ids",
            "int",
            TOKEN_CANDIDATES,
            "The teacher's K most probable tokens at each token's position, in any order.",
            required=True,
            aligned_with="input_ids",
            ids=True,
        ),
        row_field(
            "teacher_log_probs",
            TOKEN_CANDIDATES,
            "Their log-probabilities under the teacher, at the temperature of this call.",
            required=True,
        ),
    ),
    scores=("candidate_logprobs",),
    metrics={
        "divergence": "mean KL(teacher || student) per token (nats)",
        "teacher_mass": "mean probability of the teacher's K tokens; 1 if tail is renormalise",
        "student_mass": "mean probability of these tokens under the student",
        "num_tokens": "scored tokens",
    },
    reference="Hinton et al. 2015, Distilling the Knowledge in a Neural Network (arXiv 1503.02531), over the top K",
    formula="1/T sum_t [sum_k q_tk (log q_tk - log p_tk) + q_rest (log q_rest - log p_rest)]",
    streams=True,
)
def top_k_distillation(batch: Batch, scores: Scores, config: TopKDistillationConfig) -> LossOutput:
    """KL from stored probabilities of a teacher's K most probable tokens to the student's; no teacher is needed.

    The student's probabilities are those over the whole vocabulary.

    Raises:
        BatchError: ``teacher_log_probs`` do not have the shape of ``teacher_token_ids``, or sum to more than 1."""
    teacher, student = batch["teacher_log_probs"], scores.candidate_logprobs
    if teacher.shape != student.shape:
        raise BatchError(
            f"teacher_log_probs has {teacher.shape[1]} candidates per token, but teacher_token_ids has "
            f"{student.shape[1]}",
            field="teacher_log_probs",
            rule="the shape of teacher_token_ids",
        )
    if config.tail == "renormalise":
        teacher = F.log_softmax(teacher, dim=-1)
    elif (largest := _largest_mass(batch.host["teacher_log_probs"])) > 1 + 1e-3:
        raise BatchError(
            f"the probabilities of a token's candidates add up to {largest:.4g}; unnormalised logits need "
            'tail="renormalise"',
            field="teacher_log_probs",
            rule="probabilities add up to at most 1",
        )
    mass, student_mass = teacher.exp().sum(dim=-1), student.exp().sum(dim=-1)
    losses = (teacher.exp() * (teacher - student)).sum(dim=-1)
    if config.tail == "bucket":
        losses = losses + _rest(mass, student_mass)
    term = reduced(losses, batch.row_lengths, config)
    return LossOutput(
        {"divergence": term},
        {
            "divergence": Mean.of(losses),
            "teacher_mass": Mean.of(mass),
            "student_mass": Mean.of(student_mass),
            "num_tokens": Sum(batch.num_scored),
        },
    )


def _largest_mass(log_probs: Tensor) -> float:
    return log_probs.exp().sum(dim=-1).max().item() if len(log_probs) else 0.0


def _rest(mass: Tensor, student_mass: Tensor) -> Tensor:
    """``q (log q - log p)`` of the remaining probabilities; 0 if the teacher leaves none."""
    tiny = torch.finfo(mass.dtype).eps
    q, p = (1 - mass).clamp(min=0), (1 - student_mass).clamp(min=tiny)
    return torch.where(q > tiny, q * (q.clamp(min=tiny).log() - p.log()), 0.0)
