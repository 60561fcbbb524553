"""The order of what happens to an agent: numbers that rise whatever the clock says."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

TAKE = sa.text(
    "INSERT INTO counters (agent_id, value) VALUES (:agent, :count) "
    "ON CONFLICT (agent_id) DO UPDATE SET value = counters.value + :count RETURNING value"
)


def next_numbers(session: Session, agent_id: str, count: int = 1) -> range:
    """Take the agent's next numbers.

    Writers of one agent wait here for each other's commit, so that numbers are in the order of commits. Lock items
    before, never after, or two writers could wait for each other.
    """
    last = session.execute(TAKE, {"agent": agent_id, "count": count}).scalar_one()
    return range(last - count + 1, last + 1)


def next_number(session: Session, agent_id: str) -> int:
    """Take the agent's next number."""
    return next_numbers(session, agent_id)[0]
