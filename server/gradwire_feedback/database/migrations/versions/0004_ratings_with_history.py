"""Keep what was corrected and withdrawn, and what each version was trained on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "revisions",
        sa.Column("feedback_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("change", sa.String(), nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("notes", sa.String(), nullable=True),
        sa.Column("by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["feedback_id"], ["feedback.id"], name="fk_revisions_feedback"),
        sa.PrimaryKeyConstraint("feedback_id", "number"),
    )
    with op.batch_alter_table("feedback") as table:
        table.add_column(sa.Column("withdrawn", sa.Boolean(), nullable=False, server_default=sa.false()))
        table.drop_constraint("uq_feedback_rater", type_="unique")
    op.create_index(
        "uq_feedback_rater", "feedback", ["answer_id", "rater"], unique=True,
        sqlite_where=sa.text("NOT withdrawn"), postgresql_where=sa.text("NOT withdrawn"),
    )  # fmt: skip
    with op.batch_alter_table("policies") as table:
        table.add_column(sa.Column("trained_until", sa.Integer(), nullable=False, server_default="0"))
    op.execute("UPDATE policies SET trained_until = number")
    for name, column in (("feedback", "withdrawn"), ("policies", "trained_until")):
        with op.batch_alter_table(name) as table:
            table.alter_column(column, server_default=None)


def downgrade() -> None:
    op.drop_index("uq_feedback_rater", "feedback")
    op.drop_table("revisions")
    op.execute("DELETE FROM feedback WHERE withdrawn")
    with op.batch_alter_table("feedback") as table:
        table.drop_column("withdrawn")
        table.create_unique_constraint("uq_feedback_rater", ["answer_id", "rater"])
    with op.batch_alter_table("policies") as table:
        table.drop_column("trained_until")
