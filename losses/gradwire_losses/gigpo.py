"""Group-in-group policy optimisation: step-level credit from other episodes that passed through the same state.

``B`` tasks, ``S`` episodes of all tasks, ``T`` scored tokens, ``M`` steps of all episodes. An episode is one response:
the agent's tokens are scored, observations between them are masked. Adjacent scored tokens with equal ``step_ids`` are
a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradwire_losses.advantages import at_last_token, gigpo_advantages, gigpo_states
from gradwire_losses.batch import Batch, BatchError, Scores, beside, segment_ids, segment_sum
from gradwire_losses.fields import GROUP_POLICY_FIELDS, SAMPLE_TOKENS, sample_field
from gradwire_losses.group_config import GRPOConfig
from gradwire_losses.grpo import (
    COMPARED_TOKENS,
    GRPO_METRICS,
    group_objective,
    grpo_scores,
    needs_whole_batch,
    reward_advantages,
)
from gradwire_losses.outputs import LossOutput, Mean
from gradwire_losses.registry import FieldSpec, register_loss


class GiGPOConfig(GRPOConfig):
    """Arguments of ``gigpo``."""

    step_weight: float = Field(1.0, ge=0, description="weight of the step level relative to the episode level (omega)")
    gamma: float = Field(0.95, ge=0, le=1, description="discount per step")

    @model_validator(mode="after")
    def _advantages_are_the_papers(self) -> Self:
        if self.baseline != "mean" or self.scale_rewards == "batch" or self.whiten_advantages or self.kl_in_reward:
            raise ValueError(
                "gigpo has its own advantages: baseline, whiten_advantages, kl_in_reward and scale_rewards="
                '"batch" belong to grpo'
            )
        return self


@register_loss(
    "gigpo",
    config=GiGPOConfig,
    layout="groups",
    fields=(
        *GROUP_POLICY_FIELDS,
        FieldSpec(
            "step_ids", "int", SAMPLE_TOKENS, "The step that each token belongs to.", aligned_with="response_ids"
        ),
        FieldSpec(
            "anchor_ids",
            "int",
            SAMPLE_TOKENS,
            "Number of the state in which the token's step was taken; equal states have equal numbers.",
            aligned_with="response_ids",
        ),
        sample_field(
            "step_rewards",
            SAMPLE_TOKENS,
            "Rewards of a step, at any of its tokens; by default the response's reward, at the last step.",
        ),
    ),
    scores=grpo_scores,
    metrics=GRPO_METRICS
    | {"singleton_steps": "share of steps that are alone in their state and have no step-level advantage"},
    reference="Feng et al. 2025, Group-in-Group Policy Optimization (arXiv 2505.10978)",
    formula="GRPO with A_t = A_episode + omega A_step, A_step of the steps' returns, within task and state",
    streams=lambda config, present: not needs_whole_batch(config),
    whole_batch=COMPARED_TOKENS,
)
def gigpo(batch: Batch, scores: Scores, config: GiGPOConfig) -> LossOutput:
    """GRPO with a second advantage: a step's discounted return relative to other steps from the same state of the task.

    Episode rewards are normalised within the task as in ``grpo``, returns of steps among the steps of one task that
    share ``anchor_ids``; both over their standard deviation + 1e-4 unless ``scale_rewards`` is false. A step alone in
    its state has no step level. ``advantages`` in the batch are used unchanged.

    Raises:
        BatchError: The batch has neither ``advantages`` nor both ``step_ids`` and ``anchor_ids``."""
    if "advantages" in batch.fields:
        output = group_objective(batch, scores, config, *reward_advantages(batch, scores, config))
        return replace(output, metrics=dict(output.metrics) | {"singleton_steps": Mean(0.0, 0)})
    for name in ("step_ids", "anchor_ids"):
        if name not in batch.fields:
            raise BatchError(
                f"gigpo needs {name}, or advantages", field=name, rule="step_ids and anchor_ids, or advantages"
            )
    advantages, alone = _advantages(batch, config)
    output = group_objective(batch, scores, config, advantages, advantages)
    return replace(output, metrics=dict(output.metrics) | {"singleton_steps": Mean.of(alone)})


def _advantages(batch: Batch, config: GiGPOConfig) -> tuple[Tensor, Tensor]:
    """``[T]`` advantages, and ``[M]`` bool, on the host: whether a step is alone in its state."""
    lengths, rewards = batch.row_lengths, batch["rewards"]
    episodes, steps = segment_ids(lengths), batch.host["step_ids"]
    begins = torch.ones_like(steps, dtype=torch.bool)
    begins[1:] = (episodes[1:] != episodes[:-1]) | (steps[1:] != steps[:-1])
    step_of_token = begins.long().cumsum(0) - 1
    step_episodes = episodes[begins]
    step_counts = torch.bincount(step_episodes, minlength=len(lengths))
    if "step_rewards" in batch.fields:
        step_lengths = torch.bincount(step_of_token, minlength=len(step_episodes))
        step_rewards = segment_sum(batch["step_rewards"], step_lengths)
    else:
        step_rewards = at_last_token(rewards, step_counts)
    anchors = batch.host["anchor_ids"][begins]
    advantages = gigpo_advantages(
        rewards,
        batch.group_sizes,
        step_rewards,
        step_counts,
        anchors,
        gamma=config.gamma,
        omega=config.step_weight,
        scale=bool(config.scale_rewards),
    )
    states = gigpo_states(batch.group_sizes, step_counts, anchors)
    return advantages[beside(step_of_token, advantages)], torch.bincount(states)[states] == 1
