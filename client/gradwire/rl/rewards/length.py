"""Length-dependent scores: penalties for overlong responses, and a preference for shorter ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradwire.rl.rewards.computer import as_scorer, by_group, close_scorer
from gradwire.rl.rewards.functions import Scorer
from gradwire.rl.types import EvaluateResult, Trajectory


class OverlongPenalty:
    """Penalises responses that approach the token limit (Yu et al. 2025, DAPO, eq. 13).

    No penalty up to ``max_tokens - buffer_tokens``, ``penalty`` at ``max_tokens`` and beyond, linear in between.
    Without these two, what a limit cut off gets the whole penalty and all else none (TRL's ``missing_eos_penalty``).

    Args:
        scorer: A reward function, or any scorer.
        max_tokens: Token limit of the policy per trajectory.
        buffer_tokens: Number of tokens before the limit over which the penalty grows.
        penalty: Penalty at the limit.
    """

    def __init__(
        self, scorer: Scorer | Callable[..., Any], *, max_tokens: int = 0, buffer_tokens: int = 0, penalty: float = 1.0
    ) -> None:
        if (max_tokens or buffer_tokens) and not 0 < buffer_tokens <= max_tokens:
            raise ValueError(f"buffer_tokens must be from 1 to max_tokens ({max_tokens}), got {buffer_tokens}")
        self._scorer = as_scorer(scorer)
        self._max, self._buffer, self._penalty = max_tokens, buffer_tokens, penalty

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        results = await self._scorer.evaluate(trajectories)
        return [self._with_penalty(each, result) for each, result in zip(trajectories, results)]

    def _with_penalty(self, trajectory: Trajectory, result: EvaluateResult) -> EvaluateResult:
        if self._buffer:
            over = (trajectory.num_tokens - (self._max - self._buffer)) / self._buffer
        else:
            over = float(trajectory.was_cut)
        penalty = self._penalty * min(1.0, max(0.0, over))
        return _changed(result, -penalty, {"overlong_penalty": penalty})

    def close(self) -> None:
        close_scorer(self._scorer)


class LengthPenalty:
    """Prefers the shorter responses of a group (Kimi Team 2025, Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    With ``l = 1/2 - (tokens - shortest) / (longest - shortest)``, a correct response (a score of at least
    ``success_threshold``) gets ``weight * l`` added, any other ``weight * min(0, l)``. If all have the same
    length, nothing changes.

    Args:
        scorer: A reward function, or any scorer.
        weight: Weight of the length term.
        success_threshold: Minimum score of a correct response.
    """

    def __init__(
        self, scorer: Scorer | Callable[..., Any], *, weight: float = 0.1, success_threshold: float = 1.0
    ) -> None:
        self._scorer = as_scorer(scorer)
        self._weight, self._threshold = weight, success_threshold

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        results = await self._scorer.evaluate(trajectories)
        changed = {id(each): result for each, result in zip(trajectories, results)}
        for group in by_group(trajectories):
            lengths = np.array([each.num_tokens for each in group], np.float64)
            shortest, spread = lengths.min(), np.ptp(lengths)
            for each, length in zip(group, lengths):
                result = changed[id(each)]
                share = 0.5 - (length - shortest) / spread if spread else 0.0
                bonus = self._weight * (share if result.score >= self._threshold else min(0.0, share))
                changed[id(each)] = _changed(result, bonus, {"length_bonus": bonus})
        return [changed[id(each)] for each in trajectories]

    def close(self) -> None:
        close_scorer(self._scorer)


def _changed(result: EvaluateResult, by: float, metrics: dict[str, float]) -> EvaluateResult:
    """Return the result with another score; the original is kept among the metrics as ``unshaped``."""
    if result.error:
        return result
    shaped = {**result.metrics, "unshaped": result.score, **metrics}
    return replace(result, score=result.score + by, metrics=shaped)
