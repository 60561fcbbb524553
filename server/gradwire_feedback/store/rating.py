"""Items to rate: reserved for one rater at a time, rated, skipped, and taken back.

An item is open while fewer raters than wanted have finished it. A rater never sees an item again that they rated or
skipped. An unused reservation expires, so that a closed browser blocks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Answer, Feedback, Item, Ranking, Skip, now
from gradwire_feedback.store import rankings
from gradwire_feedback.store.order import next_number, next_numbers
from gradwire_feedback.store.problems import ConflictError, NotFoundError, UnprocessableError
from gradwire_feedback.store.ratings import withdraw_rows

RESERVED_FOR = timedelta(minutes=10)


@dataclass(frozen=True)
class NewAnswer:
    """An answer to be rated."""

    run_id: str
    response: str
    version: str | None = None


def add_item(
    session: Session,
    agent_id: str,
    prompt: str,
    answers: Sequence[NewAnswer],
    raters: int,
    user_id: str | None = None,
    deployment: int | None = None,
    ask: str = "grades",
) -> Item:
    """Add one answer, or several side by side, to the queue of the rating page.

    Args:
        ask: ``"grades"``, or ``"ranking"``.

    Raises:
        ConflictError: A run id is already in use.
    """
    taken = session.scalars(
        sa.select(Answer.run_id).where(
            Answer.agent_id == agent_id, Answer.run_id.in_([answer.run_id for answer in answers])
        )
    ).first()
    if taken is not None or len({answer.run_id for answer in answers}) < len(answers):
        raise ConflictError(f"runId {(taken or answers[0].run_id)!r} already names an answer of {agent_id}")
    number = next_number(session, agent_id)
    item = Item(
        agent_id=agent_id, number=number, prompt=prompt, ask=ask, raters=raters, user_id=user_id, deployment=deployment
    )
    item.answers = [
        Answer(
            agent_id=agent_id,
            position=position,
            run_id=answer.run_id,
            version=answer.version,
            response=answer.response,
        )
        for position, answer in enumerate(answers)
    ]
    session.add(item)
    session.flush()
    return item


def reserve(session: Session, agent_id: str, rater: str) -> Item | None:
    """Return the next item for this rater, reserved; an item they have already reserved comes first."""
    time = now()
    rated = (
        sa.select(Answer.item_id)
        .join(Feedback, Feedback.answer_id == Answer.id)
        .where(Feedback.rater == rater, Answer.agent_id == agent_id, Feedback.withdrawn.is_(False))
    )
    ranked = sa.select(Ranking.item_id).where(Ranking.rater == rater, Ranking.withdrawn.is_(None))
    skipped = sa.select(Skip.item_id).where(Skip.rater == rater)
    lapsed = sa.not_(Item.reserved_until.between(time, time + 2 * RESERVED_FOR))  # later: the clock was set back
    free = sa.or_(Item.reserved_until.is_(None), lapsed, Item.reserved_by == rater)
    query = (
        sa.select(Item)
        .where(Item.agent_id == agent_id, Item.ratings < Item.raters, free)
        .where(Item.id.not_in(rated), Item.id.not_in(ranked), Item.id.not_in(skipped))
        .order_by(sa.case((Item.reserved_by == rater, 0), else_=1), Item.number)
        .limit(1)
        .with_for_update(skip_locked=True, of=Item)
    )
    item = session.scalar(query)
    if item is not None:
        item.reserved_by, item.reserved_until = rater, time + RESERVED_FOR
    return item


def rate(session: Session, item_id: str, rater: str, scores: Sequence[float], notes: str | None) -> list[Feedback]:
    """Store a rater's scores of the answers of their reserved item.

    Raises:
        NotFoundError: There is no such item.
        ConflictError: The reservation expired and another rater has the item, or it is already rated.
        UnprocessableError: There is not exactly one score for each answer.
    """
    item = _held(session, item_id, rater)
    if len(scores) != len(item.answers):
        raise UnprocessableError(f"the item has {len(item.answers)} answers, but the request has {len(scores)} scores")
    numbers = next_numbers(session, item.agent_id, len(scores))
    rows = [
        Feedback(
            agent_id=item.agent_id,
            number=number,
            prompt=item.prompt,
            response=answer.response,
            score=score,
            run_id=answer.run_id,
            notes=notes,
            version=answer.version,
            answer_id=answer.id,
            rater=rater,
        )
        for number, answer, score in zip(numbers, item.answers, scores)
    ]
    session.add_all(rows)
    item.ratings += 1
    item.reserved_by = item.reserved_until = None
    session.flush()
    return rows


def rank(session: Session, item_id: str, rater: str, ranks: Sequence[int], notes: str | None) -> Ranking:
    """Store a rater's places of the answers of their reserved item, 1 for the best.

    Raises:
        NotFoundError, ConflictError, UnprocessableError: As for :func:`rate`.
    """
    item = _held(session, item_id, rater)
    row = rankings.store_ranking(session, item, rater, ranks, notes)
    item.ratings += 1
    item.reserved_by = item.reserved_until = None
    session.flush()
    return row


def skip(session: Session, item_id: str, rater: str) -> None:
    """Leave the item to other raters.

    Raises:
        NotFoundError, ConflictError: As for :func:`rate`.
    """
    item = _held(session, item_id, rater)
    item.reserved_by = item.reserved_until = None
    session.add(Skip(item_id=item_id, rater=rater, number=next_number(session, item.agent_id)))
    session.flush()


@dataclass(frozen=True)
class TakenBack:
    """An item that waits again for the rater who rated or skipped it.

    Attributes:
        scores: The scores that they had given; empty after a ranking or a skip.
        ranks: The places that they had given; empty after all else.
        notes: Their note.
    """

    item: Item
    scores: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    notes: str | None = None


def undo(session: Session, agent_id: str, rater: str) -> TakenBack | None:
    """Take back the rater's last rating, ranking or skip, and reserve its item for them again; None without any."""
    rated = session.execute(
        sa.select(Answer.item_id, Feedback.number)
        .join(Feedback, Feedback.answer_id == Answer.id)
        .where(Feedback.rater == rater, Feedback.agent_id == agent_id, Feedback.withdrawn.is_(False))
        .order_by(Feedback.number.desc())
        .limit(1)
    ).first()
    skipped = session.execute(
        sa.select(Skip.item_id, Skip.number)
        .join(Item, Item.id == Skip.item_id)
        .where(Skip.rater == rater, Item.agent_id == agent_id)
        .order_by(Skip.number.desc())
        .limit(1)
    ).first()
    ranked = session.scalar(
        sa.select(Ranking)
        .where(Ranking.rater == rater, Ranking.agent_id == agent_id, Ranking.withdrawn.is_(None))
        .order_by(Ranking.number.desc())
        .limit(1)
    )
    last = max((each.number for each in (rated, skipped, ranked) if each is not None), default=None)
    if last is None:
        return None
    if ranked is not None and ranked.number == last:
        item = session.get_one(Item, ranked.item_id, with_for_update={"of": Item})
        rankings.take_back(session, ranked)
        session.refresh(item)
        taken_back = TakenBack(item, ranks=tuple(ranked.ranks), notes=ranked.notes)
    elif skipped is not None and skipped.number == last:
        item = session.get_one(Item, skipped.item_id, with_for_update={"of": Item})
        session.execute(sa.delete(Skip).where(Skip.item_id == item.id, Skip.rater == rater))
        taken_back = TakenBack(item)
    else:
        assert rated is not None
        item = session.get_one(Item, rated.item_id, with_for_update={"of": Item})
        query = sa.select(Feedback).where(Feedback.rater == rater, Feedback.withdrawn.is_(False))
        rows = session.scalars(
            query.where(Feedback.answer_id.in_([answer.id for answer in item.answers])).order_by(Feedback.number)
        ).all()
        taken_back = TakenBack(item, tuple(row.score for row in rows), notes=rows[0].notes)
        withdraw_rows(session, rows, rater)
        session.refresh(item)
    for other in session.scalars(sa.select(Item).where(Item.agent_id == agent_id, Item.reserved_by == rater)):
        other.reserved_by = other.reserved_until = None
    item.reserved_by, item.reserved_until = rater, now() + RESERVED_FOR
    session.flush()
    return taken_back


