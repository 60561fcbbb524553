"""The pulse of a rank: where it is and what it uses, sent four times a second to the front, which watches the group.

A thread of its own sends it, so a rank that computes for minutes has one all the time.
"""

from __future__ import annotations

import os
import socket
import threading
import time

import torch
from gradwire_proto.v1 import engine_pb2

from gradwire_server.engine.group_agreement import GroupAgreement
from gradwire_server.engine.machine import resident_bytes
from gradwire_server.engine.process.activity import Activity
from gradwire_server.engine_link.pulses import PULSE_S

BROKEN = 70
"""Exit code of a rank that ends its group."""


class Pulse:
    """The pulse of this process.

    Attributes:
        device: Its device, once it has loaded its models.
    """

    def __init__(self, agreement: GroupAgreement, activity: Activity) -> None:
        self._agreement, self._activity = agreement, activity
        self.device: torch.device | None = None

    def start(self, front: socket.socket) -> None:
        """Send pulses from now on; the process ends when the front is gone."""
        threading.Thread(target=self._run, args=[front], name="pulse", daemon=True).start()

    def present(self) -> engine_pb2.EnginePulse:
        """The pulse of this moment."""
        device, agreement, free, total = self.device, self._agreement, 0, 0
        if device is not None and device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
        (busy_s, present_s), waited_s = self._activity.seconds(), agreement.waited_s
        return engine_pb2.EnginePulse(
            rank=agreement.rank,
            device="" if device is None else str(device),
            busy_s=busy_s - waited_s,
            waited_s=waited_s,
            memory_bytes=resident_bytes(),
            used_bytes=total - free,
            total_bytes=total,
            collective=agreement.collective,
            waits=agreement.inside or (device is not None and not present_s),
        )

    def _run(self, front: socket.socket) -> None:
        while True:
            try:
                front.send(self.present().SerializeToString())
            except OSError:
                os._exit(BROKEN)
            time.sleep(PULSE_S)
