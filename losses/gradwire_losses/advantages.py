"""Advantage estimators in torch: pure functions of rewards and values, without gradient.

``gradwire.rl.advantages`` has those that the client needs in numpy, under the same names.

Data is ragged: ``[T]`` holds the entries of all sequences one after the other, split by ``row_lengths [S]``; ``[S]``
holds one number per sequence, split into groups by ``group_sizes [B]``. Lengths and sizes are on the host.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gradwire_losses.batch import beside, pad, segment_ids, segment_mean, segment_sum, select, spread, unpad

GROUP_STD_FLOOR = 1e-4
WHITEN_FLOOR = 1e-8
BLOCK = 128


def discounted_sums(numbers: Tensor, factor: float) -> Tensor:
    """``[S, L] -> [S, L]``: at t, ``sum over u >= t of factor^(u - t) numbers[:, u]``.

    Computed in blocks, by products with powers of the factor, so that long rows take few steps.
    """
    rows, width = numbers.shape
    blocks = -(-width // BLOCK)
    padded = torch.nn.functional.pad(numbers, (0, blocks * BLOCK - width)).view(rows, blocks, BLOCK)
    powers = factor ** torch.arange(BLOCK + 1, dtype=numbers.dtype, device=numbers.device)
    places = torch.arange(BLOCK, device=numbers.device)
    distances = places - places[:, None]
    within = torch.where(distances >= 0, powers[distances.clamp(min=0)], 0.0)
    sums = padded @ within.T
    for block in range(blocks - 2, -1, -1):
        sums[:, block] += sums[:, block + 1, :1] * powers[1:].flip(0)
    return sums.reshape(rows, blocks * BLOCK)[:, :width]


def gae(
    rewards: Tensor,
    values: Tensor,
    row_lengths: Tensor,
    *,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    bootstrap_values: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438).

    Args:
        rewards: ``[T]``, reward for emitting each token.
        values: ``[T]``, value of the state in which each token was emitted.
        row_lengths: ``[S]``.
        gamma: Discount per step.
        gae_lambda: 1 gives discounted returns minus values, 0 gives one-step errors.
        bootstrap_values: ``[S]``, value of the state after each sequence's last token, for truncated sequences. By
            default 0: the end is terminal.
        mask: ``[T]`` bool, on the host; False for tokens that the policy did not write (observations, tool results).
            Time does not advance at them: the last policy token before them is followed by the first policy token after
            them. Their rewards and values are ignored; their advantage and return are 0. A server batch has none of
            them.

    Returns:
        Advantages and returns (advantages + values), both ``[T]``.
    """
    if mask is not None:
        on_scored = gae(
            select(rewards, mask),
            select(values, mask),
            segment_sum(mask.long(), row_lengths),
            gamma=gamma,
            gae_lambda=gae_lambda,
            bootstrap_values=bootstrap_values,
        )
        index = beside(mask.nonzero().squeeze(1), values)
        advantages, returns = (torch.zeros_like(values).index_copy(0, index, part) for part in on_scored)
        return advantages, returns
    reward_rows, mask = pad(rewards, row_lengths)
    value_rows, _ = pad(values, row_lengths)
    next_values = torch.cat([value_rows[:, 1:], torch.zeros_like(value_rows[:, :1])], dim=1)
    if bootstrap_values is not None:
        there = row_lengths > 0
        ends = (torch.arange(len(row_lengths)) * next_values.shape[1] + row_lengths - 1)[there]
        next_values.view(-1)[beside(ends, values)] = select(bootstrap_values, there).to(values.dtype)
    errors = reward_rows + gamma * next_values - value_rows
    result = unpad(discounted_sums(errors.masked_fill(~mask, 0.0), gamma * gae_lambda), row_lengths)
    return result, result + values


def rewards_to_go(rewards: Tensor, row_lengths: Tensor, gamma: float = 1.0) -> Tensor:
    """``[T]``: for each token, the discounted sum of the rewards from it to the end of its sequence."""
    return gae(rewards, torch.zeros_like(rewards), row_lengths, gamma=gamma, gae_lambda=1.0)[0]


def at_last_token(numbers: Tensor, row_lengths: Tensor) -> Tensor:
    """``[S] -> [T]``: each sequence's number at its last scored token, 0 elsewhere."""
    there = row_lengths > 0
    result = numbers.new_zeros(int(row_lengths.sum()))
    result[beside(row_lengths.cumsum(0)[there] - 1, numbers)] = select(numbers, there)
    return result


