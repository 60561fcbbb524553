"""Which results of a run are durable, and the newest of them in memory."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from gradwire_server.journal.rows import StoredResult
from gradwire_server.journal.run_row import RunRecord

RECENT_RESULTS = 64
RECENT_BYTES = 64 << 10
"""The newest ``RECENT_RESULTS`` results with payloads up to this size are served from memory."""


class RecentResults:
    """The durable results of one run; advances the record's ``applied_seq`` and ``released_seq``.

    Args:
        record: The run's row.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._stored: set[int] = set()
        self._recent: OrderedDict[int, StoredResult] = OrderedDict()

    def add(self, result: StoredResult) -> None:
        """Count a durable result, and keep it in memory if it is small."""
        if len(result.payload) <= RECENT_BYTES:
            self._recent[result.header.seq] = result
            if len(self._recent) > RECENT_RESULTS:
                self._recent.popitem(last=False)
        self.count(result.header.seq)

    def count(self, seq: int) -> None:
        """Count a durable result without keeping it in memory."""
        self._stored.add(seq)
        while self._record.applied_seq + 1 in self._stored:
            self._record.applied_seq += 1
            self._stored.discard(self._record.applied_seq)

    def since(self, seq: int) -> list[StoredResult]:
        """The durable results from this number on that are in memory without a gap."""
        there = map(self._recent.get, range(seq, self._record.applied_seq + 1))
        return [result for result in takewhile(lambda result: result is not None, there) if result is not None]

    def release(self, up_to_seq: int) -> None:
        """Drop released results from memory."""
        self._record.released_seq = max(self._record.released_seq, up_to_seq)
        for seq in [seq for seq in self._recent if seq <= up_to_seq]:
            del self._recent[seq]

    def clear(self) -> None:
        """Forget everything, after a rewind."""
        self._stored.clear()
        self._recent.clear()
