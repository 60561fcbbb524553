"""Direct preference optimisation and its variants. ``P`` pairs.

``c`` and ``w`` are the log-ratios of the chosen and the rejected response to the reference, ``D = c - w``, ``s`` the
logistic function. Formulas: :data:`LOSS_TYPES`. Names as in TRL 1.16 (earlier ones too: ``aot_pair`` is what it now
calls ``aot_unpaired``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.batch import Batch, BatchError, Scores, beside, segment_ids, select
from gradwire_losses.fields import PAIR_FIELDS, PAIR_REF_LOG_PROBS
from gradwire_losses.kl import exp_minus_one
from gradwire_losses.outputs import LossOutput, Mean, Term
from gradwire_losses.preference import (
    PAIR_METRICS,
    pair_metrics,
    read_pairs,
    reference_pairs,
    sequence_means,
    smoothed_sigmoid,
)
from gradwire_losses.registry import ReferenceConfig, ScoreName, register_loss

LossType = Literal[
    "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_pair",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft",
]  # fmt: skip
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

OVER_DIFFERENCES = frozenset({"sigmoid", "robust", "hinge", "ipo", "exo_pair", "discopop", "sigmoid_norm", "sft"})
"""Types that depend only on the responses' scores, which an f-divergence can replace."""


class DPOConfig(ReferenceConfig):
    """Arguments of ``dpo``."""

    beta: float = Field(
        0.1, gt=0, description="weight of the log-ratio to the reference; higher stays closer to the reference"
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed probability that a preference is inverted: sigmoid, robust, exo_pair, aot",
    )
    loss_type: LossType | tuple[LossType, ...] = Field("sigmoid", description="one, or several that are added")
    loss_weights: tuple[float, ...] | None = Field(None, description="a weight for each loss_type; 1 by default")
    f_divergence_type: Divergence = Field(
        "reverse_kl", description="divergence whose derivative replaces the log-ratio"
    )
    f_alpha_divergence_coef: float = Field(0.5, description="alpha of alpha_divergence; 1 is reverse_kl")
    discopop_tau: float = Field(0.05, gt=0, description="temperature of discopop's mixture")
    ld_alpha: float | None = Field(
        None,
        ge=0,
        le=1,
        description="LD-DPO (Liu et al. 2024, arXiv 2409.06411): weight of tokens beyond the other response's length",
    )
    use_weighting: bool = Field(False, description="WPO: weight pairs by how probable the policy finds their responses")

    @property
    def loss_types(self) -> tuple[LossType, ...]:
        return self.loss_type if isinstance(self.loss_type, tuple) else (self.loss_type,)

    @property
    def weights(self) -> tuple[float, ...]:
        return self.loss_weights or (1.0,) * len(self.loss_types)

    @model_validator(mode="after")
    def _arguments_fit(self) -> Self:
        if not self.loss_types or len(self.weights) != len(self.loss_types):
            raise ValueError(f"{len(self.weights)} loss_weights for {len(self.loss_types)} loss types")
        if "exo_pair" in self.loss_types and not self.label_smoothing:
            raise ValueError("exo_pair is infinite without label_smoothing; 1e-3 is common")
        unfit = set(self.loss_types) - OVER_DIFFERENCES
        if self.f_divergence_type != "reverse_kl" and unfit:
            raise ValueError(f"{', '.join(sorted(unfit))} is defined with f_divergence_type reverse_kl only")
        return self


@dataclass(frozen=True)
class LogRatios:
    """Log-ratios of ``P`` pairs, chosen in column 0, rejected in column 1.

    Attributes:
        ratios: ``[P, 2]``, policy to reference.
        scores: ``[P, 2]``, the ratios, or their transform by an f-divergence.
        logprobs, ref_logprobs: ``[P, 2]``.
        lengths: ``[P, 2]``, number of tokens.
        nll: ``[P]``, negative log-likelihood of the chosen response.
    """

    ratios: Tensor
    scores: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    lengths: Tensor
    nll: Tensor

    @property
    def chosen(self) -> Tensor:
        return self.ratios[:, 0]

    @property
    def rejected(self) -> Tensor:
        return self.ratios[:, 1]

    @property
    def difference(self) -> Tensor:
        return self.scores[:, 0] - self.scores[:, 1]

    @property
    def mean_difference(self) -> Tensor:
        means = self.scores / self.lengths
        return means[:, 0] - means[:, 1]


def _robust(r: LogRatios, config: DPOConfig) -> Tensor:
    z, e = config.beta * r.difference, config.label_smoothing
    return (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)


def _exo_pair(r: LogRatios, config: DPOConfig) -> Tensor:
    z, e = config.beta * r.difference, config.label_smoothing
    return z.sigmoid() * (F.logsigmoid(z) - math.log1p(-e)) + (-z).sigmoid() * (F.logsigmoid(-z) - math.log(e))


