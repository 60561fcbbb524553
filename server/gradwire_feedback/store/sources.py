"""Ratings of answers by their source: a version, or a model that another page named."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Feedback, Item, Ranking


@dataclass
class RatedSource:
    """Ratings of the answers of one source.

    Attributes:
        scores: Number of scores; ``mean`` is theirs, 0 without any.
        wins, ties, losses: Results of its answers against another source's, in rankings.
    """

    scores: int = 0
    mean: float = 0.0
    wins: int = 0
    ties: int = 0
    losses: int = 0


def rated_by_source(session: Session, agent_id: str) -> dict[str, RatedSource]:
    """Return the ratings of an agent's answers by their source.

    That is the version, or the model before the last blank of a run id such as the console's playground gives; "" for
    others.
    """
    rated: defaultdict[str, RatedSource] = defaultdict(RatedSource)
    query = sa.select(Feedback.version, Feedback.run_id, Feedback.score)
    for version, run_id, score in session.execute(
        query.where(Feedback.agent_id == agent_id, Feedback.withdrawn.is_(False))
    ):
        one = rated[version or run_id.rpartition(" ")[0]]
        one.scores += 1
        one.mean += (score - one.mean) / one.scores
    rankings = sa.select(Ranking.ranks, Item).join(Item, Item.id == Ranking.item_id)
    for ranks, item in session.execute(rankings.where(Ranking.agent_id == agent_id, Ranking.withdrawn.is_(None))):
        sources = [answer.version or answer.run_id.rpartition(" ")[0] for answer in item.answers]
        for (rank, source), (other_rank, other) in itertools.permutations(zip(ranks, sources, strict=True), 2):
            if source != other:
                rated[source].wins += rank < other_rank
                rated[source].ties += rank == other_rank
                rated[source].losses += rank > other_rank
    return dict(rated)
