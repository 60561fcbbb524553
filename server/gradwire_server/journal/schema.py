"""The tables of ``gradwire.db``, and the numbered steps that bring an older database up to them.

The number of the newest step is the version of a state folder; SQLite keeps it as ``PRAGMA user_version``. Each step is
one transaction. Plain SQL in a list, and no migration library: there is one database with one writer, whose tables are
small and are never changed by hand.
"""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path
from typing import TypeVar

from gradwire_server.journal import history

RUN = (
    "digest(run_id, owner, config, created_at, idempotency_key, request, ready, epoch, writer, accepted_seq,"
    " applied_seq, released_seq, trimmed_seq, step, failure_seq, failure, rewound_to_seq, rewound_epoch,"
    " num_trainable_parameters, forked_from, origin)"
)
OPERATION = "digest(run_id, seq, identity, header, accepted_at, status, segment, offset)"
RESULT = "digest(run_id, seq, header, segment, offset)"

_FIRST = (
    """CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    config BLOB NOT NULL,
    created_at REAL NOT NULL,
    idempotency_key TEXT NOT NULL,
    request BLOB NOT NULL,
    ready INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    writer TEXT NOT NULL DEFAULT '',
    accepted_seq INTEGER NOT NULL DEFAULT 0,
    applied_seq INTEGER NOT NULL DEFAULT 0,
    released_seq INTEGER NOT NULL DEFAULT 0,
    trimmed_seq INTEGER NOT NULL DEFAULT 0,
    step INTEGER NOT NULL DEFAULT 0,
    failure_seq INTEGER NOT NULL DEFAULT 0,
    failure TEXT NOT NULL DEFAULT '',
    rewound_to_seq INTEGER NOT NULL DEFAULT 0,
    rewound_epoch INTEGER NOT NULL DEFAULT 0,
    num_trainable_parameters INTEGER NOT NULL DEFAULT 0,
    forked_from TEXT NOT NULL DEFAULT '',
    origin BLOB,
    digest BLOB
)""",
    f"""CREATE TRIGGER IF NOT EXISTS run_inserted AFTER INSERT ON runs
BEGIN UPDATE runs SET digest = {RUN} WHERE run_id = NEW.run_id; END""",
    f"""CREATE TRIGGER IF NOT EXISTS run_updated AFTER UPDATE ON runs
BEGIN UPDATE runs SET digest = {RUN} WHERE run_id = NEW.run_id; END""",
    "CREATE UNIQUE INDEX IF NOT EXISTS runs_by_key ON runs (owner, idempotency_key) WHERE idempotency_key != ''",
    """CREATE TABLE IF NOT EXISTS operations (
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    identity BLOB NOT NULL,
    header BLOB NOT NULL,
    accepted_at REAL NOT NULL,
    status INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    segment INTEGER,
    offset INTEGER,
    digest BLOB,
    PRIMARY KEY (run_id, seq)
)""",
    "CREATE INDEX IF NOT EXISTS operations_without_result ON operations (run_id, seq) WHERE status = 0",
    "CREATE INDEX IF NOT EXISTS operations_by_segment ON operations (segment)",
    """CREATE TABLE IF NOT EXISTS results (
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    header BLOB NOT NULL,
    stored_at REAL NOT NULL,
    segment INTEGER,
    offset INTEGER,
    digest BLOB,
    PRIMARY KEY (run_id, seq)
)""",
    "CREATE INDEX IF NOT EXISTS results_by_segment ON results (segment)",
    """CREATE TABLE IF NOT EXISTS uses (
    checkpoint TEXT NOT NULL,
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (checkpoint, run_id, seq)
)""",
    "CREATE TABLE IF NOT EXISTS readers (run_id TEXT NOT NULL, reader TEXT NOT NULL, PRIMARY KEY (run_id, reader))",
    """CREATE TABLE IF NOT EXISTS checkpoints (
    run_id TEXT NOT NULL,
    name TEXT NOT NULL,
    checkpoint BLOB NOT NULL,
    PRIMARY KEY (run_id, name)
)""",
)
"""Version 1. Databases that were made before versions were counted have these tables already."""

_SECOND = (
    # The number of the newest commit, which every record of a segment carries too: a database that was put back from
    # an older copy is known by it.
    # And for how many seconds servers have run on the folder, which decides how long results are kept: a wall clock
    # may jump.
    # Nothing reads the folder's name any more: it told a second copy of the journal from that of another.
    "CREATE TABLE state (commits INTEGER NOT NULL, ran_s REAL NOT NULL, folder TEXT NOT NULL)",
    "INSERT INTO state VALUES (0, 0, lower(hex(randomblob(8))))",
    "UPDATE results SET stored_at = 0",
    # Where the outcome of an operation that did not succeed is recorded, which is kept for as long as its row.
    "ALTER TABLE operations ADD COLUMN outcome_segment INTEGER",
    "CREATE INDEX operations_by_outcome ON operations (outcome_segment) WHERE outcome_segment IS NOT NULL",
    *history.TABLES,
)
"""Version 2: segments record operations and results whole, so that the database can be built again from them; every
run has a record of what was measured."""

