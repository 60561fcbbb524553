"""Order versions by a counter, and note the deployment of each answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("items", sa.Column("deployment", sa.Integer(), nullable=True))
    op.add_column("policies", sa.Column("number", sa.Integer(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE items SET deployment = (SELECT max(number) FROM deployments WHERE deployments.agent_id = items.agent_id"
        " AND deployments.created_at <= items.created_at)"
    )
    op.execute(
        "UPDATE policies SET number = (SELECT count(*) FROM policies AS older WHERE older.agent_id = policies.agent_id"
        " AND (older.created_at < policies.created_at"
        " OR older.created_at = policies.created_at AND older.version <= policies.version))"
    )
    with op.batch_alter_table("policies") as table:
        table.alter_column("number", server_default=None)
        table.create_unique_constraint("uq_policies_number", ["agent_id", "number"])


def downgrade() -> None:
    with op.batch_alter_table("policies") as table:
        table.drop_constraint("uq_policies_number", type_="unique")
        table.drop_column("number")
    op.drop_column("items", "deployment")
