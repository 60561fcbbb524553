"""The correction of a loss for a sampler whose log-probabilities are not the trainer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradwire.rl.algorithms.reporting import Reporter
from gradwire.rl.rows import Row
from gradwire.rl.types import FloatArray

TOLERANCE = 1e-3
"""Difference in nats between log-probabilities of sampler and trainer from which on the loss corrects for it."""


class SamplerCorrection:
    """Truncated importance weights for a sampler that differs from the trainer, as bfloat16 or another engine does.

    The first batch, which the current policy wrote, shows whether they differ: a forward under the policy is compared
    with what the sampler gave.

    Args:
        run: The ``TrainingClient`` that is trained.
        temperature: The temperature of the samples.
        reporter: Tells the user once that the loss corrects.
    """

    def __init__(self, run: Any, temperature: float, reporter: Reporter) -> None:
        self._run, self._temperature, self._reporter = run, temperature, reporter
        self._differs: bool | None = None

    async def apply(
        self, rows: Sequence[Row], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[FloatArray] | None]:
        """Return the loss's arguments, with the correction if the sampler differs.

        An explicit ``sampler_correction`` in ``kwargs`` stands.

        Returns:
            The arguments, and with a correction the log-probabilities per row ``[tokens]`` under the policy as it is
            now.
        """
        corrected = dict(kwargs)
        if not rows:
            return corrected, None
        trained = None
        if "sampler_correction" not in kwargs and self._differs is not False:
            trained = await self._trained_logprobs(rows)
            if self._differs is None:
                self._differs = self._compare(rows, trained)
            if self._differs:
                corrected["sampler_correction"] = "token_truncate"
        if not corrected.get("sampler_correction"):
            return corrected, None
        return corrected, trained if trained is not None else await self._trained_logprobs(rows)

    def _compare(self, rows: Sequence[Row], trained: Sequence[FloatArray]) -> bool:
        difference = max(
            float(np.abs(logprobs - row.logprobs)[row.written].max()) for logprobs, row in zip(trained, rows)
        )
        if difference <= TOLERANCE:
            return False
        self._reporter.warn_once(
            "sampler_correction",
            "the sampler's log-probabilities differ from the trainer's by up to %.2g nats (bfloat16, or another "
            "sampler): the loss corrects for it with truncated importance weights from now on, at the price of a "
            'forward per iteration. loss_kwargs={"sampler_correction": None} turns that off',
            difference,
        )
        return True

    async def _trained_logprobs(self, rows: Sequence[Row]) -> list[FloatArray]:
        """Per row ``[tokens]``, under the policy as it is now; 0 at tokens that it did not write."""
        batch = {"input_ids": [row.ids for row in rows], "loss_mask": [row.written for row in rows]}
        scored = await self._run.compute_logprobs(batch, temperature=self._temperature)
        result = [np.zeros(len(row.ids), np.float32) for row in rows]
        for logprobs, row, found in zip(result, rows, scored):
            logprobs[row.written] = found
        return result