_THIRD = (
    # The newest row is what a run is computed with now; those before it are its history.
    """CREATE TABLE computed_with (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    at REAL NOT NULL,
    facts TEXT NOT NULL,
    note TEXT NOT NULL
)""",
    "CREATE INDEX computed_with_by_run ON computed_with (run_id)",
    # What repeating the operation must give again.
    "ALTER TABLE operations ADD COLUMN outcome BLOB",
)
"""Version 3: what runs were computed with, and what their operations gave, is compared when they are restored."""

_FOURTH = (
    # Seconds that the engine took for the operation; 0 for one that a recovery leaves out.
    "ALTER TABLE operations ADD COLUMN replay_s REAL NOT NULL DEFAULT 0",
)
"""Version 4: how long a recovery would take is known before it is needed."""

_FIFTH = (
    # A commit writes every page that it changes to the log: a table that is its own key's index changes one page where
    # a table and an index change two, and an index that no query needs changes none.
    """CREATE TABLE clustered_operations (
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    accepted_at REAL NOT NULL,
    status INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    segment INTEGER,
    offset INTEGER,
    outcome_segment INTEGER,
    replay_s REAL NOT NULL DEFAULT 0,
    digest BLOB,
    identity BLOB NOT NULL,
    outcome BLOB,
    header BLOB NOT NULL,
    PRIMARY KEY (run_id, seq)
) WITHOUT ROWID""",
    "INSERT INTO clustered_operations (run_id, seq, accepted_at, status, deaths, segment, offset, outcome_segment,"
    " replay_s, digest, identity, outcome, header) SELECT run_id, seq, accepted_at, status, deaths, segment, offset,"
    " outcome_segment, coalesce(CAST(replay_s AS REAL), 0.0), digest, identity, outcome, header FROM operations",
    "DROP TABLE operations",
    "ALTER TABLE clustered_operations RENAME TO operations",
    "CREATE INDEX operations_by_segment ON operations (segment)",
    "CREATE INDEX operations_by_outcome ON operations (outcome_segment) WHERE outcome_segment IS NOT NULL",
    """CREATE TABLE clustered_results (
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    stored_at REAL NOT NULL,
    segment INTEGER,
    offset INTEGER,
    digest BLOB,
    header BLOB NOT NULL,
    PRIMARY KEY (run_id, seq)
) WITHOUT ROWID""",
    "INSERT INTO clustered_results (run_id, seq, stored_at, segment, offset, digest, header)"
    " SELECT run_id, seq, stored_at, segment, offset, digest, header FROM results",
    "DROP TABLE results",
    "ALTER TABLE clustered_results RENAME TO results",
    "CREATE INDEX results_by_segment ON results (segment) WHERE segment IS NOT NULL",
    *history.CLUSTERED,
)
"""Version 5: a short operation and its result change a third of the pages."""

_SIXTH = (
    # Each table and each index that a commit changes is a page more in the log.
    "DROP INDEX operations_by_segment",
    # The commit that changed the row last; ``state`` has that of a commit that changed no run.
    "ALTER TABLE runs ADD COLUMN commits INTEGER NOT NULL DEFAULT 0",
    # A point waits beside its result for its place in the run's record.
    "ALTER TABLE results ADD COLUMN point BLOB",
)
"""Version 6: a short operation and its result change half of these pages."""

