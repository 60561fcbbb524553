"""Usage by keys: tokens, seconds of the engines and checkpoints, by hour, run, model and rollout session.

Tokens are those that the model computed: one that several rows share counts once, and one of a prompt whose keys and
values an earlier request had left does not count.

An operation counts when its result is known, for the owner of its run; sampling outside a run's queue for the key that
asked, also what was computed before its caller left. What a recovery repeats does not count again. The counts of the
last seconds are in memory only, so a kill loses them; they are in a backup, and not in what ``gradwire repair`` builds
again.

A key has a bounded number of rows. Beyond it sessions that are gone are merged, then hours into days, then what is gone
into one row for each day and model, then days into months. Sums stay what they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import ServiceError, invalid
from gradwire_server.journal.database import Database
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.operation_kinds import loss_result

HOUR_S, DAY_S, MONTH_S = 3600, 86_400, 30 * 86_400
KEPT_S = 400 * DAY_S
MOST_ROWS = 10_000
"""Rows of a key, as long as its runs and models are fewer."""
ROWS_BETWEEN_MERGES = 1000
SAVED_AFTER_S = 10.0
MAX_ENTRIES = 10_000
"""Entries that are answered at once."""
COUNTS = ("training_tokens", "prompt_tokens", "sampled_tokens", "operations", "checkpoints", "engine_s")
GROUPS = {
    "hour": {"start": "hour"},
    "day": {"start": "hour - hour % 86400"},
    "owner": {"owner": "owner"},
    "run": {"run_id": "run_id", "label": "label"},
    "model": {"base_model": "base_model"},
    "session": {"session_id": "session_id"},
}
"""Names by which usage can be grouped, with the fields of an entry that hold them."""

Key = tuple[int, str, str, str, str, str]
_KEY = ("hour", "owner", "run_id", "label", "base_model", "session_id")
_ROW = (*_KEY, *COUNTS)
_ADD = (
    f"INSERT INTO usage ({', '.join(_ROW)}) VALUES ({', '.join('?' * len(_ROW))}) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
)
_THERE = "run_id IN (SELECT run_id FROM runs)"
_RUN, _OLD = f"iif({_THERE}, run_id, '')", f"(hour < ?2 OR NOT {_THERE})"
_NO_SESSION = "session_id != '' AND session_id NOT IN (SELECT session_id FROM sessions)"
_MERGES = (
    (HOUR_S, f"hour <= ?2 AND {_NO_SESSION}", ("run_id", "label", "''")),
    (DAY_S, "hour < ?2", ("run_id", "label", "session_id")),
    (DAY_S, _OLD, (_RUN, f"iif({_THERE}, label, '')", "''")),
    (MONTH_S, _OLD, (_RUN, "''", "''")),
)
"""Seconds of the period into which rows are merged, those rows, and the run, label and session of what they become."""


class Usage:
    """The counts of a server."""

    def __init__(self, store: Database) -> None:
        self._store = store
        self._new: dict[Key, Counter[str]] = {}
        self._saving: asyncio.TimerHandle | None = None
        self._unmerged = ROWS_BETWEEN_MERGES

    def count(
        self,
        owner: str,
        run: RunRecord | None,
        result: pb.OperationResult,
        *,
        label: str = "",
        base_model: str = "",
        session_id: str = "",
    ) -> None:
        """Count an operation or a request, also in the record of its run.

        Args:
            owner: Name of the key; empty on a server without keys.
            run: The run, or the one whose checkpoint is sampled from.
            label: The label under which it is counted; the run's name if empty.
            base_model: The model, if there is no run.
            session_id: The rollout session that asked, if one did.
        """
        run_id, sampled, timings = "", result.sample, result.timings
        computed = sampled.num_prompt_tokens - sampled.num_cached_tokens
        tokens = loss_result(result).num_computed_tokens, computed, sampled.num_sampled_tokens
        engine_s = timings.used_s if timings.HasField("used_s") else timings.engine_s
        if run is not None:
            run_id, label, base_model = run.run_id, label or run.config.name, run.config.base_model
            run.num_tokens += sum(tokens)
            run.engine_s += engine_s
        key = (int(time.time()) // HOUR_S * HOUR_S, owner, run_id, label, base_model, session_id)
        counts = (*tokens, 1, int(result.HasField("checkpoint") or result.HasField("export")), engine_s)
        counted = self._new.setdefault(key, Counter())
        for name, count in zip(COUNTS, counts, strict=True):
            if count:
                counted[name] += count  # type: ignore[assignment]  # seconds are no whole number
        if self._saving is None:
            self._saving = asyncio.get_running_loop().call_later(SAVED_AFTER_S, self.save)

    def save(self) -> asyncio.Future[None]:
        """Write what is new; the future resolves once it is durable. What could not be written is tried again."""
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        new, self._new = self._new, {}

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(_ADD, _rows(new))
            connection.execute("DELETE FROM usage WHERE hour < ?", (time.time() - KEPT_S,))
            self._unmerged += len(new)
            if self._unmerged >= ROWS_BETWEEN_MERGES:
                _merge(connection)
                self._unmerged = 0

        saved = self._store.write(work)

        def put_back(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                for key, counts in new.items():
                    self._new.setdefault(key, Counter()).update(counts)

        saved.add_done_callback(put_back)
        return saved

    async def of_runs(self) -> dict[str, tuple[int, float]]:
        """Tokens and seconds of each run, by run id."""
        tokens = "training_tokens + prompt_tokens + sampled_tokens"
        query = f"SELECT run_id, sum({tokens}), sum(engine_s) FROM usage WHERE run_id != '' GROUP BY run_id"
        rows = await self._store.read(lambda connection: connection.execute(query).fetchall())
        return {run_id: (tokens, engine_s) for run_id, tokens, engine_s in rows}

    async def between(
        self, start: float, end: float, by: Sequence[str] = (), owner: str | None = None
    ) -> list[pb.UsageEntry]:
        """The usage in the hours that begin in ``[start, end)``, the earliest and then the busiest first.

        Args:
            by: Keys of :data:`GROUPS`; none for one sum.
            owner: Only what this key used; None for all keys.

        Raises:
            ServiceError: INVALID_ARGUMENT, LIMIT_EXCEEDED.
        """
        if unknown := set(by) - set(GROUPS):
            raise invalid(f"usage is divided by {', '.join(GROUPS)}, and not by {sorted(unknown)[0]!r}", "by")
        if self._new:
            with contextlib.suppress(ServiceError, sqlite3.Error, OSError):  # it is counted below, written or not
                await self.save()
        columns = {name: column for group in by for name, column in GROUPS[group].items()}
        sums = [f"coalesce(sum({name}), 0)" for name in COUNTS]
        unsaved = ", ".join(f"value ->> {place} AS {name}" for place, name in enumerate(_ROW))
        rows = f"(SELECT {', '.join(_ROW)} FROM usage UNION ALL SELECT {unsaved} FROM json_each(?))"
        query = f"SELECT {', '.join([*columns.values(), *sums])} FROM {rows} WHERE hour >= ? AND hour < ?"
        query += " AND coalesce(owner = ?, TRUE)"
        if columns:
            query += f" GROUP BY {', '.join(str(number + 1) for number in range(len(columns)))}"
        query += f" LIMIT {MAX_ENTRIES + 1}"
        names, new = (*columns, *COUNTS), json.dumps(_rows(self._new))

        def found(connection: sqlite3.Connection) -> list[pb.UsageEntry]:
            rows = connection.execute(query, (new, start, end, owner)).fetchall()
            entries = [pb.UsageEntry(**dict(zip(names, row, strict=True))) for row in rows]
            return sorted((each for each in entries if each.operations), key=lambda each: (each.start, -each.engine_s))

        entries = await self._store.read_apart(found)
        if len(entries) > MAX_ENTRIES:
            message = f"the answer has over {MAX_ENTRIES:,} entries; ask for fewer hours, or divide by less"
            raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, field="by")
        return entries


def _rows(counted: Mapping[Key, Counter[str]]) -> list[tuple[int | str | float, ...]]:
    return [(*key, *(counts[name] for name in COUNTS)) for key, counts in counted.items()]


def _merge(connection: sqlite3.Connection) -> None:
    """Merge rows of the keys that have too many."""
    too_many = "SELECT owner FROM usage GROUP BY owner HAVING count(*) > ?"
    for period, which, names in _MERGES:
        for (owner,) in connection.execute(too_many, (MOST_ROWS,)).fetchall():
            of = (owner, int(time.time()) // HOUR_S * HOUR_S)
            where = f"WHERE owner = ?1 AND {which}"
            run_id, label, session_id = names
            sums = (f"sum({name})" for name in COUNTS)
            columns = (f"hour - hour % {period}", "owner", run_id, label, "base_model", session_id, *sums)
            query = f"SELECT {', '.join(columns)} FROM usage {where} GROUP BY 1, 2, 3, 4, 5, 6"
            merged = connection.execute(query, of).fetchall()
            connection.execute(f"DELETE FROM usage {where}", of)
            connection.executemany(_ADD, merged)
