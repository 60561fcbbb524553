"""All agents of the service; one exists from the first row that names it."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Counter, Deployment, Feedback, Item, Policy
from gradwire_feedback.store.deployments import deployment_of


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        waiting: Number of items that wait for raters.
        scores: Number of its scores.
        versions: Number of its trained versions.
        weights: The deployed versions and their weights.
    """

    name: str
    waiting: int
    scores: int
    versions: int
    weights: dict[str, float]


def agents_of(session: Session) -> list[Agent]:
    """Return all agents by name."""
    waiting, scores, versions = (
        {row[0]: row[1] for row in session.execute(query)}
        for query in (
            sa.select(Item.agent_id, sa.func.count()).where(Item.ratings < Item.raters).group_by(Item.agent_id),
            sa.select(Feedback.agent_id, sa.func.count())
            .where(Feedback.withdrawn.is_(False))
            .group_by(Feedback.agent_id),
            sa.select(Policy.agent_id, sa.func.count()).group_by(Policy.agent_id),
        )
    )
    names = session.scalars(sa.union(sa.select(Counter.agent_id), sa.select(Deployment.agent_id)))
    return [
        Agent(name, waiting.get(name, 0), scores.get(name, 0), versions.get(name, 0), deployment_of(session, name))
        for name in sorted(names)
    ]