def _nca_pair(r: LogRatios, config: DPOConfig) -> Tensor:
    c, w = config.beta * r.chosen, config.beta * r.rejected
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-w)


def _bco_pair(r: LogRatios, config: DPOConfig) -> Tensor:
    return -F.logsigmoid(config.beta * r.chosen) - F.logsigmoid(-config.beta * r.rejected)


def _sppo_hard(r: LogRatios, config: DPOConfig) -> Tensor:
    target = 0.5 / config.beta
    return (r.chosen - target).square() + (r.rejected + target).square()


def _aot(r: LogRatios, config: DPOConfig) -> Tensor:
    policy = (r.logprobs[:, 0] - r.logprobs[:, 1]).sort().values
    reference = (r.ref_logprobs[:, 0] - r.ref_logprobs[:, 1]).sort().values
    return smoothed_sigmoid(config.beta * (policy - reference), config.label_smoothing)


def _aot_unpaired(r: LogRatios, config: DPOConfig) -> Tensor:
    difference = r.chosen.sort().values - r.rejected.sort().values
    return smoothed_sigmoid(config.beta * difference, config.label_smoothing)


def _apo_zero(r: LogRatios, config: DPOConfig) -> Tensor:
    return (-config.beta * r.chosen).sigmoid() + (config.beta * r.rejected).sigmoid()


def _apo_down(r: LogRatios, config: DPOConfig) -> Tensor:
    return (config.beta * r.chosen).sigmoid() + (-config.beta * (r.chosen - r.rejected)).sigmoid()


def _discopop(r: LogRatios, config: DPOConfig) -> Tensor:
    z = config.beta * r.difference
    mixture = (z / config.discopop_tau).sigmoid()
    return -F.logsigmoid(z) * (1 - mixture) + (1 + exp_minus_one(-z)) * mixture


LOSS_TYPES: Mapping[LossType, tuple[str, Callable[[LogRatios, DPOConfig], Tensor]]] = {
    "sigmoid": (
        "-(1-e) log s(bD) - e log s(-bD); e > 0 is cDPO. Rafailov et al. 2023 (2305.18290)",
        lambda r, config: smoothed_sigmoid(config.beta * r.difference, config.label_smoothing),
    ),
    "robust": ("[-(1-e) log s(bD) + e log s(-bD)] / (1-2e). Chowdhury et al. 2024 (2403.00409)", _robust),
    "hinge": (
        "relu(1 - bD). Zhao et al. 2023, SLiC-HF (2305.10425)",
        lambda r, config: (1 - config.beta * r.difference).relu(),
    ),
    "ipo": (
        "(c/|c| - w/|w| - 1/2b)^2, a token's mean. Azar et al. 2023 (2310.12036)",
        lambda r, config: (r.mean_difference - 0.5 / config.beta).square(),
    ),
    "exo_pair": ("KL([s(bD), s(-bD)] || [1-e, e]). Ji et al. 2024 (2402.00856)", _exo_pair),
    "nca_pair": ("-log s(bc) - 1/2 log s(-bc) - 1/2 log s(-bw). Chen et al. 2024 (2402.05369)", _nca_pair),
    "bco_pair": ("-log s(bc) - log s(-bw). Jung et al. 2024 (2404.04656)", _bco_pair),
    "sppo_hard": ("(c - 1/2b)^2 + (w + 1/2b)^2. Wu et al. 2024 (2405.00675)", _sppo_hard),
    "aot": (
        "sigmoid on the batch's sorted pair differences, against the reference's. Melnyk et al. 2024 (2406.05882)",
        _aot,
    ),
    "aot_pair": ("as aot_unpaired", _aot_unpaired),
    "aot_unpaired": (
        "sigmoid on the batch's sorted c less its sorted w. Melnyk et al. 2024 (2406.05882)",
        _aot_unpaired,
    ),
    "apo_zero": ("1 - s(bc) + s(bw). D'Oosterlinck et al. 2024 (2408.06266)", _apo_zero),
    "apo_down": ("s(bc) + 1 - s(bD). D'Oosterlinck et al. 2024 (2408.06266)", _apo_down),
    "discopop": ("-log s(bD) (1-m) + exp(-bD) m, m = s(bD/tau). Lu et al. 2024 (2406.08414)", _discopop),
    "sigmoid_norm": (
        "-log s(b (c/|c| - w/|w|)). Lambert et al. 2024, Tulu 3 (2411.15124)",
        lambda r, config: -F.logsigmoid(config.beta * r.mean_difference),
    ),
    "sft": ("negative log-likelihood of the chosen responses' tokens", lambda r, config: r.nll),
}


