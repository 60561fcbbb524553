"""Rankings of answers to one prompt, and the preferences that follow from them and from grades side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Answer, Feedback, Item, Ranking, new_id
from gradwire_feedback.store.order import next_number
from gradwire_feedback.store.problems import ConflictError, ForbiddenError, NotFoundError, UnprocessableError


def add_ranking(session: Session, agent_id: str, prompt: str, responses: Sequence[str], notes: str | None) -> Ranking:
    """Store a ranking that was made elsewhere.

    Args:
        responses: Best first.
    """
    item = Item(agent_id=agent_id, number=next_number(session, agent_id), prompt=prompt, raters=0, ask="ranking")
    item.answers = [
        Answer(agent_id=agent_id, position=position, run_id=new_id(), response=response)
        for position, response in enumerate(responses)
    ]
    session.add(item)
    session.flush()
    return store_ranking(session, item, None, list(range(1, len(responses) + 1)), notes)


def store_ranking(session: Session, item: Item, rater: str | None, ranks: Sequence[int], notes: str | None) -> Ranking:
    """Store a rater's places of an item's answers, 1 for the best; equal places are ties.

    Raises:
        UnprocessableError: There is not exactly one place for each answer.
    """
    if len(ranks) != len(item.answers) or min(ranks, default=0) < 1:
        raise UnprocessableError(f"the item has {len(item.answers)} answers; each needs a place of at least 1")
    number = next_number(session, item.agent_id)
    row = Ranking(
        agent_id=item.agent_id, number=number, item_id=item.id, rater=rater, ranks=list(ranks), notes=notes
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row


@dataclass(frozen=True)
class Ranked:
    """A ranking with its texts.

    Attributes:
        responses: Best first.
        ranks: Their places, rising from 1; equal ones are ties.
    """

    ranking: Ranking
    prompt: str
    responses: tuple[str, ...]
    ranks: tuple[int, ...]


def rankings_of(
    session: Session, agent_id: str, *, rater: str | None = None, before: int | None = None, limit: int | None = 50
) -> list[Ranked]:
    """Return rankings, newest first; the arguments are those of ``ratings.ratings_of``."""
    query = sa.select(Ranking, Item).join(Item, Item.id == Ranking.item_id).where(Ranking.agent_id == agent_id)
    if rater is not None:
        query = query.where(Ranking.rater == rater)
    if before is not None:
        query = query.where(Ranking.number < before)
    return [_ranked(*row) for row in session.execute(query.order_by(Ranking.number.desc()).limit(limit))]


def _ranked(ranking: Ranking, item: Item) -> Ranked:
    order = sorted(zip(ranking.ranks, item.answers, strict=True), key=lambda each: each[0])
    return Ranked(ranking, item.prompt, tuple(answer.response for _, answer in order), tuple(rank for rank, _ in order))


def withdraw_ranking(session: Session, agent_id: str, ranking_id: str, by: str, *, own: bool) -> Ranked:
    """Take a ranking out of the preferences; its item waits for a rater again.

    Args:
        by: The person who does it.
        own: Whether only their own rankings are allowed.

    Raises:
        NotFoundError, ForbiddenError: There is no such ranking, or it is another person's.
        ConflictError: It was withdrawn.
    """
    row = session.get(Ranking, ranking_id, with_for_update={"of": Ranking})
    if row is None or row.agent_id != agent_id:
        raise NotFoundError(f"{agent_id} has no ranking {ranking_id[:100]!r}")
    if own and (row.rater is None or row.rater != by):
        raise ForbiddenError("this ranking is another person's: a key with the role train may withdraw it")
    if row.withdrawn is not None:
        raise ConflictError("this ranking was withdrawn")
    take_back(session, row)
    return _ranked(row, session.get_one(Item, row.item_id))


def take_back(session: Session, row: Ranking) -> None:
    """Withdraw a ranking."""
    if row.rater is not None:
        session.execute(sa.update(Item).where(Item.id == row.item_id).values(ratings=Item.ratings - 1))
    row.withdrawn = next_number(session, row.agent_id)
    session.flush()


@dataclass(frozen=True)
class Pair:
    """A preference between two answers to a prompt; a program's has no rater."""

    prompt: str
    chosen: str
    rejected: str
    rater: str | None


def pairs_of(session: Session, agent_id: str) -> list[Pair]:
    """Return the preferences, oldest first: every two answers of a ranking, and two grades side by side.

    Equal places, and equal grades, give none.
    """
    pairs = [
        (row.ranking.number, Pair(row.prompt, better, worse, row.ranking.rater))
        for row in reversed(rankings_of(session, agent_id, limit=None))
        if row.ranking.withdrawn is None
        for (better, first), (worse, second) in itertools.combinations(zip(row.responses, row.ranks), 2)
        if first < second
    ]
    return [pair for _, pair in sorted([*pairs, *_from_grades(session, agent_id)], key=lambda each: each[0])]


def _from_grades(session: Session, agent_id: str) -> list[tuple[int, Pair]]:
    query = (
        sa.select(
            Answer.item_id, Feedback.rater, Feedback.prompt, Feedback.response, Feedback.score, Feedback.number
        )
        .join(Feedback, Feedback.answer_id == Answer.id)
        .where(Feedback.agent_id == agent_id, Feedback.rater.is_not(None), Feedback.withdrawn.is_(False))
        .order_by(Feedback.number)
    )  # fmt: skip
    together: dict[tuple[str, str], list[Any]] = {}
    for row in session.execute(query):
        together.setdefault((row.item_id, row.rater), []).append(row)
    pairs = []
    for (_, rater), rows in together.items():
        best_first = sorted(rows, key=lambda row: -row.score)
        for better, worse in itertools.combinations(best_first, 2):
            if better.score > worse.score:
                number = max(better.number, worse.number)
                pairs.append((number, Pair(better.prompt, better.response, worse.response, rater)))
    return pairs
