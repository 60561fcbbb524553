"""Deployed versions of an agent, and their assignment to users."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Answer, Deployment, Feedback, Item, Policy
from gradwire_feedback.names import BASE, version_order
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store.problems import ConflictError, NotFoundError, UnprocessableError

SUM_TOLERANCE = 1e-6


def policies_of(session: Session, agent_id: str) -> Sequence[Policy]:
    """Return the agent's versions, oldest first."""
    rows = session.scalars(sa.select(Policy).where(Policy.agent_id == agent_id)).all()
    return sorted(rows, key=lambda policy: (policy.created_at, version_order(policy.version)))


def policy_of(session: Session, agent_id: str, version: str) -> Policy:
    """Return a version of the agent.

    Raises:
        NotFoundError: The agent has no such version.
    """
    found = session.scalar(sa.select(Policy).where(Policy.agent_id == agent_id, Policy.version == version))
    if found is None:
        have = ", ".join(policy.version for policy in policies_of(session, agent_id)) or "none yet"
        raise NotFoundError(f"{agent_id} has no version {version!r}; it has: {have}")
    return found


def deployment_of(session: Session, agent_id: str) -> dict[str, float]:
    """Return the weights in effect; only the base model if nothing was deployed."""
    found = _history(session, agent_id)
    return dict(found[-1].weights) if found else {BASE: 1.0}


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
    """Deploy only the version before the newest deployed one; before the first it is the base model.

    Raises:
        ConflictError: Only the base model is deployed.
    """
    current = deployment_of(session, agent_id)
    newest = max(current, key=version_order)
    if newest == BASE:
        raise ConflictError(f"there is no earlier version: {agent_id} answers with the base model")
    older = [p.version for p in policies_of(session, agent_id) if version_order(p.version) < version_order(newest)]
    return deploy(session, agent_id, {max(older, key=version_order) if older else BASE: 1.0})


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
class Observed:
    """Data of a deployment of several versions.

    Attributes:
        since: When these versions were first deployed together.
        weights: Weights of their newest deployment.
        scores: By version, the first score of each rated answer, in order of arrival.
        units: By version, the number of distinct users, plus requests without a user, under these weights.
    """

    since: datetime
    weights: dict[str, float]
    scores: dict[str, list[float]]
    units: dict[str, int]


def observe(session: Session, agent_id: str) -> Observed | None:
    """Return the data of the newest A/B deployment; None if two versions were never deployed together."""
    history = _history(session, agent_id)
    last = next((i for i in range(len(history) - 1, -1, -1) if len(history[i].weights) > 1), None)
    if last is None:
        return None
    first = last
    while first > 0 and set(history[first - 1].weights) == set(history[last].weights):
        first -= 1
    since, versions = history[first].created_at, sorted(history[last].weights, key=version_order)
    until = history[last + 1].created_at if last + 1 < len(history) else None
    scores: dict[str, list[float]] = {version: [] for version in versions}
    seen = set()
    answered = [Answer.agent_id == agent_id, Item.created_at >= since, Answer.version.in_(versions)]
    answered += [Item.created_at < until] if until is not None else []
    rows = session.execute(
        sa.select(Answer.id, Answer.version, Feedback.score)
        .join(Feedback, Feedback.answer_id == Answer.id)
        .join(Item, Item.id == Answer.item_id)
        .where(*answered)
        .order_by(Feedback.created_at, Feedback.id)
    )
    for answer, version, score in rows:
        if answer not in seen and version is not None:
            seen.add(answer)
            scores[version].append(score)
    drawn = session.execute(
        sa.select(Answer.version, sa.func.count(sa.distinct(sa.func.coalesce(Item.user_id, Item.id))))
        .join(Item, Item.id == Answer.item_id)
        .where(*answered, Item.created_at >= history[last].created_at)
        .group_by(Answer.version)
    )
    counts: dict[str | None, int] = dict(drawn.tuples().all())
    units = {version: counts.get(version, 0) for version in versions}
    return Observed(since, dict(history[last].weights), scores, units)


def _history(session: Session, agent_id: str) -> Sequence[Deployment]:
    query = sa.select(Deployment).where(Deployment.agent_id == agent_id).order_by(Deployment.number)
    return session.scalars(query).all()