def divergence_scores(ratios: Tensor, config: DPOConfig) -> Tensor:
    """``f'(u)`` of ``u = exp(ratio)``, up to a constant (Wang et al. 2023, arXiv 2309.16240); log u for reverse KL."""
    kind, alpha = config.f_divergence_type, config.f_alpha_divergence_coef
    if kind == "forward_kl":
        return -exp_minus_one(-ratios)
    if kind == "js_divergence":
        return math.log(2) + F.logsigmoid(ratios)
    if kind == "alpha_divergence" and abs(alpha - 1) > 1e-6:
        return exp_minus_one((alpha - 1) * ratios) / (alpha - 1)
    return ratios


def shared_length_weights(batch: Batch, like: Tensor, ld_alpha: float) -> Tensor:
    """``[T]``, with the dtype of ``like``: 1 within the length that both responses of a pair have, else
    ``ld_alpha``."""
    lengths = batch.row_lengths
    shared = lengths.view(-1, 2).amin(dim=1).repeat_interleave(2)
    sequences = segment_ids(lengths)
    within = torch.arange(len(sequences)) - (lengths.cumsum(0) - lengths)[sequences]
    in_both = beside(within < shared[sequences], like)
    return torch.full_like(like, ld_alpha, requires_grad=False).masked_fill(in_both, 1.0)


def _scores(config: DPOConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    needed: set[ScoreName] = {"logprobs"}
    if "ref_log_probs" not in present:
        needed.add("ref_logprobs")
    if config.use_weighting:
        needed.add("collision")
    return frozenset(needed)


@register_loss(
    "dpo",
    config=DPOConfig,
    layout="pairs",
    fields=(*PAIR_FIELDS, *PAIR_REF_LOG_PROBS),
    scores=_scores,
    metrics={
        "implicit_reward": "mean over all responses, chosen and rejected, of beta times the log-ratio to the "
        "reference of the response's tokens together, weighted by ld_alpha as in the loss"
    }
    | PAIR_METRICS,
    reference="Rafailov et al. 2023, Direct Preference Optimization (arXiv 2305.18290); loss types: TRL 1.16",
    formula="1/P sum of, by loss_type, with c, w = log p(y) - log ref(y) of chosen and rejected, D = c - w, b = beta, "
    "e = label_smoothing, s the logistic function:\n"
    + "\n".join(f"{kind}: {text}" for kind, (text, _) in LOSS_TYPES.items()),
    streams=lambda config, present: not any(kind.startswith("aot") for kind in config.loss_types),
    whole_batch='the order of the batch\'s log-ratios, with loss_type "aot" or "aot_unpaired"',
)
def dpo(batch: Batch, scores: Scores, config: DPOConfig) -> LossOutput:
    """Raises the likelihood of chosen responses over rejected ones, relative to a reference; a mean over pairs.

    A response is the scored part after its first ``prompt_lengths`` tokens. A pair in which one response has no scored
    token is ignored. Only ``sft`` averages over tokens, those of the chosen responses."""
    weights = None if config.ld_alpha is None else shared_length_weights(batch, scores.logprobs, config.ld_alpha)
    if weights is not None and batch.levels.get("ref_log_probs") == "sequence":
        raise BatchError(
            "ld_alpha weights tokens, so the reference's log-probabilities are needed per token",
            field="chosen_ref_log_probs",
            rule="[rows, tokens] with ld_alpha",
        )
    pairs = read_pairs(batch, scores, weights)
    reference = reference_pairs(batch, scores, pairs.complete, weights)
    ratios = pairs.logprobs - reference
    unweighted = read_pairs(batch, scores)
    nll = -unweighted.logprobs[:, 0]
    r = LogRatios(ratios, divergence_scores(ratios, config), pairs.logprobs, reference, pairs.lengths, nll)
    importance = (
        select(_policy_weights(batch, scores), pairs.complete) if config.use_weighting else torch.ones_like(r.chosen)
    )
    terms: dict[str, Term] = {}
    for kind, weight in zip(config.loss_types, config.weights, strict=True):
        losses = LOSS_TYPES[kind][1](r, config) * importance
        count, unit = (pairs.chosen_tokens, "tokens") if kind == "sft" else (len(losses), "pairs")
        earlier = terms.get(kind)
        total = weight * losses.sum()
        terms[kind] = Term(total if earlier is None else earlier.sum + total, count, unit)
    rewards = config.beta * ratios.detach()
    return LossOutput(terms, {"implicit_reward": Mean.of(rewards)} | pair_metrics(unweighted, rewards))


def _policy_weights(batch: Batch, scores: Scores) -> Tensor:
    """``[B]``: the weights of WPO (Zhou et al. 2024, arXiv 2406.11827), tokens aligned by the collision probability;
    no gradient."""
    aligned = scores.logprobs.detach() - scores.collision
    return sequence_means(batch, aligned).exp().prod(dim=1)