def group_spread(rewards: Tensor, group_sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[S], [B] -> [B], [B], [B] bool``: mean, unbiased standard deviation, and whether the rewards differ.

    The deviation of a group of one, or of a group of equal rewards, is exactly 0.
    """
    mean, centred = _centred(rewards, group_sizes)
    groups = beside(segment_ids(group_sizes), rewards)
    squares = segment_sum(centred.square(), group_sizes)
    highest, lowest = torch.zeros_like(mean), torch.zeros_like(mean)
    highest.scatter_reduce_(0, groups, rewards, "amax", include_self=False)
    lowest.scatter_reduce_(0, groups, rewards, "amin", include_self=False)
    differ = highest > lowest
    others = beside((group_sizes - 1).clamp(min=1), squares)
    return mean, torch.where(differ, (squares / others).sqrt(), 0.0), differ


def group_advantages(rewards: Tensor, group_sizes: Tensor, *, scale: bool = True) -> Tensor:
    """``[S]``: each reward minus its group's mean, divided by the group's standard deviation + 1e-4 when ``scale``.

    A group of one, or a group of equal rewards, gives zeros. Shao et al. 2024, arXiv 2402.03300; without ``scale``, Liu
    et al. 2025, arXiv 2503.20783."""
    _, std, differ = group_spread(rewards, group_sizes)
    groups = beside(segment_ids(group_sizes), rewards)
    centred = torch.where(differ[groups], _centred(rewards, group_sizes)[1], 0.0)
    return centred / (std[groups] + GROUP_STD_FLOOR) if scale else centred


def _centred(rewards: Tensor, group_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """``[S], [B] -> [B], [S]``: each group's mean, and each reward minus its group's mean.

    Computed from each group's first reward: the mean of nearly equal rewards, rounded to float32, would be as far from
    them as they are from each other.
    """
    groups = beside(segment_ids(group_sizes), rewards)
    there = group_sizes > 0
    first = torch.zeros(len(group_sizes), dtype=rewards.dtype, device=rewards.device)
    starts = (group_sizes.cumsum(0) - group_sizes)[there]
    first[beside(there.nonzero().squeeze(1), rewards)] = rewards[beside(starts, rewards)]
    beyond = rewards - first[groups]
    offset = segment_mean(beyond, group_sizes)
    return first + offset, beyond - offset[groups]


def whiten(values: Tensor, *, shift_mean: bool = True) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` with the unbiased variance; keeps the mean unless ``shift_mean``."""
    if len(values) < 2:
        return values - values if shift_mean else values
    mean = values.mean()
    whitened = (values - mean) * torch.rsqrt(values.var() + WHITEN_FLOOR)
    return whitened if shift_mean else whitened + mean


def rloo_advantages(rewards: Tensor, group_sizes: Tensor) -> Tensor:
    """``[S]``: each reward minus the mean of the *other* rewards of its group (leave one out); 0 for a group of one.

    Ahmadian et al. 2024, arXiv 2402.14740.
    """
    groups, sizes = beside(segment_ids(group_sizes), rewards), beside(group_sizes, rewards)
    others = (segment_sum(rewards, group_sizes)[groups] - rewards) / (sizes - 1).clamp(min=1)[groups]
    return torch.where(group_spread(rewards, group_sizes)[2][groups], rewards - others, 0.0)


def opo_advantages(rewards: Tensor, row_lengths: Tensor, group_sizes: Tensor) -> Tensor:
    """``[S]``: each reward minus its group's length-weighted mean, the baseline of least variance.

    Hao et al. 2025, arXiv 2505.23585. A group of one, or a group of equal rewards, gives zeros.
    """
    groups, lengths = beside(segment_ids(group_sizes), rewards), beside(row_lengths, rewards).to(rewards.dtype)
    baseline = segment_sum(lengths * rewards, group_sizes) / segment_sum(lengths, group_sizes).clamp(min=1)
    return torch.where(group_spread(rewards, group_sizes)[2][groups], rewards - baseline[groups], 0.0)


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


def amplify_planning(advantages: Tensor, planning: Tensor, alpha: float) -> Tensor:
    """``A + alpha |A|`` where ``planning`` is true, ``A`` elsewhere: HICRA (Wang et al. 2025, arXiv 2509.03646).

    Planning tokens gain more from success and lose less by failure. Both arguments have the same shape.
    """
    return torch.where(planning, advantages + alpha * advantages.abs(), advantages)


def gigpo_states(group_sizes: Tensor, step_counts: Tensor, anchor_ids: Tensor) -> Tensor:
    """``[B], [S], [M] int64 -> [M] int64``, all on the host: a number for each step's group and anchor state together.

    Equal numbers mean equal group and state; numbers start at 0 without gaps.
    """
    groups = segment_ids(group_sizes)[segment_ids(step_counts)]
    states: Tensor = torch.unique(torch.stack([groups, anchor_ids], dim=1), dim=0, return_inverse=True)[1]
    return states


def gigpo_advantages(
    episode_rewards: Tensor,
    group_sizes: Tensor,
    step_rewards: Tensor,
    step_counts: Tensor,
    anchor_ids: Tensor,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    scale: bool = True,
) -> Tensor:
    """``[M]``: ``A_E + omega A_S`` of each step (Feng et al. 2025, arXiv 2505.10978).

    Args:
        episode_rewards: ``[S]``, reward of each whole episode.
        group_sizes: ``[B]``, number of episodes that started from one state.
        step_rewards: ``[M]``, rewards of all episodes' steps, one episode after the other.
        step_counts: ``[S]``, number of steps of each episode.
        anchor_ids: ``[M]`` int64, on the host: number of the state in which each step was taken.
        gamma: Discount per step.
        omega: Weight of the step level. A step that is alone in its group's state has none.
        scale: Divide both levels by their groups' standard deviations + 1e-4.
    """
    episode = group_advantages(episode_rewards, group_sizes, scale=scale)
    returns = rewards_to_go(step_rewards, step_counts, gamma)
    states = gigpo_states(group_sizes, step_counts, anchor_ids)
    return spread(episode, step_counts) + omega * subgroup_advantages(returns, states, scale=scale)


def subgroup_advantages(numbers: Tensor, keys: Tensor, *, scale: bool = True) -> Tensor:
    """``[M], [M] int64 -> [M]``: like :func:`group_advantages`; a group is the set of entries with equal keys.

    ``keys`` are on the host, in any order. With the returns of steps, and keys that identify group and anchor state,
    this is the step level of GiGPO (Feng et al. 2025, arXiv 2505.10978).
    """
    _, place, sizes = torch.unique(keys, return_inverse=True, return_counts=True)
    order = beside(place.argsort(stable=True), numbers)
    result = torch.empty_like(numbers)
    result[order] = group_advantages(numbers[order], sizes, scale=scale)
    return result
