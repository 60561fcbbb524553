"""Count how often a job was begun."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as table:
        table.add_column(sa.Column("starts", sa.Integer(), nullable=False, server_default="0"))
    with op.batch_alter_table("jobs") as table:
        table.alter_column("starts", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("jobs") as table:
        table.drop_column("starts")
