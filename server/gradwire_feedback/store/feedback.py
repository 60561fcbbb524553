"""Scores received over the API, and queries on an agent's scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Answer, Feedback, IdempotentRequest, Item, new_id, now
from gradwire_feedback.store.order import next_numbers
from gradwire_feedback.store.problems import ConflictError

IDEMPOTENCY_DAYS = 7


@dataclass(frozen=True)
class Score:
    """A received score."""

    prompt: str
    response: str
    score: float
    run_id: str
    notes: str | None = None


def add_feedback(session: Session, agent_id: str, scores: Sequence[Score]) -> list[Feedback]:
    """Store scores; a score whose ``run_id`` is that of a stored answer counts for the answer's version."""
    answers = _answers(session, agent_id, {score.run_id for score in scores})
    for answer in [answers[score.run_id] for score in scores if score.run_id in answers]:
        session.execute(sa.update(Item).where(Item.id == answer.item_id).values(ratings=Item.ratings + 1))
    rows = []
    for number, score in zip(next_numbers(session, agent_id, len(scores)), scores):
        rated = answers.get(score.run_id)
        rows.append(
            Feedback(
                id=new_id(),
                agent_id=agent_id,
                number=number,
                prompt=score.prompt,
                response=score.response,
                score=score.score,
                run_id=score.run_id,
                notes=score.notes,
                version=rated.version if rated else None,
                answer_id=rated.id if rated else None,
            )
        )
    session.add_all(rows)
    session.flush()
    return rows


def _answers(session: Session, agent_id: str, run_ids: set[str]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    ids = sorted(run_ids)
    for start in range(0, len(ids), 500):
        query = sa.select(Answer).where(Answer.agent_id == agent_id, Answer.run_id.in_(ids[start : start + 500]))
        answers |= {answer.run_id: answer for answer in session.scalars(query)}
    return answers


def scores_of(session: Session, agent_id: str) -> list[float]:
    """Return the agent's scores, oldest first."""
    query = sa.select(Feedback.score).where(Feedback.agent_id == agent_id, Feedback.withdrawn.is_(False))
    return list(session.scalars(query.order_by(Feedback.number)))


def rated_by_version(session: Session, agent_id: str) -> dict[str, tuple[int, float]]:
    """Return the number of people's scores of each version's answers, and their mean."""
    query = (
        sa.select(Feedback.version, sa.func.count(), sa.func.avg(Feedback.score))
        .where(Feedback.agent_id == agent_id, Feedback.version.is_not(None), Feedback.withdrawn.is_(False))
        .group_by(Feedback.version)
    )
    return {row[0]: (row[1], float(row[2])) for row in session.execute(query)}


def feedback_of(session: Session, agent_id: str) -> Sequence[Feedback]:
    """Return the agent's feedback, oldest first."""
    query = sa.select(Feedback).where(Feedback.agent_id == agent_id, Feedback.withdrawn.is_(False))
    return session.scalars(query.order_by(Feedback.number)).all()


def request_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def earlier_answer(session: Session, caller: str, agent_id: str, key: str, digest: str) -> Any | None:
    """Return the answer of an earlier request with this Idempotency-Key, or None.

    Raises:
        ConflictError: The earlier request had other content.
    """
    session.execute(
        sa.delete(IdempotentRequest).where(IdempotentRequest.created_at < now() - timedelta(days=IDEMPOTENCY_DAYS))
    )
    earlier = session.get(IdempotentRequest, (caller, agent_id, key))
    if earlier is None:
        return None
    if earlier.digest != digest:
        raise ConflictError("this Idempotency-Key was already used with other content: use a new key for new feedback")
    return earlier.answer["body"]


def keep_answer(session: Session, caller: str, agent_id: str, key: str, digest: str, body: Any) -> None:
    session.add(IdempotentRequest(caller=caller, agent_id=agent_id, key=key, digest=digest, answer={"body": body}))
    session.flush()
