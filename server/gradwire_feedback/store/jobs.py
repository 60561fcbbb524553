"""Training jobs as rows: queued, running, then succeeded, failed or cancelled."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Job, Policy, now
from gradwire_feedback.names import BASE
from gradwire_feedback.store.order import next_number
from gradwire_feedback.store.problems import ConflictError, NotFoundError

ACTIVE = ("queued", "running")


def create_job(session: Session, agent_id: str, request: dict[str, Any]) -> Job:
    """Create a queued job.

    Raises:
        ConflictError: The agent already has an active job; names it.
    """
    _refuse_second(session, agent_id)
    job = Job(agent_id=agent_id, number=next_number(session, agent_id), active_agent=agent_id, request=request)
    try:
        with session.begin_nested():
            session.add(job)
    except sa.exc.IntegrityError:  # another transaction made one in between
        _refuse_second(session, agent_id)
        raise ConflictError(f"{agent_id} was being trained by another job, which has ended: try again") from None
    return job


def _refuse_second(session: Session, agent_id: str) -> None:
    """Raise the conflict with the agent's active job, if there is one."""
    running = session.scalar(sa.select(Job).where(Job.active_agent == agent_id))
    if running is not None:
        raise ConflictError(
            f"{agent_id} is being trained by job {running.id} already: wait for it, or cancel it with "
            f"DELETE /api/policies/jobs/{running.id}"
        )


def job_of(session: Session, job_id: str) -> Job:
    """Return a job.

    Raises:
        NotFoundError: There is no such job.
    """
    job = session.get(Job, job_id)
    if job is None:
        raise NotFoundError(f"there is no job {job_id[:100]!r}")
    return job


def oldest_active(session: Session) -> Job | None:
    """The job that is next, of all agents."""
    return session.scalar(sa.select(Job).where(Job.active_agent.is_not(None)).order_by(Job.created_at).limit(1))


def newest_job(session: Session, agent_id: str) -> Job | None:
    return session.scalar(sa.select(Job).where(Job.agent_id == agent_id).order_by(Job.number.desc()).limit(1))


def begin(session: Session, job_id: str, feedback_count: int) -> Job:
    """Mark a job as running, under a new version name. A second call changes nothing."""
    job = job_of(session, job_id)
    if job.version is None:
        taken = set(session.scalars(sa.select(Policy.version).where(Policy.agent_id == job.agent_id)))
        job.version, repeat = f"v{feedback_count}", 0
        while job.version in taken:
            repeat += 1
            job.version = f"v{feedback_count}.{repeat}"
    job.status, job.started_at = "running", job.started_at or now()
    session.flush()
    return job


def finish(session: Session, job_id: str, status: str, error: str | None = None) -> None:
    """End a job, so that the agent may have another."""
    job = job_of(session, job_id)
    job.status, job.error, job.active_agent, job.finished_at = status, error, None, now()
    session.flush()


def newest_version(session: Session, agent_id: str) -> str:
    """Return the version that training continues from by default; ``base`` before the first."""
    query = sa.select(Policy.version).where(Policy.agent_id == agent_id).order_by(Policy.number.desc()).limit(1)
    return session.scalar(query) or BASE


def policy_of_job(session: Session, job_id: str) -> Policy:
    """Return the version that a succeeded job created."""
    return session.scalars(sa.select(Policy).where(Policy.job_id == job_id)).one()
