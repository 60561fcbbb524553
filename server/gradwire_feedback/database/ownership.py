"""One service for each database: a lock that ends with its process, and a row that says who holds it.

On PostgreSQL it is an advisory lock of a connection of its own, on SQLite a lock on a file beside the database. Neither
needs a clock or a renewal, so a killed service can be started again at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from contextlib import suppress

import sqlalchemy as sa

from gradwire_feedback.database.connection import Database, UnusableDatabaseError
from gradwire_feedback.database.tables import Owner

LOCK = 0x6772_6164_7769_7265
"""The number of PostgreSQL's lock; any that other programs on the database do not use."""

PATIENCE_S = 2.0
"""PostgreSQL notices the end of a killed service's connection a moment later."""


class Ownership:
    """The right to run a service on a database.

    Args:
        database: Whose.
        address: Where the service will listen, for whoever is refused.
    """

    def __init__(self, database: Database, address: str) -> None:
        self._database, self._address = database, address
        self._connection: sa.Connection | None = None
        self._file: int | None = None
        self._using = threading.RLock()

    def take(self) -> None:
        """Become the owner.

        Raises:
            UnusableDatabaseError: Another service is; says which.
        """
        until = time.monotonic() + PATIENCE_S
        while not (mine := self._lock()) and time.monotonic() < until:
            self.release()
            time.sleep(0.1)
        if not mine:
            with self._database.read() as session:
                holder = session.get(Owner, 1)
            who = (
                f"the service at {holder.address} (process {holder.process} on {holder.host})" if holder else "another"
            )
            raise UnusableDatabaseError(
                f"{self._database.url.render_as_string()} is in use by {who}: stop that one, or use another database"
            )
        with self._database.write() as session:
            session.merge(Owner(id=1, address=self._address, process=os.getpid(), host=socket.gethostname()))

    def _lock(self) -> bool:
        if not self._database.sqlite:
            self._connection = self._database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            return bool(self._connection.scalar(sa.select(sa.func.pg_try_advisory_lock(LOCK))))
        # not on the database itself: closing a second descriptor would release SQLite's own locks
        self._file = os.open(f"{self._database.url.database}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def held(self) -> bool:
        """Whether this process is still the owner; takes the lock again if its connection was lost."""
        if self._connection is None:
            return True
        with self._using:
            try:
                self._connection.scalar(sa.select(1))
                return True
            except sa.exc.DBAPIError:
                self.release()
            try:
                return self._lock()
            except sa.exc.DBAPIError:
                return True  # the database is away: nobody else can have it either

    def release(self) -> None:
        with self._using:
            if self._connection is not None:
                with suppress(sa.exc.DBAPIError):
                    self._connection.invalidate()  # closes it instead of giving it back, and so ends the lock
                self._connection.close()
                self._connection = None
            if self._file is not None:
                os.close(self._file)
                self._file = None
