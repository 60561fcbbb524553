"""The correction of a loss for samples of another policy than the trained one: an earlier one, or another engine's.

A token's weight is its probability under the policy before the update over that with which it was sampled, truncated
(Espeholt et al. 2018, IMPALA, arXiv 1802.01561). The clipped ratio of the loss is then relative to the policy before
the update, not to the sampler (Hilton et al. 2021, arXiv 2110.00641; for stale samples: Fu et al. 2025, AReaL, arXiv
2505.24298).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.reporting import Reporter
from gradwire.rl.rows import Row, rows_of
from gradwire.rl.types import FloatArray, Trajectory

TOLERANCE = 1e-3
"""Difference in nats between log-probabilities of sampler and trainer from which on the loss corrects for it."""


class SamplerCorrection:
    """Truncated importance weights for stale samples, and for a sampler that differs from the trainer, as bfloat16 or
    another engine does.

    The first batch that the current policy wrote shows whether sampler and trainer differ: a forward under the policy
    is compared with what the sampler gave.

    Args:
        run: The ``TrainingClient`` that is trained.
        config: The temperature of the samples, and whether stale ones are corrected.
        reporter: Tells the user once that the loss corrects.
    """

    def __init__(self, run: Any, config: AlgorithmConfig, reporter: Reporter) -> None:
        self._run, self._config, self._reporter = run, config, reporter
        self._differs: bool | None = None

    async def apply(
        self, rows: Sequence[Row], kwargs: Mapping[str, Any], *, stale: bool, scored: bool
    ) -> tuple[dict[str, Any], list[FloatArray] | None]:
        """Return the loss's arguments, with the correction if the sampler differs or the rows are stale.

        An explicit ``sampler_correction`` in ``kwargs`` stands.

        Args:
            stale: Whether an earlier policy wrote some of the rows.
            scored: Whether the correction needs the log-probabilities before the update; not if the loss can take those
                of its own forward, before the batch's only step.

        Returns:
            The arguments, and with a correction that needs them the log-probabilities per row ``[tokens]`` under the
            policy as it is now.
        """
        corrected = dict(kwargs)
        if not rows:
            return corrected, None
        trained = None
        if "sampler_correction" not in kwargs:
            if self._differs is None and not stale:
                trained = await self._trained_logprobs(rows)
                self._differs = self._compare(rows, trained)
            if self._differs or (stale and self._config.on_stale == "correct"):
                corrected["sampler_correction"] = "token_truncate"
        needed = scored or corrected.get("sampler_rejection")
        if not corrected.get("sampler_correction") or not needed:
            return corrected, None
        return corrected, trained if trained is not None else await self._trained_logprobs(rows)

    async def score(self, trajectories: Sequence[Trajectory], version: int) -> None:
        """Replace the log-probabilities of the sampler by the trainer's, of the policy that wrote the tokens.

        A sampler that gives the log-probabilities of the kept tokens only (vLLM's ``processed_logprobs``) makes each
        token more probable by the mass that ``top_p`` or ``top_k`` cut off. Importance weights would be that mass.

        Args:
            version: Optimizer steps that the policy has taken.

        Raises:
            ValueError: An earlier policy wrote a token.
        """
        if any(step.policy_version != version for each in trajectories for step in each.steps):
            raise ValueError(
                "the sampler's log-probabilities are of the tokens that top_p or top_k kept, and an earlier policy "
                "wrote some: they cannot be scored. Set top_p=1 and top_k=0"
            )
        self._reporter.warn_once(
            "only_kept",
            "with top_p or top_k the sampler's log-probabilities are of the kept tokens only: the trainer scores the "
            "samples, at the price of a forward per batch",
        )
        rows = rows_of(trajectories)
        for row, scored in zip(rows, await self._trained_logprobs(rows)):
            for number in row.ends:
                trajectories[row.trajectory].steps[number].logprobs = scored[row.step_of == number]

    def _compare(self, rows: Sequence[Row], trained: Sequence[FloatArray]) -> bool:
        difference = max(
            float(np.abs(logprobs - row.logprobs)[row.written].max()) for logprobs, row in zip(trained, rows)
        )
        if difference <= TOLERANCE:
            return False
        self._reporter.warn_once(
            "sampler_correction",
            "the sampler's log-probabilities differ from the trainer's by up to %.2g nats (bfloat16, or another "
            "sampler): the loss corrects for it with truncated importance weights from now on. "
            'loss_kwargs={"sampler_correction": None} turns that off; on a CPU, a run created with deterministic=True '
            "has no difference",
            difference,
        )
        return True

    async def _trained_logprobs(self, rows: Sequence[Row]) -> list[FloatArray]:
        """Per row ``[tokens]``, under the policy as it is now; 0 at tokens that it did not write."""
        batch = {"input_ids": [row.ids for row in rows], "loss_mask": [row.written for row in rows]}
        scored = await self._run.compute_logprobs(batch, temperature=self._config.temperature)
        result = [np.zeros(len(row.ids), np.float32) for row in rows]
        for logprobs, row, found in zip(result, rows, scored):
            logprobs[row.written] = found
        return result
