"""Deployed versions of an agent, and their assignment to users."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Answer, Deployment, Feedback, Item, Policy
from gradwire_feedback.names import BASE
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.statistics.user_effects import Scores
from gradwire_feedback.store.problems import ConflictError, NotFoundError, UnprocessableError

SUM_TOLERANCE = 1e-6


def policies_of(session: Session, agent_id: str) -> Sequence[Policy]:
    """Return the agent's versions, oldest first."""
    return session.scalars(sa.select(Policy).where(Policy.agent_id == agent_id).order_by(Policy.number)).all()


def policy_of(session: Session, agent_id: str, version: str) -> Policy:
    """Return a version of the agent.

    Raises:
        NotFoundError: The agent has no such version.
    """
    stored = session.scalar(sa.select(Policy).where(Policy.agent_id == agent_id, Policy.version == version))
    if stored is None:
        have = ", ".join(policy.version for policy in policies_of(session, agent_id)) or "none yet"
        raise NotFoundError(f"{agent_id} has no version {version!r}; it has {have}")
    return stored


def newest_deployment(session: Session, agent_id: str) -> Deployment | None:
    """Return the deployment in effect; None if nothing was deployed."""
    query = sa.select(Deployment).where(Deployment.agent_id == agent_id).order_by(Deployment.number.desc()).limit(1)
    return session.scalar(query)


def deployment_of(session: Session, agent_id: str) -> dict[str, float]:
    """Return the weights in effect; only the base model if nothing was deployed."""
    found = newest_deployment(session, agent_id)
    return dict(found.weights) if found is not None else {BASE: 1.0}


def deploy(session: Session, agent_id: str, weights: Mapping[str, float]) -> dict[str, float]:
    """Deploy versions, each for its share of the users; ``base`` is the untrained model.

    Raises:
        UnprocessableError: The weights are not shares that sum to 1.
        NotFoundError: The agent has no such version.
    """
    if not weights:
        raise UnprocessableError('a deployment needs at least one version: {"v15": 1}')
    if len(weights) > LIMITS.versions_in_deployment:
        raise UnprocessableError(f"a deployment may have at most {LIMITS.versions_in_deployment} versions")
    for version, weight in weights.items():
        if not (math.isfinite(weight) and 0 <= weight <= 1):
            raise UnprocessableError(f"{version}: the weight {weight} is not in 0..1")
        if version != BASE:
            policy_of(session, agent_id, version)
    if abs(math.fsum(weights.values()) - 1) > SUM_TOLERANCE:
        raise UnprocessableError(f"the weights sum to {math.fsum(weights.values()):g}; they must sum to 1")
    kept = {version: float(weight) for version, weight in weights.items() if weight > 0}
    session.add(Deployment(agent_id=agent_id, weights=kept))
    session.flush()
    return kept


def roll_back(session: Session, agent_id: str) -> dict[str, float]:
    """Deploy only the version made before the newest deployed one; before the first it is the base model.

    Raises:
        ConflictError: Only the base model is deployed.
    """
    made = [BASE, *(policy.version for policy in policies_of(session, agent_id))]
    newest = max(made.index(version) for version in deployment_of(session, agent_id))
    if newest == 0:
        raise ConflictError(f"there is no earlier version: {agent_id} answers with the base model")
    return deploy(session, agent_id, {made[newest - 1]: 1.0})


def draw_version(weights: Mapping[str, float], agent_id: str, unit: str) -> str:
    """Return the version for a user, which stays the same while the weights do.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005): when
    weights change, only users of a version whose share shrinks change versions.
    """

    def distance(version: str) -> float:
        digest = hashlib.sha256("\0".join((agent_id, version, unit)).encode()).digest()
        uniform = (int.from_bytes(digest[:8]) + 1) / (2**64 + 1)
        return -math.log(uniform) / weights[version]

    return min(sorted(weights), key=distance)


@dataclass(frozen=True)
class Stage:
    """A deployment of the versions under test.

    Attributes:
        units: By version, the number of distinct users, plus requests without a user, while it was in effect.
    """

    weights: dict[str, float]
    units: dict[str, int]


@dataclass(frozen=True)
class Observed:
    """Data of an A/B test: consecutive deployments of the same versions.

    Attributes:
        since: When these versions were first deployed together.
        weights: Weights of their newest deployment, oldest version first; the others number versions so.
        scores: The first score of each rated answer.
        stages: Their deployments, oldest first.
    """

    since: datetime
    weights: dict[str, float]
    scores: Scores
    stages: tuple[Stage, ...]


def observe(session: Session, agent_id: str) -> Observed | None:
    """Return the data of the newest A/B test; None if two versions were never deployed together."""
    history = _history(session, agent_id)
    last = next((i for i in range(len(history) - 1, -1, -1) if len(history[i].weights) > 1), None)
    if last is None:
        return None
    first = last
    while first > 0 and set(history[first - 1].weights) == set(history[last].weights):
        first -= 1
    tested = history[first : last + 1]
    ages = {BASE: 0} | {policy.version: policy.number for policy in policies_of(session, agent_id)}
    versions = sorted(tested[-1].weights, key=ages.__getitem__)
    answered = [
        Answer.agent_id == agent_id,
        Item.deployment.in_([deployment.number for deployment in tested]),
        Answer.version.in_(versions),
    ]
    unit = sa.func.coalesce(Item.user_id, Item.id).label("unit")
    rows = session.execute(
        sa.select(Answer.id, Answer.version, Item.deployment, unit, Feedback.score)
        .join(Feedback, Feedback.answer_id == Answer.id)
        .join(Item, Item.id == Answer.item_id)
        .where(*answered, Feedback.withdrawn.is_(False))
        .order_by(Item.number, Answer.position, Feedback.number)
    )
    kept = list({row.id: row for row in reversed(rows.all())}.values())[::-1]  # the first score of each answer
    users = {user: number for number, user in enumerate(dict.fromkeys(row.unit for row in kept))}
    scores = Scores(
        np.array([row.score for row in kept], np.float64),
        np.array([users[row.unit] for row in kept], np.int64),
        np.array([versions.index(row.version) for row in kept], np.int64),
        np.array([row.deployment for row in kept], np.int64),
        {each.number: [each.weights[version] for version in versions] for each in tested},
    )
    drawn = session.execute(
        sa.select(Item.deployment, Answer.version, sa.func.count(sa.distinct(unit)))
        .join(Item, Item.id == Answer.item_id)
        .where(*answered)
        .group_by(Item.deployment, Answer.version)
    )
    counts = {(deployment, version): count for deployment, version, count in drawn}
    stages = tuple(
        Stage(
            {version: deployment.weights[version] for version in versions},
            {version: counts.get((deployment.number, version), 0) for version in versions},
        )
        for deployment in tested
    )
    return Observed(tested[0].created_at, stages[-1].weights, scores, stages)


def _history(session: Session, agent_id: str) -> Sequence[Deployment]:
    query = sa.select(Deployment).where(Deployment.agent_id == agent_id).order_by(Deployment.number)
    return session.scalars(query).all()
