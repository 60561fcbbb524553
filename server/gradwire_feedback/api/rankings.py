"""Rankings of answers: store, list and withdraw, and the preferences that follow."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body
from pydantic import Field

from gradwire_feedback.api.access import Rater, Reader, TheContext
from gradwire_feedback.api.bodies import CountedRoute
from gradwire_feedback.api.errors import PROBLEMS
from gradwire_feedback.api.ratings import BeforeNumber, OnlyRater, PageRows
from gradwire_feedback.api.schemas import AgentId, PairOut, RankingIn, RankingOut, RatingId
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store import rankings

router = APIRouter(prefix="/api/policies", tags=["rankings"], responses=PROBLEMS, route_class=CountedRoute)


@router.post("/rankings/{agent_id}", status_code=201)
def submit_rankings(
    agent_id: AgentId,
    given: Annotated[RankingIn | Annotated[list[RankingIn], Field(min_length=1, max_length=LIMITS.batch_rows)], Body()],
    context: TheContext,
    caller: Rater,
) -> list[RankingOut]:
    """Stores answers in the order that people gave them, best first: one ranking, or a list, of which none is stored if
    one is invalid."""
    rows = given if isinstance(given, list) else [given]
    with context.database.write() as session:
        for row in rows:
            rankings.add_ranking(session, agent_id, row.prompt, row.responses, row.notes)
        return [ranking_out(each) for each in reversed(rankings.rankings_of(session, agent_id, limit=len(rows)))]


@router.get("/{agent_id}/rankings")
def list_rankings(
    agent_id: AgentId,
    context: TheContext,
    caller: Reader,
    rater: OnlyRater = None,
    before: BeforeNumber = None,
    limit: PageRows = 100,
) -> list[RankingOut]:
    """Lists rankings, newest first."""
    with context.database.read() as session:
        found = rankings.rankings_of(session, agent_id, rater=rater, before=before, limit=limit)
        return [ranking_out(each) for each in found]


@router.delete("/{agent_id}/rankings/{id}")
def withdraw_ranking(agent_id: AgentId, ranking_id: RatingId, context: TheContext, caller: Rater) -> RankingOut:
    """Withdraws a ranking from the preferences; versions trained on it stay as they are."""
    with context.database.write() as session:
        own = not caller.may("train")
        return ranking_out(rankings.withdraw_ranking(session, agent_id, ranking_id, caller.name, own=own))


@router.get("/{agent_id}/pairs")
def list_pairs(agent_id: AgentId, context: TheContext, caller: Reader) -> list[PairOut]:
    """Lists the preferences between two answers, which `method: dpo` trains on."""
    with context.database.read() as session:
        return [
            PairOut(prompt=pair.prompt, chosen=pair.chosen, rejected=pair.rejected, rater=pair.rater)
            for pair in rankings.pairs_of(session, agent_id)
        ]


def ranking_out(found: rankings.Ranked) -> RankingOut:
    row = found.ranking
    return RankingOut(
        id=row.id, number=row.number, prompt=found.prompt, responses=list(found.responses), ranks=list(found.ranks),
        notes=row.notes, rater=row.rater, withdrawn=row.withdrawn is not None, created_at=row.created_at,
    )  # fmt: skip
