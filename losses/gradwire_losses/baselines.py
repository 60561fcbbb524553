"""Advantages from groups of responses beyond the group mean: pass@k, several rewards, GPG, per-token baselines.

Ragged as in ``advantages.py``: ``[S]`` holds one number per response, split into groups by ``group_sizes [B]``; ``[T]``
holds the entries of all responses' tokens, split by ``row_lengths [S]``. Lengths and sizes are on the host. No result
has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gradwire_losses.advantages import (
    GROUP_STD_FLOOR,
    group_advantages,
    group_spread,
    rewards_to_go,
    whiten,
)
from gradwire_losses.batch import beside, pad, segment_ids, spread, unpad


def pass_k_advantages(rewards: Tensor, group_sizes: Tensor, *, scale: bool = True) -> Tensor:
    """``[S]``: for each group's best response, the difference to the second best; 0 for all others.

    Divided by the group's standard deviation + 1e-4 if ``scale``. Tang et al. 2025, arXiv 2503.19595. If the two best
    are equal, or the group has one response, all are 0.
    """
    padded, _ = pad(rewards, group_sizes, fill=-torch.inf)
    result = torch.zeros_like(padded)
    if padded.shape[1] > 1:
        best = padded.topk(2, dim=1)
        lead = torch.where(beside(group_sizes > 1, rewards), best.values[:, 0] - best.values[:, 1], 0.0)
        if scale:
            lead = lead / (group_spread(rewards, group_sizes)[1] + GROUP_STD_FLOOR)
        result.scatter_(1, best.indices[:, :1], lead[:, None])
    return unpad(result, group_sizes)


def gdpo_advantages(
    rewards: Tensor, group_sizes: Tensor, row_lengths: Tensor, *, weights: Sequence[float] | None = None
) -> Tensor:
    """``[T]``: several rewards per response, each normalised in its group, summed and whitened over the batch's tokens.

    Normalising first lets rewards of different scales contribute equally. GDPO 2026, arXiv 2601.05242.

    Args:
        rewards: ``[S, K]``.
        group_sizes: ``[B]``.
        row_lengths: ``[S]``.
        weights: K weights; 1 by default.
    """
    factors = torch.ones(rewards.shape[1]) if weights is None else torch.tensor(weights)
    each = [group_advantages(column, group_sizes) for column in rewards.unbind(1)]
    total = (torch.stack(each, dim=1) * beside(factors.to(rewards.dtype), rewards)).sum(1)
    return whiten(spread(total, row_lengths))


def gpg_scale(rewards: Tensor, group_sizes: Tensor, *, count: Literal["spread", "nonzero"] = "spread") -> Tensor:
    """0-d: GPG's alpha, the batch's responses divided by those with a gradient (Chu et al. 2025, arXiv 2504.02546).

    Args:
        rewards: ``[S]``.
        group_sizes: ``[B]``.
        count: Responses of groups whose rewards differ, or (verl) responses whose reward is not 0.
    """
    groups = beside(segment_ids(group_sizes), rewards)
    counted = group_spread(rewards, group_sizes)[2][groups] if count == "spread" else rewards != 0
    return len(rewards) / counted.sum().clamp(min=1).to(rewards.dtype)


def gpg_advantages(rewards: Tensor, group_sizes: Tensor, *, count: Literal["spread", "nonzero"] = "spread") -> Tensor:
    """``[S]``: each reward minus its group's mean, times :func:`gpg_scale`."""
    return group_advantages(rewards, group_sizes, scale=False) * gpg_scale(rewards, group_sizes, count=count)


def optimal_token_baseline(
    rewards: Tensor,
    logprobs: Tensor,
    collision: Tensor,
    row_lengths: Tensor,
    group_sizes: Tensor,
    *,
    positions: Tensor | None = None,
    zero_tail: bool = True,
    weights: Tensor | None = None,
) -> Tensor:
    """``[T]``: rewards to go minus a per-position baseline: the group's mean weighted by the gradient variance so far.

    ``B_t = sum_i G_it W_it / sum_i W_it`` over the group's responses that reach position t, ``W_it = sum_{u <= t} (1 -
    2 p_iu + sum_v p_iu(v)^2)``, the squared length of the gradient of the logits. A group of one has advantage 0. As
    in verl.

    Args:
        rewards: ``[T]``.
        logprobs: ``[T]``, under the policy that wrote the tokens.
        collision: ``[T]``, log of the sum over the vocabulary of the squared probabilities, as the score of that name.
        row_lengths: ``[S]``.
        group_sizes: ``[B]``.
        positions: ``[T]`` on the host, the position of each token in its response, if tokens that the policy did not
            write (tool results) lie between: tokens are then compared at equal positions. By default they are compared
            by their index among the policy's tokens.
        zero_tail: Positions that only the longest response of a group reaches have no baseline.
        weights: ``[T]`` importance weights, whose squares multiply W's summands.
    """
    returns = rewards_to_go(rewards, row_lengths)
    energy = 1 - 2 * logprobs.exp() + collision.exp()
    if weights is not None:
        energy = energy * weights.square()
    rows, _ = pad(energy, row_lengths)
    reached = unpad(rows.cumsum(1), row_lengths)
    rank = torch.arange(int(row_lengths.sum())) - (row_lengths.cumsum(0) - row_lengths).repeat_interleave(row_lengths)
    places = rank if positions is None else positions
    groups = segment_ids(group_sizes)[segment_ids(row_lengths)]
    width = int(places.max()) + 1 if len(places) else 1
    cells = beside(groups * width + places, returns)
    flat = returns.new_zeros(len(group_sizes) * width)
    above = flat.index_add(0, cells, returns * reached)[cells]
    below = flat.index_add(0, cells, reached)[cells]
    baseline = above / (below + 1e-8)
    if zero_tail:
        lengths, _ = pad(row_lengths, group_sizes)
        second = lengths.topk(2, dim=1).values[:, 1] if lengths.shape[1] > 1 else torch.zeros_like(group_sizes)
        baseline = torch.where(beside(places >= second[groups], baseline), 0.0, baseline)
    alone = beside((group_sizes == 1)[groups], returns)
    return torch.where(alone, 0.0, returns - baseline)