_SEVENTH = (
    """CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created_at REAL NOT NULL,
    idempotency_key TEXT NOT NULL,
    request BLOB NOT NULL,
    job BLOB NOT NULL
)""",
    """CREATE TABLE job_events (
    job_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    step INTEGER NOT NULL,
    event BLOB NOT NULL,
    PRIMARY KEY (job_id, number)
) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX job_events_by_step ON job_events (job_id, step) WHERE step > 0",
    """CREATE TABLE files (
    file_id TEXT PRIMARY KEY,
    idempotency_key TEXT NOT NULL,
    file BLOB NOT NULL
)""",
)
"""Version 7: jobs with their events, and files."""

_EIGHTH = (
    """CREATE TABLE usage (
    hour INTEGER NOT NULL,
    owner TEXT NOT NULL,
    run_id TEXT NOT NULL,
    label TEXT NOT NULL,
    base_model TEXT NOT NULL,
    training_tokens INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    operations INTEGER NOT NULL,
    checkpoints INTEGER NOT NULL,
    engine_s REAL NOT NULL,
    PRIMARY KEY (hour, owner, run_id, label, base_model)
) WITHOUT ROWID""",
)
"""Version 8: what keys have used."""

_NINTH: tuple[str, ...] = ()
"""Version 9: segments say what each commit changed, and the tables may be some commits behind them."""

_TENTH: tuple[str, ...] = ()
"""Version 10: the record of an operation or a result says what its rows say, and a commit only names it."""

_ELEVENTH = (
    """CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created_at REAL NOT NULL,
    idempotency_key TEXT NOT NULL,
    key_digest TEXT NOT NULL,
    request BLOB NOT NULL,
    session BLOB NOT NULL
)""",
    """CREATE TABLE session_turns (
    session_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    at REAL NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    digest BLOB NOT NULL,
    turn BLOB NOT NULL,
    PRIMARY KEY (session_id, number)
)""",
)
"""Version 11: rollout sessions with their turns."""

_TWELFTH = (
    """CREATE TABLE usage_of_sessions (
    hour INTEGER NOT NULL,
    owner TEXT NOT NULL,
    run_id TEXT NOT NULL,
    label TEXT NOT NULL,
    base_model TEXT NOT NULL,
    session_id TEXT NOT NULL,
    training_tokens INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    operations INTEGER NOT NULL,
    checkpoints INTEGER NOT NULL,
    engine_s REAL NOT NULL,
    PRIMARY KEY (hour, owner, run_id, label, base_model, session_id)
) WITHOUT ROWID""",
    """INSERT INTO usage_of_sessions SELECT hour, owner, run_id, label, base_model, '', training_tokens, prompt_tokens,
    sampled_tokens, operations, checkpoints, engine_s FROM usage""",
    "DROP TABLE usage",
    "ALTER TABLE usage_of_sessions RENAME TO usage",
)
"""Version 12: what each rollout session has used."""

MIGRATIONS = (
    _FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH, _SIXTH, _SEVENTH, _EIGHTH, _NINTH, _TENTH, _ELEVENTH, _TWELFTH,
)  # fmt: skip
VERSION = len(MIGRATIONS)


class NewerDatabase(Exception):
    """A newer version of gradwire wrote the database."""


def version_of(connection: sqlite3.Connection) -> int:
    """The version of a database; 0 for an empty one, and for one from before versions were counted."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def newest_commit(connection: sqlite3.Connection) -> int:
    """The number of a database's newest commit; its version must be 2 or later."""
    query = "SELECT commits FROM state"
    if version_of(connection) >= 6:
        query += " UNION ALL SELECT max(commits) FROM runs"
    return max(commits or 0 for (commits,) in connection.execute(query))


WAL_BYTES = 8 << 20
"""The size to which the write-ahead log is cut once its content is in the database."""
FREE_PAGES = 256
"""Pages that nothing uses and that a database keeps: the next rows take them."""
GIVEN_BACK_PAGES = 1024
"""Pages that a database gives back to the file system at a time, at most: tens of milliseconds."""


def give_back_space(connection: sqlite3.Connection) -> None:
    """Shorten a database by some of the pages that deletions have left unused, in the present transaction."""
    [(free,)] = connection.execute("PRAGMA freelist_count").fetchall()
    # The statement gives one page back in each step, and Python takes one step of a statement without columns.
    for _ in range(min(free - FREE_PAGES, GIVEN_BACK_PAGES)):
        connection.execute(GIVE_BACK)


GIVE_BACK = "PRAGMA incremental_vacuum"
C = TypeVar("C", bound=sqlite3.Connection)


def connect(path: Path) -> sqlite3.Connection:
    """Open a database; a commit returns once it is on disk."""
    return connect_as(sqlite3.Connection, path)


def connect_as(kind: type[C], path: Path) -> C:
    """Open a database with a connection of a class of one's own."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False, factory=kind)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a database that is about to be made
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA temp_store = MEMORY")  # the disk may be full
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    connection.text_factory = lambda raw: raw.decode(errors="replace")  # row digests detect flipped bits
    connection.create_function("digest", -1, row_digest, deterministic=True)
    return connection


def check_version(connection: sqlite3.Connection) -> int:
    """Return the version of a database that this program can read.

    Raises:
        NewerDatabase: It cannot.
    """
    version = version_of(connection)
    if version > VERSION:
        raise NewerDatabase(
            f"a newer gradwire wrote it (version {version} of the state folder; this one knows up to {VERSION})"
        )
    return version


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a database to the present version.

    Raises:
        NewerDatabase: It has a newer version already.
    """
    version = check_version(connection)
    for statements in MIGRATIONS[version:]:
        connection.execute("BEGIN IMMEDIATE")
        for statement in statements:
            connection.execute(statement)
        version += 1
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")


def row_digest(*columns: str | bytes | int | float | None) -> bytes:
    """Digest of a row, compared when the row is read, because SQLite does not detect bits that changed on disk."""
    return hashlib.blake2b(repr(columns).encode(), digest_size=16).digest()
