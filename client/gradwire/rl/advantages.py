"""Advantage estimators in numpy: pure functions of rewards and values.

The algorithms use them before a batch is sent. They have the names and meaning of ``gradwire_losses.advantages``, which
is in torch for the server. Data is ragged: ``[T]`` holds the entries of all sequences one after the other, split by
``row_lengths [S]``; ``[S]`` holds one number per sequence, in groups of ``group_sizes [B]``. Results are float64.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = npt.ArrayLike
Lengths = npt.ArrayLike

GROUP_STD_FLOOR = 1e-4
WHITEN_FLOOR = 1e-8


def _floats(numbers: Numbers) -> Floats:
    return np.asarray(numbers, dtype=np.float64)


def _lengths(lengths: Lengths, total: int, what: str) -> npt.NDArray[np.int64]:
    result = np.asarray(lengths, dtype=np.int64)
    if int(result.sum()) != total:
        raise ValueError(f"{what} sum to {int(result.sum())} but there are {total} entries")
    return result


def _segments(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(lengths)), lengths)


def _segment_sum(numbers: Floats, lengths: npt.NDArray[np.int64]) -> Floats:
    return np.bincount(_segments(lengths), weights=numbers, minlength=len(lengths)).astype(np.float64)


def gae(
    rewards: Numbers,
    values: Numbers,
    row_lengths: Lengths,
    *,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    bootstrap_values: Numbers | None = None,
    mask: npt.ArrayLike | None = None,
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438).

    Args:
        rewards: ``[T]``, reward for emitting each token.
        values: ``[T]``, value of the state in which each token was emitted.
        row_lengths: ``[S]``.
        gamma: Discount per step.
        gae_lambda: 1 gives discounted returns minus values, 0 gives one-step errors.
        bootstrap_values: ``[S]``, value of the state after each sequence's last token: the expected remaining return of
            a truncated sequence, 0 for a terminated one; 0 for all by default.
        mask: ``[T]`` bool, False for tokens that the policy did not write (observations, tool results). Time does
            not advance at them: the last policy token before them is followed by the first policy token after them.
            Their rewards and values are ignored; their advantage and return are 0.

    Returns:
        Advantages and returns (advantages + values), both ``[T]``.
    """
    rewards, values = _floats(rewards), _floats(values)
    lengths = _lengths(row_lengths, len(rewards), "row_lengths")
    written = np.ones(len(rewards), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    starts = np.cumsum(lengths) - lengths
    next_value = np.zeros(len(lengths)) if bootstrap_values is None else _floats(bootstrap_values).copy()
    advantage, advantages = np.zeros(len(lengths)), np.zeros(len(rewards))
    for offset in range(int(lengths.max(initial=0)) - 1, -1, -1):
        rows = np.flatnonzero(lengths > offset)
        rows = rows[written[starts[rows] + offset]]
        at = starts[rows] + offset
        error = rewards[at] + gamma * next_value[rows] - values[at]
        advantages[at] = advantage[rows] = error + gamma * gae_lambda * advantage[rows]
        next_value[rows] = values[at]
    return advantages, np.where(written, advantages + np.where(written, values, 0.0), 0.0)


def rewards_to_go(rewards: Numbers, row_lengths: Lengths, gamma: float = 1.0) -> Floats:
    """``[T]``: for each token, the discounted sum of the rewards from it to the end of its sequence."""
    rewards = _floats(rewards)
    return gae(rewards, np.zeros_like(rewards), row_lengths, gamma=gamma, gae_lambda=1.0)[0]


def group_spread(rewards: Numbers, group_sizes: Lengths) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """``[S], [B] -> [B], [B], [B] bool``: mean, unbiased standard deviation, and whether the rewards differ.

    The deviation of a group of one, or of a group of equal rewards, is exactly 0.
    """
    rewards = _floats(rewards)
    sizes = _lengths(group_sizes, len(rewards), "group_sizes")
    groups = _segments(sizes)
    mean = _segment_sum(rewards, sizes) / np.maximum(sizes, 1)
    squares = _segment_sum((rewards - mean[groups]) ** 2, sizes)
    highest, lowest = np.full(len(sizes), -np.inf), np.full(len(sizes), np.inf)
    np.maximum.at(highest, groups, rewards)
    np.minimum.at(lowest, groups, rewards)
    differ = highest > lowest
    return mean, np.where(differ, np.sqrt(squares / np.maximum(sizes - 1, 1)), 0.0), differ


def group_advantages(rewards: Numbers, group_sizes: Lengths, *, scale: bool = True) -> Floats:
    """``[S]``: each reward minus its group's mean, divided by the group's standard deviation + 1e-4 when ``scale``.

    A group of one, or a group of equal rewards, gives zeros. Shao et al. 2024, arXiv 2402.03300; without ``scale``, Liu
    et al. 2025, arXiv 2503.20783."""
    rewards = _floats(rewards)
    mean, std, differ = group_spread(rewards, group_sizes)
    groups = _segments(np.asarray(group_sizes, dtype=np.int64))
    centred = np.where(differ[groups], rewards - mean[groups], 0.0)
    return centred / (std[groups] + GROUP_STD_FLOOR) if scale else centred


def whiten(values: Numbers, *, shift_mean: bool = True) -> Floats:
    """``(x - mean) / sqrt(var + 1e-8)`` with the unbiased variance; keeps the mean unless ``shift_mean``."""
    values = _floats(values)
    if len(values) < 2:
        return values - values if shift_mean else values
    mean, std = float(values.mean()), float(np.sqrt(values.var(ddof=1) + WHITEN_FLOOR))
    whitened: Floats = (values - mean) / std
    return whitened if shift_mean else whitened + mean


def rloo_advantages(rewards: Numbers, group_sizes: Lengths) -> Floats:
    """``[S]``: each reward minus the mean of the *other* rewards of its group (leave one out); 0 for a group of one.

    Ahmadian et al. 2024, arXiv 2402.14740.
    """
    rewards = _floats(rewards)
    sizes = _lengths(group_sizes, len(rewards), "group_sizes")
    groups = _segments(sizes)
    others = (_segment_sum(rewards, sizes)[groups] - rewards) / np.maximum(sizes - 1, 1)[groups]
    return np.where(group_spread(rewards, sizes)[2][groups], rewards - others, 0.0)


def amplify_planning(advantages: Numbers, planning: npt.ArrayLike, alpha: float = 0.2) -> Floats:
    """``A + alpha |A|`` where ``planning`` is true, ``A`` elsewhere: HICRA (Wang et al. 2025, arXiv 2509.03646).

    Both arguments have the same shape. The group losses apply this if the batch has a ``planning_mask``.
    """
    advantages = _floats(advantages)
    return np.where(np.asarray(planning, dtype=bool), advantages + alpha * np.abs(advantages), advantages)


def subgroup_advantages(numbers: Numbers, keys: npt.ArrayLike, *, scale: bool = True) -> Floats:
    """``[M], [M] -> [M]``: like :func:`group_advantages`; a group is the set of entries with equal keys, in any order.

    With the returns of steps, and keys that identify group and anchor state, this is the step level of GiGPO
    (Feng et al. 2025, arXiv 2505.10978).
    """
    numbers = _floats(numbers)
    _, place, sizes = np.unique(np.asarray(keys), return_inverse=True, return_counts=True)
    order = np.argsort(place, kind="stable")
    result = np.empty_like(numbers)
    result[order] = group_advantages(numbers[order], sizes, scale=scale)
    return result


def gigpo_step_groups(group_ids: Sequence[Hashable], anchor_states: Sequence[Hashable]) -> list[npt.NDArray[np.int64]]:
    """Group the indices of steps that share group and anchor state, in order of first appearance: GiGPO's step
    groups."""
    groups: dict[tuple[Hashable, Hashable], list[int]] = {}
    for index, key in enumerate(zip(group_ids, anchor_states, strict=True)):
        groups.setdefault(key, []).append(index)
    return [np.array(members, dtype=np.int64) for members in groups.values()]


def optimal_values(rewards: Numbers, group_sizes: Lengths, *, beta1: float = 0.5) -> Floats:
    """``[S], [B] -> [B]``: ``beta1 log mean_i exp(r_i / beta1)``, the value of each prompt for the loss ``a2po``.

    Brantley et al. 2025, arXiv 2505.20686. The rewards are those of responses of the reference model.
    """
    scaled = _floats(rewards) / beta1
    sizes = _lengths(group_sizes, len(scaled), "group_sizes")
    highest = np.array([part.max() for part in np.split(scaled, np.cumsum(sizes)[:-1])])
    sums = _segment_sum(np.exp(scaled - highest[_segments(sizes)]), sizes)
    return beta1 * (highest + np.log(sums / sizes))


def filtration_weights(
    rewards: Numbers, *, method: Literal["pow", "max_min", "max_random"] = "pow", power: float = 2.0
) -> Floats:
    """``[S]``: the weight with which PF-PPO draws each response for the update (Shen et al. 2024, arXiv 2409.06957).

    Where a reward model is unsure, in the middle of its range, responses are drawn more rarely.

    Args:
        rewards: ``[S]``.
        method: ``pow``: ``|reward|^power``. ``max_min``: 1 for the highest and the lowest rewards, else 0.
            ``max_random``: 0.4 for the highest, else 0.1. Each plus 1e-8, as in verl.
        power: For ``pow``.
    """
    rewards = _floats(rewards)
    if method == "pow":
        weights = np.abs(rewards) ** power
    elif method == "max_min":
        weights = ((rewards == rewards.max()) | (rewards == rewards.min())).astype(np.float64)
    else:
        weights = np.where(rewards == rewards.max(), 0.4, 0.1)
    return weights + 1e-8


def filtered_rows(
    rewards: Numbers,
    *,
    method: Literal["pow", "max_min", "max_random"] = "pow",
    power: float = 2.0,
    seed: int = 0,
) -> npt.NDArray[np.int64]:
    """``[S] -> [S]``: indices of the rows of a batch for PF-PPO, drawn with replacement by :func:`filtration_weights`.

    ``batch = [rows[i] for i in filtered_rows(rewards)]``, then train on it with ``enhanced_ppo``.
    """
    weights = filtration_weights(rewards, method=method, power=power)
    return np.random.default_rng(seed).choice(len(weights), len(weights), p=weights / weights.sum())
