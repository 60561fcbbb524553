"""Direct preference optimisation. ``P`` pairs; sequences are chosen, rejected, chosen, rejected, …"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradwire_losses.batch import Batch, Scores, segment_sum
from gradwire_losses.fields import PAIR_FIELDS, PAIR_REF_LOG_PROBS
from gradwire_losses.outputs import LossOutput, Mean, Sum, Term
from gradwire_losses.registry import ReferenceConfig, ScoreName, register_loss


class DPOConfig(ReferenceConfig):
    """Arguments of ``dpo``."""

    beta: float = Field(
        0.1, gt=0, description="how much a log-ratio to the reference counts; higher stays closer to it"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="how often preferences are assumed to be the wrong way"
    )


def _scores(config: DPOConfig, present: frozenset[str]) -> frozenset[ScoreName]:
    return frozenset({"logprobs"} if "ref_log_probs" in present else {"logprobs", "ref_logprobs"})


def response_logprobs(batch: Batch, values: Tensor) -> Tensor:
    """``[T] -> [P, 2]``: sums over each response, chosen and rejected."""
    return segment_sum(values, batch.row_lengths).view(-1, 2)


def reference_response_logprobs(batch: Batch, scores: Scores) -> Tensor:
    """``[P, 2]``: the reference's log-probability of each response, given with the batch or computed."""
    given = batch.get("ref_log_probs")
    if given is None:
        return response_logprobs(batch, scores.ref_logprobs)
    return response_logprobs(batch, given) if batch.levels["ref_log_probs"] == "token" else given.view(-1, 2)


def complete_pairs(batch: Batch) -> Tensor:
    """``[P]`` bool: whether both responses have a scored token; other pairs compare nothing and count nowhere."""
    return (batch.row_lengths.view(-1, 2) > 0).all(dim=1)


DPO_METRICS = {
    "implicit_reward": "mean of beta * log-ratio to the reference, over chosen and rejected responses",
    "chosen_reward": "its mean over chosen responses",
    "rejected_reward": "its mean over rejected responses",
    "reward_margin": "chosen_reward - rejected_reward",
    "preference_accuracy": "share of pairs whose chosen response has the higher implicit reward",
    "chosen_log_probs": "mean log-probability of a chosen response (nats)",
    "rejected_log_probs": "mean log-probability of a rejected response (nats)",
    "num_pairs": "pairs with a scored token on both sides",
}


@register_loss(
    "dpo",
    config=DPOConfig,
    layout="pairs",
    fields=(*PAIR_FIELDS, *PAIR_REF_LOG_PROBS),
    scores=_scores,
    metrics=DPO_METRICS,
    reference="Rafailov et al. 2023, Direct Preference Optimization (arXiv 2305.18290); "
    "label_smoothing: Mitchell 2023, cDPO",
    formula="-1/P sum [(1-eps) log sigmoid(beta (c - w)) + eps log sigmoid(-beta (c - w))], "
    "c, w = log p(y) - log ref(y) of chosen and rejected",
    streams=True,
)
def dpo(batch: Batch, scores: Scores, config: DPOConfig) -> LossOutput:
    """Raises the likelihood of chosen responses over rejected ones, relative to a reference; a mean over pairs.

    A response is what follows its first ``prompt_lengths`` tokens, as far as its loss mask goes. A pair of which one
    response has no scored token counts nowhere.
    """
    pairs = complete_pairs(batch)
    logprobs = response_logprobs(batch, scores.logprobs)[pairs]
    ratios = logprobs - reference_response_logprobs(batch, scores)[pairs]
    logits = config.beta * (ratios[:, 0] - ratios[:, 1])
    smoothing = config.label_smoothing
    losses = -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)
    rewards = config.beta * ratios.detach()
    return LossOutput(
        {"preference": Term(losses.sum(), len(losses), "pairs")},
        {
            "implicit_reward": Mean.of(rewards),
            "chosen_reward": Mean.of(rewards[:, 0]),
            "rejected_reward": Mean.of(rewards[:, 1]),
            "reward_margin": Mean.of(rewards[:, 0] - rewards[:, 1]),
            "preference_accuracy": Mean.of(rewards[:, 0] > rewards[:, 1]),
            "chosen_log_probs": Mean.of(logprobs[:, 0]),
            "rejected_log_probs": Mean.of(logprobs[:, 1]),
            "num_pairs": Sum(len(losses)),
        },
    )
