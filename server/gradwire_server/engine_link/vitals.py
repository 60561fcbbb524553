"""The engine's signs of life, as the front has them."""

from __future__ import annotations

import time

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

BEAT_S = 1.0
"""How often the engine says that it is alive."""
STALE_S = 15.0
"""Without a sign for so long, it is not taken for ready: it is stopped, starved or stuck outside a computation."""


class Vitals:
    """What the last heartbeat said, and when it came.

    Attributes:
        starts: how many engine processes there were.
        beat: the last heartbeat; empty before the first of a process.
        busy: share of the time between the last two that was spent on requests.
    """

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._at = float("-inf")
        self.starts = 0
        self.busy = 0.0
        self.beat = engine_pb2.EngineHeartbeat()

    def started(self) -> None:
        """A new process has said hello."""
        self.starts += 1
        self.busy = 0.0
        self.beat = engine_pb2.EngineHeartbeat()
        self._at = time.monotonic()

    def take(self, beat: engine_pb2.EngineHeartbeat) -> None:
        now = time.monotonic()
        worked = beat.busy_s - self.beat.busy_s
        self.busy = min(max(worked / max(now - self._at, 1e-3), 0.0), 1.0)
        self.beat, self._at = beat, now

    @property
    def restarts(self) -> int:
        return max(self.starts - 1, 0)

    @property
    def age_s(self) -> float:
        """Seconds since the last sign; -1 before the first."""
        return time.monotonic() - self._at if self.starts else -1.0

    @property
    def fresh(self) -> bool:
        return 0 <= self.age_s < self._stale_s

    def to_proto(self) -> pb.EngineStatus:
        device = self.beat.device
        status = pb.EngineStatus(
            restarts=self.restarts,
            heartbeat_age_s=self.age_s,
            busy=self.busy,
            memory_bytes=self.beat.memory_bytes,
            device_memory_used_bytes=device.used_bytes,
            device_memory_total_bytes=device.total_bytes,
        )
        if device.HasField("utilization"):
            status.device_utilization = device.utilization
        return status
