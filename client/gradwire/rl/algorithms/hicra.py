"""HICRA: GRPO with amplified advantages of planning tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from gradwire.rl.algorithms.base import AlgorithmOptions
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.algorithms.grpo import GRPOAlgorithm
from gradwire.rl.curricula import Curriculum, Tasks
from gradwire.rl.rewards import Reward
from gradwire.rl.rows import TrainingBatch
from gradwire.rl.strategic_grams import StrategicGrams, token_texts
from gradwire.rl.types import Trajectory


class HICRAAlgorithm(GRPOAlgorithm):
    """GRPO that raises the advantage A of tokens inside strategic grams to ``A + planning_alpha |A|``.

    As in the paper (arXiv 2509.03646), A is a reward minus its group's mean; ``scale_rewards=True`` in
    ``config.loss_kwargs`` divides it by the standard deviation as GRPO does, and ``planning_alpha`` there replaces
    the default of 0.2. The metric ``train/planning_fraction`` is the share of planning tokens.

    Args:
        grams: The strategic grams, from :func:`~gradwire.rl.strategic_grams.find_strategic_grams`.
        options: Further arguments of :class:`~gradwire.rl.algorithms.base.Algorithm`.
    """

    def __init__(
        self,
        service: Any,
        run: Any,
        tasks: Tasks | Curriculum,
        reward: Reward,
        config: AlgorithmConfig | None = None,
        *,
        grams: StrategicGrams,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        config = config or AlgorithmConfig()
        config = replace(config, loss_kwargs={"scale_rewards": False, **config.loss_kwargs})
        super().__init__(service, run, tasks, reward, config, **options)
        self.grams = grams

    async def training_batch(self, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        batch = await super().training_batch(trajectories)
        assert self._inference is not None
        groups = batch.columns.get("response_ids", [])
        texts = iter(await token_texts(self._inference.codec, [response for group in groups for response in group]))
        masks = [[self.grams.planning_mask(next(texts)) for _ in group] for group in groups]
        return replace(batch, columns={**batch.columns, "planning_mask": masks}) if masks else batch
