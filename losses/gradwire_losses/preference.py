"""Common parts of losses over pairs of a chosen and a rejected response. ``P`` pairs.

A pair in which one response has no scored token is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire_losses.batch import Batch, Scores, beside, segment_mean, segment_sum, select
from gradwire_losses.outputs import Mean, Metric, Sum
from gradwire_losses.reference import reference_logprobs


@dataclass(frozen=True)
class Pairs:
    """Complete pairs, chosen and rejected side by side.

    Attributes:
        logprobs: ``[P, 2]``, differentiable: log-probability of each response.
        lengths: ``[P, 2]`` float: number of scored tokens.
        complete: ``[B]`` bool, on the host: which pairs of the batch are complete.
        chosen_tokens: Scored tokens of all chosen responses.
    """

    logprobs: Tensor
    lengths: Tensor
    complete: Tensor
    chosen_tokens: int

    @property
    def mean_logprobs(self) -> Tensor:
        """``[P, 2]``: log-probability per token."""
        return self.logprobs / self.lengths

    def chosen_nll(self) -> Tensor:
        """``[P]``: mean negative log-likelihood of a chosen response's tokens."""
        return -self.mean_logprobs[:, 0]


def complete_pairs(batch: Batch) -> Tensor:
    """``[B]`` bool, on the host: whether both responses have a scored token."""
    return (batch.row_lengths.view(-1, 2) > 0).all(dim=1)


def read_pairs(batch: Batch, scores: Scores, weights: Tensor | None = None) -> Pairs:
    """Read the batch's pairs; ``weights [T]`` are the weights of tokens in their response's log-probability."""
    complete = complete_pairs(batch)
    logprobs = scores.logprobs if weights is None else scores.logprobs * weights
    lengths = select(batch.row_lengths.view(-1, 2), complete)
    return Pairs(
        select(segment_sum(logprobs, batch.row_lengths).view(-1, 2), complete),
        beside(lengths, logprobs).to(logprobs.dtype),
        complete,
        int(lengths[:, 0].sum()),
    )


def reference_pairs(batch: Batch, scores: Scores, complete: Tensor, weights: Tensor | None = None) -> Tensor:
    """``[P, 2]``: the reference's log-probability of each response, from the batch or computed."""
    if batch.levels.get("ref_log_probs") == "sequence":
        return select(batch["ref_log_probs"].view(-1, 2), complete)
    logprobs = reference_logprobs(batch, scores)
    assert logprobs is not None
    sums = segment_sum(logprobs if weights is None else logprobs * weights, batch.row_lengths)
    return select(sums.view(-1, 2), complete)


def sequence_means(batch: Batch, values: Tensor) -> Tensor:
    """``[T] -> [B, 2]``: the mean over each response's tokens."""
    return segment_mean(values, batch.row_lengths).view(-1, 2)


def smoothed_sigmoid(logits: Tensor, label_smoothing: float) -> Tensor:
    """``-(1 - e) log sigmoid(z) - e log sigmoid(-z)``: cross-entropy with labels inverted with probability e."""
    if not label_smoothing:
        return -F.logsigmoid(logits)
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


PAIR_METRICS = {
    "chosen_reward": "mean implicit reward of chosen responses",
    "rejected_reward": "mean implicit reward of rejected responses",
    "reward_margin": "chosen_reward - rejected_reward",
    "preference_accuracy": "share of pairs whose chosen response has the higher implicit reward",
    "chosen_log_probs": "mean log-probability of chosen responses (nats)",
    "rejected_log_probs": "mean log-probability of rejected responses (nats)",
    "num_pairs": "number of pairs with a scored token on both sides",
}


def pair_metrics_of(reward: str, **others: str) -> dict[str, str]:
    """Descriptions for a loss without a reference: what its implicit reward is, and what else differs."""
    return PAIR_METRICS | {"chosen_reward": f"mean implicit reward of chosen responses: {reward}"} | others


def pair_metrics(pairs: Pairs, rewards: Tensor) -> dict[str, Metric]:
    """Metrics of pairs; ``rewards [P, 2]`` are the responses' implicit rewards."""
    chosen, rejected = rewards.detach().unbind(dim=1)
    return {
        "chosen_reward": Mean.of(chosen),
        "rejected_reward": Mean.of(rejected),
        "reward_margin": Mean.of(chosen - rejected),
        "preference_accuracy": Mean.of(chosen > rejected),
        "chosen_log_probs": Mean.of(pairs.logprobs[:, 0]),
        "rejected_log_probs": Mean.of(pairs.logprobs[:, 1]),
        "num_pairs": Sum(len(rewards)),
    }


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x < 0, accurate at both ends (Maechler 2012); x is clamped to at most -1e-7."""
    x = x.clamp(max=-1e-7)
    near = x > -0.6931471805599453
    # Each branch only sees numbers for which it is finite; otherwise its gradient would be NaN where the other is
    # chosen.
    close, far = torch.where(near, x, -0.5), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
