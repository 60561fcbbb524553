"""The pulse of a rank: where it is and what it uses, as it tells rank 0 four times a second."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from gradwire_proto.v1 import engine_pb2

from gradwire_server.engine.group_agreement import GroupAgreement
from gradwire_server.engine.machine import resident_bytes
from gradwire_server.engine.process.activity import Activity

_PACKED = struct.Struct("<QBddQQQ")
SIZE = _PACKED.size


class Pulse(NamedTuple):
    """One pulse.

    Attributes:
        collective: Number of the newest collective.
        inside: Whether the rank waits in it.
        busy_s: Time spent on decisions, waiting included.
        waited_s: Time spent waiting for other ranks.
        memory_bytes: Resident memory of the process.
        used_bytes: Of the device, by all processes; 0 on a CPU.
        total_bytes: Of the device; 0 on a CPU.
    """

    collective: int
    inside: bool
    busy_s: float
    waited_s: float
    memory_bytes: int
    used_bytes: int = 0
    total_bytes: int = 0

    @classmethod
    def take(cls, agreement: GroupAgreement, activity: Activity, device: torch.device | None) -> Pulse:
        """This rank's present pulse; ``device`` is None as long as it has none."""
        free = total = 0
        if device is not None and device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
        (busy_s, _), waited_s = activity.seconds(), agreement.waited_s
        place = agreement.collective, agreement.inside
        return cls(*place, busy_s, waited_s, resident_bytes(), total - free, total)

    @classmethod
    def unpack(cls, data: bytes) -> Pulse:
        """The last of the pulses in what was read from a pipe."""
        collective, inside, *rest = _PACKED.unpack(data[-SIZE:])
        return cls(collective, bool(inside), *rest)

    def pack(self) -> bytes:
        """The pulse as bytes; so few are written into a pipe at once."""
        return _PACKED.pack(*self)

    def to_proto(self, device: str, silent_s: float) -> engine_pb2.EngineRank:
        """The rank as the front learns of it."""
        return engine_pb2.EngineRank(
            device=device,
            busy_s=self.busy_s - self.waited_s,
            waited_s=self.waited_s,
            memory_bytes=self.memory_bytes,
            used_bytes=self.used_bytes,
            total_bytes=self.total_bytes,
            silent_s=silent_s,
        )
