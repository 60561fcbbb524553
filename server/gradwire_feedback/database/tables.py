"""The database tables. Times are UTC and for people; ``number`` orders an agent's rows, see :mod:`..store.order`."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


def new_id() -> str:
    return uuid.uuid4().hex


def now() -> datetime:
    return datetime.now(UTC)


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """A time-zone-aware time; SQLite stores it without the zone, which is always UTC."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


class Table(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {  # noqa: RUF012  read by SQLAlchemy
        datetime: UtcDateTime(),
        dict[str, Any]: sa.JSON(),
        dict[str, float]: sa.JSON(),
        list[int]: sa.JSON(),
    }


class Item(Table):
    """One or more answers to a prompt, waiting for ``ask``: ``"grades"`` of each, or a ``"ranking"`` of all.

    ``ratings`` counts the raters who have finished, of ``raters`` wanted; it is reserved for ``reserved_by`` until
    ``reserved_until``. ``deployment`` is the number of the deployment that chose the answer's version.
    """

    __tablename__ = "items"
    __table_args__ = (sa.Index("ix_items_open", "agent_id", "number"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    agent_id: Mapped[str]
    number: Mapped[int]
    prompt: Mapped[str]
    ask: Mapped[str] = mapped_column(default="grades")
    raters: Mapped[int] = mapped_column(default=1)
    ratings: Mapped[int] = mapped_column(default=0)
    user_id: Mapped[str | None]
    deployment: Mapped[int | None]
    reserved_by: Mapped[str | None]
    reserved_until: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(default=now)
    answers: Mapped[list[Answer]] = relationship(back_populates="item", order_by="Answer.position", lazy="selectin")


class Answer(Table):
    """An answer of an agent; ``version`` is None for answers made elsewhere."""

    __tablename__ = "answers"
    __table_args__ = (sa.UniqueConstraint("agent_id", "run_id", name="uq_answers_run"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    item_id: Mapped[str] = mapped_column(sa.ForeignKey("items.id", name="fk_answers_item"), index=True)
    agent_id: Mapped[str]
    position: Mapped[int] = mapped_column(default=0)
    run_id: Mapped[str]
    version: Mapped[str | None]
    response: Mapped[str]
    item: Mapped[Item] = relationship(back_populates="answers")


class Feedback(Table):
    """One person's score of one answer. A withdrawn one counts nowhere, and stays for its history."""

    __tablename__ = "feedback"
    __table_args__ = (
        sa.Index("ix_feedback_agent", "agent_id", "number"),
        sa.Index(
            "uq_feedback_rater",
            "answer_id",
            "rater",
            unique=True,
            sqlite_where=sa.text("NOT withdrawn"),
            postgresql_where=sa.text("NOT withdrawn"),
        ),
        sa.CheckConstraint("score >= 0 AND score <= 1", name="ck_feedback_score"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    agent_id: Mapped[str]
    number: Mapped[int]
    prompt: Mapped[str]
    response: Mapped[str]
    score: Mapped[float]
    run_id: Mapped[str]
    notes: Mapped[str | None]
    version: Mapped[str | None]
    answer_id: Mapped[str | None] = mapped_column(sa.ForeignKey("answers.id", name="fk_feedback_answer"))
    rater: Mapped[str | None]
    withdrawn: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime] = mapped_column(default=now)


class Ranking(Table):
    """A rater's places of an item's answers, by position; 1 is the best, equal places are ties.

    ``rater`` is None for a ranking that a program sent; ``withdrawn`` is the number of its withdrawal.
    """

    __tablename__ = "rankings"
    __table_args__ = (
        sa.Index("ix_rankings_agent", "agent_id", "number"),
        sa.Index(
            "uq_rankings_rater",
            "item_id",
            "rater",
            unique=True,
            sqlite_where=sa.text("withdrawn IS NULL"),
            postgresql_where=sa.text("withdrawn IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    agent_id: Mapped[str]
    number: Mapped[int]
    item_id: Mapped[str] = mapped_column(sa.ForeignKey("items.id", name="fk_rankings_item"))
    rater: Mapped[str | None]
    ranks: Mapped[list[int]]
    notes: Mapped[str | None]
    withdrawn: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Revision(Table):
    """A rating as it was before it was corrected or withdrawn, and who changed it."""

    __tablename__ = "revisions"

    feedback_id: Mapped[str] = mapped_column(
        sa.ForeignKey("feedback.id", name="fk_revisions_feedback"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)
    change: Mapped[str]
    score: Mapped[float]
    notes: Mapped[str | None]
    by: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Skip(Table):
    """A rater's decision not to rate an item."""

    __tablename__ = "skips"

    item_id: Mapped[str] = mapped_column(sa.ForeignKey("items.id", name="fk_skips_item"), primary_key=True)
    rater: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(default=now)


class IdempotentRequest(Table):
    """The answer to a request that carried an Idempotency-Key."""

    __tablename__ = "idempotent_requests"

    caller: Mapped[str] = mapped_column(primary_key=True)
    agent_id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str]
    answer: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Policy(Table):
    """A trained version of an agent. ``checkpoint`` names it on the training server.

    ``method`` is ``"ppo"``, against a reward model of the ratings, or ``"dpo"``, on preferences, which has no rewards.
    ``trained_until`` is the number up to which it knows the agent's ratings and their changes.
    """

    __tablename__ = "policies"
    __table_args__ = (
        sa.UniqueConstraint("agent_id", "version", name="uq_policies_version"),
        sa.UniqueConstraint("agent_id", "number", name="uq_policies_number"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    agent_id: Mapped[str]
    version: Mapped[str]
    number: Mapped[int]
    parent: Mapped[str]
    method: Mapped[str] = mapped_column(default="ppo")
    job_id: Mapped[str] = mapped_column(unique=True)
    model_path: Mapped[str]
    reward_model_path: Mapped[str | None]
    checkpoint: Mapped[str]
    feedback_count: Mapped[int]
    trained_until: Mapped[int]
    training_steps: Mapped[int]
    reward_mean: Mapped[float | None]
    reward_std: Mapped[float | None]
    config: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Job(Table):
    """A training job. ``active_agent`` is the agent's id until the job ends; it is unique, so an agent has one
    active job."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    agent_id: Mapped[str] = mapped_column(index=True)
    number: Mapped[int]
    active_agent: Mapped[str | None] = mapped_column(unique=True)
    status: Mapped[str] = mapped_column(default="queued")
    request: Mapped[dict[str, Any]]
    version: Mapped[str | None]
    progress: Mapped[dict[str, Any]] = mapped_column(default=dict)
    error: Mapped[str | None]
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    starts: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(default=now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Deployment(Table):
    """Deployed versions and their weights from ``created_at`` on. The newest row is in effect."""

    __tablename__ = "deployments"
    __table_args__ = (sa.Index("ix_deployments_agent", "agent_id", "number"),)

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    agent_id: Mapped[str]
    weights: Mapped[dict[str, float]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Counter(Table):
    """The newest number of an agent's rows."""

    __tablename__ = "counters"

    agent_id: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]


class Owner(Table):
    """The service that works on this database, in the only row; see :mod:`..database.ownership`."""

    __tablename__ = "owner"

    id: Mapped[int] = mapped_column(primary_key=True)
    address: Mapped[str]
    process: Mapped[int]
    host: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=now)


class StepProbe(Table):
    """Measured seconds of a training step, by server, model and the settings that it depends on."""

    __tablename__ = "step_probes"

    digest: Mapped[str] = mapped_column(primary_key=True)
    measured: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Key(Table):
    """An API key, by its SHA-256; revoked keys stay listed."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(index=True)
    role: Mapped[str]
    prefix: Mapped[str]
    sha256: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(default=now)
    revoked_at: Mapped[datetime | None]
