"""Stored ratings: list, correct and withdraw."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from gradwire_feedback.api.access import Rater, Reader, TheContext
from gradwire_feedback.api.bodies import CountedRoute
from gradwire_feedback.api.errors import PROBLEMS
from gradwire_feedback.api.schemas import AgentId, CorrectionIn, RatingId, RatingOut, RevisionOut
from gradwire_feedback.settings import LIMITS
from gradwire_feedback.store import ratings

router = APIRouter(prefix="/api/policies", tags=["ratings"], responses=PROBLEMS, route_class=CountedRoute)

LARGEST_NUMBER = 2**31 - 1
OnlyRater = Annotated[str | None, Query(max_length=LIMITS.name_chars, description="Only this person's.")]
BeforeNumber = Annotated[int | None, Query(ge=1, le=LARGEST_NUMBER, description="Only smaller numbers.")]
PageRows = Annotated[int, Query(ge=1, le=LIMITS.listed_rows)]


@router.get("/{agent_id}/ratings")
def list_ratings(
    agent_id: AgentId,
    context: TheContext,
    caller: Reader,
    rater: OnlyRater = None,
    before: BeforeNumber = None,
    limit: PageRows = 100,
) -> list[RatingOut]:
    """Lists ratings, newest first, with their history and the versions that were trained on them."""
    with context.database.read() as session:
        found = ratings.ratings_of(session, agent_id, rater=rater, before=before, limit=limit)
        return [rating_out(each) for each in found]


@router.patch("/{agent_id}/ratings/{id}")
def correct_rating(
    agent_id: AgentId, rating_id: RatingId, body: CorrectionIn, context: TheContext, caller: Rater
) -> RatingOut:
    """Corrects a rating; the role `rate` may correct the ratings that its owner gave on the page."""
    with context.database.write() as session:
        own = not caller.may("train")
        return rating_out(ratings.correct(session, agent_id, rating_id, caller.name, body.score, body.notes, own=own))


@router.delete("/{agent_id}/ratings/{id}")
def withdraw_rating(agent_id: AgentId, rating_id: RatingId, context: TheContext, caller: Rater) -> RatingOut:
    """Withdraws a rating from training, comparison and agreement; versions trained on it stay as they are."""
    with context.database.write() as session:
        return rating_out(ratings.withdraw(session, agent_id, rating_id, caller.name, own=not caller.may("train")))


def rating_out(rating: ratings.Rating) -> RatingOut:
    row = rating.feedback
    return RatingOut(
        id=row.id, number=row.number, prompt=row.prompt, response=row.response, score=row.score, run_id=row.run_id,
        notes=row.notes, version=row.version, rater=row.rater, withdrawn=row.withdrawn, created_at=row.created_at,
        history=[
            RevisionOut(
                change=each.change, score=each.score, notes=each.notes, by=each.by, created_at=each.created_at  # type: ignore[arg-type]  # only store.ratings writes it
            )
            for each in rating.history
        ],
        versions=list(rating.versions),
    )  # fmt: skip
