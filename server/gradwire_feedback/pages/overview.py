"""Data of the policies page, read in one transaction so that changes can be detected."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gradwire_feedback.api.policies import comparison_of
from gradwire_feedback.api.schemas import ComparisonOut
from gradwire_feedback.context import Context
from gradwire_feedback.names import version_folder
from gradwire_feedback.statistics.agreement import agreement
from gradwire_feedback.statistics.distribution import Distribution, distribution
from gradwire_feedback.store import deployments, rating
from gradwire_feedback.store.feedback import rated_by_version, scores_of
from gradwire_feedback.store.ratings import changed_since
from gradwire_feedback.training.report import read_report


@dataclass(frozen=True)
class VersionRow:
    """A row of the table of versions.

    Attributes:
        reward_mean, reward_std: The reward model's predictions for its answers; None after a training on preferences.
        rated: Number of people's scores of its answers, and their mean.
        reward_history: Predicted reward of each training step; empty if its file is missing.
    """

    version: str
    parent: str
    method: str
    feedback_count: int
    reward_mean: float | None
    reward_std: float | None
    training_steps: int
    created_at: datetime
    changed_feedback: int
    rated: tuple[int, float] | None
    reward_history: tuple[float, ...]


@dataclass(frozen=True)
class Overview:
    """A snapshot of an agent."""

    distribution: Distribution
    agreement: float | None
    versions: tuple[VersionRow, ...]
    weights: dict[str, float]
    comparison: ComparisonOut


def load(context: Context, agent_id: str) -> Overview:
    with context.database.read() as session:
        scores = distribution(scores_of(session, agent_id))
        alpha = agreement(rating.score_table(session, agent_id))
        policies = deployments.policies_of(session, agent_id)
        changed = changed_since(session, agent_id)
        rated = rated_by_version(session, agent_id)
        weights = deployments.deployment_of(session, agent_id)
    versions = tuple(
        VersionRow(
            version=policy.version,
            parent=policy.parent,
            method=policy.method,
            feedback_count=policy.feedback_count,
            reward_mean=policy.reward_mean,
            reward_std=policy.reward_std,
            training_steps=policy.training_steps,
            created_at=policy.created_at,
            changed_feedback=changed.get(policy.version, 0),
            rated=rated.get(policy.version),
            reward_history=_history(context, agent_id, policy.version, policy.method),
        )
        for policy in policies
    )
    return Overview(scores, alpha, versions, weights, comparison_of(context, agent_id))


def _history(context: Context, agent_id: str, version: str, method: str) -> tuple[float, ...]:
    folder = version_folder(context.settings.models_dir, agent_id, version)
    return tuple(read_report(folder, method).curves.get("reward", ()))
