"""Stored ratings: listed, corrected and withdrawn, with their history and the versions that were trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased

from gradwire_feedback.database.tables import Answer, Feedback, Item, Policy, Ranking, Revision
from gradwire_feedback.store.deployments import policies_of
from gradwire_feedback.store.order import next_number
from gradwire_feedback.store.problems import ConflictError, ForbiddenError, NotFoundError


@dataclass(frozen=True)
class Rating:
    """A score with what became of it.

    Attributes:
        history: The rating before each change, oldest first.
        versions: Versions that were trained on it, as it was then.
    """

    feedback: Feedback
    history: tuple[Revision, ...]
    versions: tuple[str, ...]


def ratings_of(
    session: Session, agent_id: str, *, rater: str | None = None, before: int | None = None, limit: int = 50
) -> list[Rating]:
    """Return ratings, newest first.

    Args:
        rater: Only this person's.
        before: Only those with a smaller number, to page on.
    """
    query = sa.select(Feedback).where(Feedback.agent_id == agent_id).order_by(Feedback.number.desc()).limit(limit)
    if rater is not None:
        query = query.where(Feedback.rater == rater)
    if before is not None:
        query = query.where(Feedback.number < before)
    return _with_history(session, agent_id, session.scalars(query).all())


def _with_history(session: Session, agent_id: str, rows: Sequence[Feedback]) -> list[Rating]:
    changes: dict[str, list[Revision]] = {}
    query = sa.select(Revision).where(Revision.feedback_id.in_([row.id for row in rows])).order_by(Revision.number)
    for change in session.scalars(query):
        changes.setdefault(change.feedback_id, []).append(change)
    policies = policies_of(session, agent_id)
    paired: set[str | None] = set(session.scalars(_paired().where(Answer.id.in_([row.answer_id for row in rows]))))
    return [
        Rating(
            row,
            tuple(changes.get(row.id, ())),
            tuple(
                policy.version
                for policy in policies
                if (policy.method == "ppo" or row.answer_id in paired)
                and _trained_on(policy, row, changes.get(row.id, ()))
            ),
        )
        for row in rows
    ]


def _trained_on(policy: Policy, row: Feedback, changes: Sequence[Revision]) -> bool:
    withdrawn = [change.number for change in changes if change.change == "withdrawn"]
    return row.number <= policy.trained_until < min(withdrawn, default=policy.trained_until + 1)


def _paired() -> sa.Select[str]:
    """Ids of the answers that stand beside another, whose grades are preferences."""
    several = sa.select(Answer.item_id).group_by(Answer.item_id).having(sa.func.count() > 1)
    return sa.select(Answer.id).where(Answer.item_id.in_(several))


def changed_since(session: Session, agent_id: str) -> dict[str, int]:
    """Number of ratings and rankings, by version, that were corrected or withdrawn after it was trained on them."""
    earlier = aliased(Revision)
    gone = sa.exists().where(
        earlier.feedback_id == Feedback.id, earlier.change == "withdrawn", earlier.number <= Policy.trained_until
    )
    query = (
        sa.select(Policy.version, sa.func.count(sa.distinct(Feedback.id)))
        .join(Feedback, Feedback.agent_id == Policy.agent_id)
        .join(Revision, Revision.feedback_id == Feedback.id)
        .where(Policy.agent_id == agent_id, Feedback.number <= Policy.trained_until)
        .where(Revision.number > Policy.trained_until, sa.not_(gone))
        .where(sa.or_(Policy.method == "ppo", Feedback.answer_id.in_(_paired())))
        .group_by(Policy.version)
    )
    ranked = (
        sa.select(Policy.version, sa.func.count())
        .join(Ranking, Ranking.agent_id == Policy.agent_id)
        .where(Policy.agent_id == agent_id, Policy.method == "dpo", Ranking.number <= Policy.trained_until)
        .where(Ranking.withdrawn > Policy.trained_until)
        .group_by(Policy.version)
    )
    counts: dict[str, int] = {}
    for version, count in [*session.execute(query), *session.execute(ranked)]:
        counts[version] = counts.get(version, 0) + count
    return counts


def correct(
    session: Session, agent_id: str, feedback_id: str, by: str, score: float, notes: str | None, *, own: bool
) -> Rating:
    """Replace a rating's score, and its note where there is another.

    Args:
        by: The person who does it.
        own: Whether only their own ratings are allowed.

    Raises:
        NotFoundError, ForbiddenError: There is no such rating, or it is another person's.
        ConflictError: It was withdrawn.
    """
    row = _changeable(session, agent_id, feedback_id, by, own)
    _remember(session, row, "corrected", by)
    row.score, row.notes = score, row.notes if notes is None else notes
    session.flush()
    return _with_history(session, agent_id, [row])[0]


def withdraw(session: Session, agent_id: str, feedback_id: str, by: str, *, own: bool) -> Rating:
    """Take a rating out of training, comparison and agreement; on two answers side by side it takes both.

    Args, Raises: As for :func:`correct`.
    """
    row = _changeable(session, agent_id, feedback_id, by, own)
    withdraw_rows(session, _together(session, row), by)
    return _with_history(session, agent_id, [row])[0]


def withdraw_rows(session: Session, rows: Sequence[Feedback], by: str) -> None:
    """Withdraw the scores of one rating; its item waits for a rater again."""
    answer = session.get(Answer, rows[0].answer_id) if rows[0].answer_id else None
    if answer is not None:
        session.execute(sa.update(Item).where(Item.id == answer.item_id).values(ratings=Item.ratings - 1))
    for row in rows:
        _remember(session, row, "withdrawn", by)
        row.withdrawn = True
    session.flush()


def _together(session: Session, row: Feedback) -> Sequence[Feedback]:
    """The scores that a rater gave to the answers of one item."""
    if row.answer_id is None or row.rater is None:
        return [row]
    item = sa.select(Answer.item_id).where(Answer.id == row.answer_id).scalar_subquery()
    query = (
        sa.select(Feedback)
        .join(Answer, Answer.id == Feedback.answer_id)
        .where(Answer.item_id == item, Feedback.rater == row.rater, Feedback.withdrawn.is_(False))
    )
    return session.scalars(query).all()


def _changeable(session: Session, agent_id: str, feedback_id: str, by: str, own: bool) -> Feedback:
    row = session.get(Feedback, feedback_id, with_for_update={"of": Feedback})
    if row is None or row.agent_id != agent_id:
        raise NotFoundError(f"{agent_id} has no rating {feedback_id[:100]!r}")
    if own and (row.rater is None or row.rater != by):
        raise ForbiddenError("this rating is another person's: a key with the role train may change it")
    if row.withdrawn:
        raise ConflictError("this rating was withdrawn")
    return row


def _remember(session: Session, row: Feedback, change: str, by: str) -> None:
    number = next_number(session, row.agent_id)
    session.add(Revision(feedback_id=row.id, number=number, change=change, score=row.score, notes=row.notes, by=by))
