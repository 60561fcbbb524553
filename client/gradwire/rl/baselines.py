"""Advantages from groups beyond the group mean, in numpy: pass@k, several rewards, GPG, baselines per token.

They have the names and meaning of ``gradwire_losses.baselines`` (torch, on the server). Data is ragged as in
``gradwire.rl.advantages``; results are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from gradwire.rl.advantages import (
    GROUP_STD_FLOOR,
    Floats,
    Lengths,
    Numbers,
    group_advantages,
    group_spread,
    over_tokens,
    rewards_to_go,
    whiten,
)


def pass_k_advantages(rewards: Numbers, group_sizes: Lengths, *, scale: bool = True) -> Floats:
    """``[S]``: for each group's best response, the difference to the second best; 0 for all others.

    Divided by the group's standard deviation + 1e-4 if ``scale``. Tang et al. 2025, arXiv 2503.19595. If the two best
    are equal, or the group has one response, all are 0.
    """
    rewards, sizes = np.asarray(rewards, np.float64), np.asarray(group_sizes, np.int64)
    deviations = group_spread(rewards, sizes)[1]
    result = np.zeros(len(rewards))
    for start, size, deviation in zip(np.cumsum(sizes) - sizes, sizes, deviations):
        if size > 1:
            second, best = np.sort(rewards[start : start + size])[-2:]
            lead = (best - second) / (deviation + GROUP_STD_FLOOR) if scale else best - second
            result[start + np.argmax(rewards[start : start + size])] = lead
    return result


def gdpo_advantages(
    rewards: Numbers, group_sizes: Lengths, row_lengths: Lengths, *, weights: Sequence[float] | None = None
) -> Floats:
    """``[T]``: several rewards per response, each normalised in its group, summed and whitened over the batch's tokens.

    Normalising first lets rewards of different scales contribute equally. GDPO 2026, arXiv 2601.05242.

    Args:
        rewards: ``[S, K]``.
        group_sizes: ``[B]``.
        row_lengths: ``[S]``.
        weights: K weights; 1 by default.
    """
    rewards = np.asarray(rewards, np.float64)
    factors = np.ones(rewards.shape[1]) if weights is None else np.asarray(weights, np.float64)
    each = np.stack([group_advantages(column, group_sizes) for column in rewards.T], axis=1)
    return whiten(over_tokens(each @ factors, row_lengths))


def gpg_scale(rewards: Numbers, group_sizes: Lengths, *, count: Literal["spread", "nonzero"] = "spread") -> float:
    """GPG's alpha: the batch's responses divided by those with a gradient (Chu et al. 2025, arXiv 2504.02546).

    Args:
        rewards: ``[S]``.
        group_sizes: ``[B]``.
        count: Responses of groups whose rewards differ, or (verl) responses whose reward is not 0.
    """
    rewards, sizes = np.asarray(rewards, np.float64), np.asarray(group_sizes, np.int64)
    counted = np.repeat(group_spread(rewards, sizes)[2], sizes) if count == "spread" else rewards != 0
    return len(rewards) / max(int(counted.sum()), 1)


def gpg_advantages(rewards: Numbers, group_sizes: Lengths, *, count: Literal["spread", "nonzero"] = "spread") -> Floats:
    """``[S]``: each reward minus its group's mean, times :func:`gpg_scale`."""
    return group_advantages(rewards, group_sizes, scale=False) * gpg_scale(rewards, group_sizes, count=count)


def optimal_token_baseline(
    rewards: Numbers,
    logprobs: Numbers,
    collision: Numbers,
    row_lengths: Lengths,
    group_sizes: Lengths,
    *,
    positions: npt.ArrayLike | None = None,
    zero_tail: bool = True,
    weights: Numbers | None = None,
) -> Floats:
    """``[T]``: rewards to go minus a per-position baseline: the group's mean weighted by the gradient variance so far.

    ``B_t = sum_i G_it W_it / sum_i W_it`` over the group's responses that reach position t, ``W_it = sum_{u <= t} (1 -
    2 p_iu + sum_v p_iu(v)^2)``, the squared length of the gradient of the logits. A group of one has advantage 0. As
    in verl.

    Args:
        rewards: ``[T]``.
        logprobs: ``[T]``, under the policy that wrote the tokens.
        collision: ``[T]``, log of the sum over the vocabulary of the squared probabilities.
        row_lengths: ``[S]``.
        group_sizes: ``[B]``.
        positions: ``[T]``, the position of each token in its response, if tokens that the policy did not write (tool
            results) lie between: tokens are then compared at equal positions. By default they are compared by their
            index among the policy's tokens.
        zero_tail: Positions that only the longest response of a group reaches have no baseline.
        weights: ``[T]`` importance weights, whose squares multiply W's summands.
    """
    returns = rewards_to_go(rewards, row_lengths)
    lengths, sizes = np.asarray(row_lengths, np.int64), np.asarray(group_sizes, np.int64)
    energy = 1 - 2 * np.exp(np.asarray(logprobs, np.float64)) + np.exp(np.asarray(collision, np.float64))
    if weights is not None:
        energy = energy * np.asarray(weights, np.float64) ** 2
    starts = np.cumsum(lengths) - lengths
    reached = np.concatenate([np.cumsum(energy[at : at + n]) for at, n in zip(starts, lengths)] or [energy])
    rank = np.arange(len(returns)) - np.repeat(starts, lengths)
    places = rank if positions is None else np.asarray(positions, np.int64)
    groups = np.repeat(np.repeat(np.arange(len(sizes)), sizes), lengths)
    width = int(places.max(initial=0)) + 1
    cells = groups * width + places
    above = np.bincount(cells, weights=returns * reached, minlength=len(sizes) * width)[cells]
    below = np.bincount(cells, weights=reached, minlength=len(sizes) * width)[cells]
    baseline = above / (below + 1e-8)
    if zero_tail:
        first = np.cumsum(sizes) - sizes
        second = [sorted([0, 0, *lengths[at : at + size]])[-2] for at, size in zip(first, sizes)]
        baseline = np.where(places >= np.asarray(second, np.int64)[groups], 0.0, baseline)
    alone = (sizes == 1)[groups]
    result: Floats = np.where(alone, 0.0, returns - baseline)
    return result
