"""Order an agent's items, feedback, skips and jobs by numbers instead of times, and name the database's owner."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = ("items", "feedback", "skips", "jobs")
ROWS = """
SELECT 'items' AS kind, id, '' AS rater, agent_id, created_at FROM items
UNION ALL SELECT 'feedback', id, '', agent_id, created_at FROM feedback
UNION ALL SELECT 'jobs', id, '', agent_id, created_at FROM jobs
UNION ALL SELECT 'skips', item_id, skips.rater, items.agent_id, skips.created_at
  FROM skips JOIN items ON items.id = skips.item_id
ORDER BY 5, 2
"""


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("agent_id", sa.String(), nullable=False),
        sa.Column("value", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("agent_id"),
    )
    op.create_table(
        "owner",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("process", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    for table in TABLES:
        op.add_column(table, sa.Column("number", sa.Integer(), nullable=False, server_default="0"))
    connection = op.get_bind()
    versions = connection.execute(sa.text("SELECT agent_id, max(number) FROM policies GROUP BY agent_id"))
    newest: dict[str, int] = {row[0]: row[1] for row in versions}
    for kind, row, rater, agent, _ in connection.execute(sa.text(ROWS)).all():
        newest[agent] = newest.get(agent, 0) + 1
        where = "item_id = :row AND rater = :rater" if kind == "skips" else "id = :row"
        connection.execute(
            sa.text(f"UPDATE {kind} SET number = :number WHERE {where}"),
            {"number": newest[agent], "row": row, "rater": rater},
        )
    for agent, value in newest.items():
        connection.execute(sa.text("INSERT INTO counters VALUES (:agent, :value)"), {"agent": agent, "value": value})
    for table in TABLES:
        with op.batch_alter_table(table) as altered:
            altered.alter_column("number", server_default=None)
    for index, table in (("ix_items_open", "items"), ("ix_feedback_agent", "feedback")):
        op.drop_index(index, table)
        op.create_index(index, table, ["agent_id", "number"])


def downgrade() -> None:
    for index, table in (("ix_items_open", "items"), ("ix_feedback_agent", "feedback")):
        op.drop_index(index, table)
        op.create_index(index, table, ["agent_id", "created_at"])
    for table in TABLES:
        with op.batch_alter_table(table) as altered:
            altered.drop_column("number")
    op.drop_table("owner")
    op.drop_table("counters")
