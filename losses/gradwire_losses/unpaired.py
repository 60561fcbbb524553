"""Preference losses over single responses, each labelled good or bad: KTO, BCO. ``S`` rows with a scored token.

``r = log p(y) - log ref(y)``, ``s`` the logistic function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradwire_losses.batch import Batch, Scores, segment_sum, select
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS, ROW_TOKENS, ROWS_OR_TOKENS, row_field
from gradwire_losses.outputs import Difference, Figure, LossOutput, Mean, Metric, Term
from gradwire_losses.reference import reference_logprobs
from gradwire_losses.registry import FieldSpec, ReferenceConfig, ScoreName, register_loss

LABEL = FieldSpec("label", "bool", ("[rows]",), "1 for a good response, 0 for a bad one.", required=True)
REFERENCE = row_field(
    "ref_log_probs",
    ROWS_OR_TOKENS,
    "Log-probability of each response, or of each of its tokens, under the reference, instead of reference_model.",
)
MISMATCHED = (
    FieldSpec(
        "kl_input_ids",
        "int",
        ROW_TOKENS,
        "Token ids of each row's prompt followed by another row's response, for the KL estimate.",
        ids=True,
        padding_mask="kl_attention_mask",
    ),
    FieldSpec(
        "kl_loss_mask",
        "bool",
        ROW_TOKENS,
        "1 for tokens of that response; by default all but the first.",
        aligned_with="kl_input_ids",
    ),
    FieldSpec(
        "kl_ref_log_probs",
        "float",
        ROWS_OR_TOKENS,
        "As ref_log_probs, for the mismatched responses.",
        aligned_with="kl_input_ids",
    ),
)


class KTOConfig(ReferenceConfig):
    """Arguments of ``kto``."""

    beta: float = Field(0.1, gt=0, description="weight of the log-ratio to the reference")
    desirable_weight: float = Field(1.0, ge=0, description="weight of good responses")
    undesirable_weight: float = Field(1.0, ge=0, description="weight of bad responses")
    loss_type: Literal["kto", "apo_zero_unpaired"] = Field("kto", description="apo_zero_unpaired: kto with z = 0")


class BCOConfig(ReferenceConfig):
    """Arguments of ``bco``."""

    beta: float = Field(0.1, gt=0, description="weight of the log-ratio to the reference")
    delta: float | None = Field(
        None,
        description="the reward shift; by default the mean reward of the batch. For a running mean, average the "
        "metric delta",
    )


@dataclass(frozen=True)
class Responses:
    """The ``S`` rows with a scored token.

    Attributes:
        ratios: ``[S]``, differentiable: log-ratio to the reference.
        good: ``[S]`` bool.
        there: ``[B]`` bool, on the host: which rows of the batch these are.
        known_good: ``good``, on the host.
        mismatched: ``[M]``, log-ratios of the mismatched responses; no gradient.
    """

    ratios: Tensor
    good: Tensor
    there: Tensor
    known_good: Tensor
    mismatched: Tensor

    def metrics(self, beta: float) -> dict[str, Metric]:
        rewards = beta * self.ratios.detach()
        chosen, rejected = Mean.of(select(rewards, self.known_good)), Mean.of(select(rewards, ~self.known_good))
        return {
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "reward_margin": Difference(chosen, rejected),
            "desirable_share": Mean.of(self.good),
        }


METRICS = {
    "chosen_reward": "mean implicit reward (beta * log-ratio) of good responses",
    "rejected_reward": "mean implicit reward of bad responses",
    "reward_margin": "chosen_reward - rejected_reward",
    "desirable_share": "share of good responses",
}


def read_responses(batch: Batch, scores: Scores) -> Responses:
    lengths = batch.row_lengths
    logprobs = segment_sum(scores.logprobs, lengths)
    if batch.levels.get("ref_log_probs") == "sequence":
        reference = batch["ref_log_probs"]
    else:
        per_token = reference_logprobs(batch, scores)
        assert per_token is not None
        reference = segment_sum(per_token, lengths)
    sides = 1 if batch.num_sequences == batch.num_examples else 2
    ratios, counts = (logprobs - reference).view(-1, sides), lengths.view(-1, sides)
    there = counts[:, 0] > 0
    mismatched = select(ratios[:, 1:].flatten(), counts[:, 1:].flatten() > 0).detach()
    label, known = batch["label"], batch.host["label"]
    return Responses(select(ratios[:, 0], there), select(label, there), there, select(known, there), mismatched)


def _scores(config: ReferenceConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    return frozenset({"logprobs"} if "ref_log_probs" in present else {"logprobs", "ref_logprobs"})


@register_loss(
    "kto",
    config=KTOConfig,
    fields=(INPUT_IDS, LABEL, PROMPT_LENGTHS, LOSS_MASK, REFERENCE, *MISMATCHED),
    scores=_scores,
    metrics=METRICS | {"kl": "z: the batch's mean log-ratio of mismatched responses, at least 0"},
    reference="Ethayarajh et al. 2024, KTO (arXiv 2402.01306); apo_zero_unpaired: D'Oosterlinck et al. 2024 "
    "(arXiv 2408.06266)",
    formula="1/S sum w_good (1 - s(b (r - z))) or w_bad (1 - s(b (z - r))), "
    "z = max(0, mean r of mismatched), no gradient",
    streams=lambda config, present: config.loss_type == "apo_zero_unpaired",
    whole_batch='z, the mean over mismatched responses, with loss_type "kto"',
)
def kto(batch: Batch, scores: Scores, config: KTOConfig) -> LossOutput:
    """Raises good responses above the reference and lowers bad ones, relative to the overall distance z from it.

    z is estimated on ``kl_input_ids``, each row's prompt with another row's response; without them it
    is 0. It is computed over the whole batch.
    """
    responses = read_responses(batch, scores)
    z: Figure = 0.0
    if len(responses.mismatched) and config.loss_type == "kto":
        z = responses.mismatched.double().mean().clamp(min=0.0)
    distance = config.beta * (responses.ratios - z)
    good = config.desirable_weight * (-distance).sigmoid()
    bad = config.undesirable_weight * distance.sigmoid()
    losses = torch.where(responses.good, good, bad)
    return LossOutput(
        {"preference": Term(losses.sum(), len(losses), "sequences")},
        responses.metrics(config.beta) | {"kl": Mean(z * len(losses), len(losses))},
    )


@register_loss(
    "bco",
    config=BCOConfig,
    fields=(
        INPUT_IDS,
        LABEL,
        PROMPT_LENGTHS,
        LOSS_MASK,
        REFERENCE,
        row_field(
            "weights", ("[rows]",), "Weight of each row, for example the density ratio of bad responses; 1 by default."
        ),
    ),
    scores=_scores,
    metrics=METRICS | {"delta": "the reward shift that was used"},
    reference="Jung et al. 2024, Binary Classifier Optimization (arXiv 2404.04656); delta: TRL",
    formula="-1/S sum log s(b r - delta) of good, log s(delta - b r) of bad responses; delta = mean b r, no gradient",
    streams=lambda config, present: config.delta is not None,
    whole_batch="delta, the mean reward, unless delta is given",
)
def bco(batch: Batch, scores: Scores, config: BCOConfig) -> LossOutput:
    """Classifies responses as good or bad by their implicit reward, shifted by the mean reward."""
    responses = read_responses(batch, scores)
    rewards = config.beta * responses.ratios
    delta: Figure = config.delta or 0.0
    if config.delta is None and len(rewards):
        delta = rewards.detach().double().mean()
    shifted = rewards - delta
    losses = -F.logsigmoid(torch.where(responses.good, shifted, -shifted))
    if "weights" in batch.fields:
        losses = losses * select(batch["weights"], responses.there)
    return LossOutput(
        {"preference": Term(losses.sum(), len(losses), "sequences")},
        responses.metrics(config.beta) | {"delta": Mean(delta * len(losses), len(losses))},
    )
