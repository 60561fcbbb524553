"""Keep rankings of answers, and what a version was trained by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rankings",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("item_id", sa.String(), nullable=False),
        sa.Column("rater", sa.String(), nullable=True),
        sa.Column("ranks", sa.JSON(), nullable=False),
        sa.Column("notes", sa.String(), nullable=True),
        sa.Column("withdrawn", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_rankings_item"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_rankings_agent", "rankings", ["agent_id", "number"])
    op.create_index(
        "uq_rankings_rater", "rankings", ["item_id", "rater"], unique=True,
        sqlite_where=sa.text("withdrawn IS NULL"), postgresql_where=sa.text("withdrawn IS NULL"),
    )  # fmt: skip
    for name, column, value in (("items", "ask", "grades"), ("policies", "method", "ppo")):
        with op.batch_alter_table(name) as table:
            table.add_column(sa.Column(column, sa.String(), nullable=False, server_default=value))
        with op.batch_alter_table(name) as table:
            table.alter_column(column, server_default=None)
    _reward_model(required=False)


def downgrade() -> None:
    op.execute("DELETE FROM policies WHERE method = 'dpo'")
    _reward_model(required=True)
    for name, column in (("items", "ask"), ("policies", "method")):
        with op.batch_alter_table(name) as table:
            table.drop_column(column)
    op.drop_table("rankings")


def _reward_model(*, required: bool) -> None:
    with op.batch_alter_table("policies") as table:
        table.alter_column("reward_model_path", existing_type=sa.String(), nullable=not required)
        for name in ("reward_mean", "reward_std"):
            table.alter_column(name, existing_type=sa.Double(), nullable=not required)
