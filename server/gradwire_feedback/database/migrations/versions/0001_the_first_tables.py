"""Create the initial tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deployments",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("weights", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("ix_deployments_agent", "deployments", ["agent_id", "number"])

    op.create_table(
        "idempotent_requests",
        sa.Column("caller", sa.String(), nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("caller", "agent_id", "key"),
    )
    op.create_table(
        "items",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("prompt", sa.String(), nullable=False),
        sa.Column("raters", sa.Integer(), nullable=False),
        sa.Column("ratings", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=True),
        sa.Column("reserved_by", sa.String(), nullable=True),
        sa.Column("reserved_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_items_open", "items", ["agent_id", "created_at"])

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("active_agent", sa.String(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("version", sa.String(), nullable=True),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("active_agent"),
    )
    op.create_index("ix_jobs_agent_id", "jobs", ["agent_id"])

    op.create_table(
        "keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_index("ix_keys_name", "keys", ["name"])

    op.create_table(
        "policies",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("parent", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=False),
        sa.Column("reward_model_path", sa.String(), nullable=False),
        sa.Column("checkpoint", sa.String(), nullable=False),
        sa.Column("feedback_count", sa.Integer(), nullable=False),
        sa.Column("training_steps", sa.Integer(), nullable=False),
        sa.Column("reward_mean", sa.Double(), nullable=False),
        sa.Column("reward_std", sa.Double(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("agent_id", "version", name="uq_policies_version"),
        sa.UniqueConstraint("job_id"),
    )
    op.create_table(
        "step_probes",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("measured", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "answers",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("item_id", sa.String(), nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=True),
        sa.Column("response", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_answers_item"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("agent_id", "run_id", name="uq_answers_run"),
    )
    op.create_index("ix_answers_item_id", "answers", ["item_id"])

    op.create_table(
        "skips",
        sa.Column("item_id", sa.String(), nullable=False),
        sa.Column("rater", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_skips_item"),
        sa.PrimaryKeyConstraint("item_id", "rater"),
    )
    op.create_table(
        "feedback",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("prompt", sa.String(), nullable=False),
        sa.Column("response", sa.String(), nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("notes", sa.String(), nullable=True),
        sa.Column("version", sa.String(), nullable=True),
        sa.Column("answer_id", sa.String(), nullable=True),
        sa.Column("rater", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("score >= 0 AND score <= 1", name="ck_feedback_score"),
        sa.ForeignKeyConstraint(["answer_id"], ["answers.id"], name="fk_feedback_answer"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("answer_id", "rater", name="uq_feedback_rater"),
    )
    op.create_index("ix_feedback_agent", "feedback", ["agent_id", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_feedback_agent", "feedback")
    op.drop_table("feedback")
    op.drop_table("skips")
    op.drop_index("ix_answers_item_id", "answers")
    op.drop_table("answers")
    op.drop_table("step_probes")
    op.drop_table("policies")
    op.drop_index("ix_keys_name", "keys")
    op.drop_table("keys")
    op.drop_index("ix_jobs_agent_id", "jobs")
    op.drop_table("jobs")
    op.drop_index("ix_items_open", "items")
    op.drop_table("items")
    op.drop_table("idempotent_requests")
    op.drop_index("ix_deployments_agent", "deployments")
    op.drop_table("deployments")