def _held(session: Session, item_id: str, rater: str) -> Item:
    item = session.get(Item, item_id, with_for_update={"of": Item})
    if item is None:
        raise NotFoundError("there is no such item")
    if item.reserved_by != rater:
        raise ConflictError("your reservation of this item expired: continue with the next one")
    return item


def held_by_others(session: Session, agent_id: str, rater: str) -> int:
    """Count the open items that other raters have reserved."""
    query = sa.select(sa.func.count()).where(
        Item.agent_id == agent_id, Item.ratings < Item.raters, Item.reserved_by != rater, Item.reserved_until > now()
    )
    return session.scalar(query) or 0


def open_items(session: Session, agent_id: str) -> int:
    """Count the items that wait for raters."""
    query = sa.select(sa.func.count()).where(Item.agent_id == agent_id, Item.ratings < Item.raters)
    return session.scalar(query) or 0


def score_table(session: Session, agent_id: str) -> NDArray[np.float64]:
    """Table of scores by raters and answers, [raters, answers]; NaN where a rater did not score an answer.

    It contains only answers that two raters or more scored on the page.
    """
    query = sa.select(Feedback.rater, Feedback.answer_id, Feedback.score).where(
        Feedback.agent_id == agent_id,
        Feedback.rater.is_not(None),
        Feedback.answer_id.is_not(None),
        Feedback.withdrawn.is_(False),
    )
    rows = session.execute(query).all()
    counts: dict[Any, int] = {}
    for _, answer, _ in rows:
        counts[answer] = counts.get(answer, 0) + 1
    shared = {answer: column for column, answer in enumerate(sorted(a for a, count in counts.items() if count > 1))}
    raters = {
        rater: row for row, rater in enumerate(sorted({str(rater) for rater, answer, _ in rows if answer in shared}))
    }
    table = np.full((len(raters), len(shared)), np.nan)
    for rater, answer, score in rows:
        if answer in shared:
            table[raters[str(rater)], shared[answer]] = score
    return table
