"""The engine's heartbeats as received by the front."""

from __future__ import annotations

import time

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.engine_link.pulses import RankWatch

BEAT_S = 1.0
"""Seconds between two heartbeats of the engine."""
STALE_S = 15.0
"""Seconds without a heartbeat after which the engine is not ready: stopped, starved or stuck outside a computation."""
_NO_PULSE = engine_pb2.EnginePulse()


class Vitals:
    """The last heartbeat and the time of its arrival.

    Attributes:
        starts: Number of engine processes started so far.
        beat: The last heartbeat; empty before the first one of a process.
        busy: Share of the time between the last two heartbeats that the engine spent on requests, 0 to 1.
        start_s: Seconds that the newest process took to start and load its models.
    """

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._at = float("-inf")
        self.starts = 0
        self.busy = self.start_s = 0.0
        self._ranks, self._before = RankWatch(), dict[int, engine_pb2.EnginePulse]()
        self._shares: dict[int, tuple[float, float]] = {}
        self.beat = engine_pb2.EngineHeartbeat()

    def started(self, start_s: float = 0.0) -> None:
        """Count a new engine process, which has just said hello, and reset the heartbeat."""
        self.starts += 1
        self.start_s = start_s
        self.busy = 0.0
        self.beat = engine_pb2.EngineHeartbeat()
        self._at = time.monotonic()

    def watched(self) -> RankWatch:
        """A new watch over the ranks of a new engine process, which are shown from now on."""
        self._ranks, self._before, self._shares = RankWatch(), {}, {}
        return self._ranks

    def take(self, beat: engine_pb2.EngineHeartbeat) -> None:
        """Record a heartbeat."""
        now = time.monotonic()
        since = max(now - self._at, 1e-3)
        self.busy = _share(beat.busy_s - self.beat.busy_s, since)
        for number, rank in self._ranks.newest.items():
            before = self._before.get(number, _NO_PULSE)
            self._shares[number] = (
                _share(rank.busy_s - before.busy_s, since),
                _share(rank.waited_s - before.waited_s, since),
            )
        self._before = dict(self._ranks.newest)
        self.beat, self._at = beat, now

    @property
    def restarts(self) -> int:
        """Number of engine processes after the first."""
        return max(self.starts - 1, 0)

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat or start; -1 before the first start."""
        return time.monotonic() - self._at if self.starts else -1.0

    @property
    def fresh(self) -> bool:
        """Whether the last heartbeat or start is recent enough for the engine to count as alive."""
        return 0 <= self.age_s < self._stale_s

    def to_proto(self) -> pb.EngineStatus:
        """The engine's status as clients see it."""
        device = self.beat.device
        status = pb.EngineStatus(
            restarts=self.restarts,
            heartbeat_age_s=self.age_s,
            busy=self.busy,
            memory_bytes=self.beat.memory_bytes,
            device_memory_used_bytes=device.used_bytes,
            device_memory_total_bytes=device.total_bytes,
            start_s=self.start_s,
            memory_by_owner=self.beat.owners,
            runs=self.beat.runs,
        )
        for number, rank in sorted(self._ranks.newest.items()):
            busy, waits = self._shares.get(number, (0.0, 0.0))
            status.ranks.add(
                device=rank.device,
                busy=busy,
                waits=waits,
                memory_bytes=rank.memory_bytes,
                device_memory_used_bytes=rank.used_bytes,
                device_memory_total_bytes=rank.total_bytes,
                heartbeat_age_s=self._ranks.silent_s[number],
            )
        if device.HasField("utilization"):
            status.device_utilization = device.utilization
        return status


def _share(part_s: float, whole_s: float) -> float:
    return min(max(part_s / whole_s, 0.0), 1.0)
