"""The connection to SQLite or PostgreSQL, and its migrations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.orm import Session

MIGRATIONS = Path(__file__).with_name("migrations")
BUSY_TIMEOUT_S = 60
POOL_SIZE = 20
"""Maximum number of connections; PostgreSQL allows 100 in total by default. Further callers wait."""
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


class UnusableDatabaseError(Exception):
    """The database's URL is not supported, or the database is unreachable."""


def driver_url(url: str) -> sa.URL:
    """Return the URL with the service's driver: SQLite's own, or psycopg 3.

    Raises:
        UnusableDatabaseError: The URL is not one of SQLite or PostgreSQL.
    """
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise UnusableDatabaseError(
            "not a database URL: use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
        ) from None
    kind = parsed.drivername.partition("+")[0]
    if kind not in DRIVERS:
        raise UnusableDatabaseError(f"the service works with sqlite and postgresql, not with {kind}")
    if kind == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UnusableDatabaseError("the service needs a database file: sqlite:///feedback.db")
    return parsed.set(drivername=DRIVERS[kind])


class Database:
    """Transactions on the service's database."""

    def __init__(self, url: str) -> None:
        self.url = driver_url(url)
        self.sqlite = self.url.drivername == "sqlite"
        self._turn: AbstractContextManager[Any] = threading.Lock() if self.sqlite else nullcontext()
        arguments: dict[str, Any] = {"timeout": BUSY_TIMEOUT_S} if self.sqlite else {"connect_timeout": 10}
        self.engine = sa.create_engine(
            self.url,
            connect_args=arguments,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=BUSY_TIMEOUT_S,
            pool_pre_ping=not self.sqlite,
        )
        if self.sqlite:
            sa.event.listen(self.engine, "connect", _prepare_sqlite)
            sa.event.listen(self.engine, "begin", _begin_sqlite)

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that is committed at the end.

        SQLite allows one writer at a time; waiting writers poll without fairness, so they queue here instead. The write
        lock is taken at the start, so that a transaction cannot fail half way on a writer of another process.
        """
        with self._turn, Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A read-only transaction."""
        engine = self.engine.execution_options(reads_only=True)
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    def upgrade(self, revision: str = "head") -> None:
        """Migrate the tables up to a revision.

        Raises:
            UnusableDatabaseError: The database is unreachable.
        """
        self._migrate(command.upgrade, revision)

    def downgrade(self, revision: str) -> None:
        """Migrate the tables down to a revision; ``base`` drops them."""
        self._migrate(command.downgrade, revision)

    def _migrate(self, move: Any, revision: str) -> None:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        try:
            with self.engine.begin() as connection:
                config.attributes["connection"] = connection
                move(config, revision)
        except sa.exc.OperationalError as error:
            raise UnusableDatabaseError(f"{self.url.render_as_string()}: {error.orig}") from None

    def close(self) -> None:
        self.engine.dispose()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin in _begin_sqlite, not in the driver
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    reads_only = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")
