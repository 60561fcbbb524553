"""Alembic's entry point; :class:`gradwire_feedback.database.connection.Database` provides the connection."""

from __future__ import annotations

from alembic import context

from gradwire_feedback.database.tables import Table

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Table.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
