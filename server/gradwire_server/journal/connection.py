"""The connection by which the journal changes its database, and the second copy of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradwire_server.journal.commit_log import TRANSACTIONS, Statement
from gradwire_server.journal.schema import GIVE_BACK
from gradwire_server.journal.segments import say_mirror_lost


class JournalConnection(sqlite3.Connection):
    """A connection whose changes are made in a second database as well, and noted to be made again after a crash.

    The statements of the journal depend on nothing but their values and the tables, so all databases become the same.

    Attributes:
        statements: The changes since whoever uses the connection emptied this list.
        mirror: The second database; None without one, and from its first failure on.
        mirror_folder: The folder that it is in.
    """

    mirror: sqlite3.Connection | None = None
    mirror_folder: Path = Path()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.statements: list[Statement] = []

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement here and, unless it only reads, in the mirror."""
        cursor = super().execute(sql, parameters)
        if sql.startswith(("SELECT", "PRAGMA")) and not sql.startswith(GIVE_BACK):
            return cursor
        if not sql.startswith(TRANSACTIONS):
            self.statements.append((sql, parameters))
        if self.mirror is not None:
            try:
                self.mirror.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                self.drop_mirror(error)
        return cursor

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """Execute a statement with each of the parameters, here and in the mirror."""
        for each in parameters:
            self.execute(sql, each)
        return self.cursor()

    def rollback(self) -> None:
        """End a transaction that failed, here and in the mirror."""
        super().rollback()
        if self.mirror is not None:
            self.mirror.rollback()

    def drop_mirror(self, error: Exception) -> None:
        """Go on without the mirror."""
        if self.mirror is not None:
            mirror, self.mirror = self.mirror, None
            mirror.close()
            say_mirror_lost(self.mirror_folder, error)
