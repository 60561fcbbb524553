"""The ranks of an engine: rank 0 starts the others as its children, and hands them its decisions.

They end when rank 0 does, and rank 0 ends when one of them does (:mod:`.watch`): the group lives and dies as one, and
the front starts it again like an engine of one process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gradwire_proto.v1 import engine_pb2

from gradwire_server.config import EngineSettings
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.group_agreement import GroupAgreement
from gradwire_server.engine.machine import Share
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.process.activity import Activity
from gradwire_server.engine.process.decision_link import Followers
from gradwire_server.engine.process.engine import device_of
from gradwire_server.engine.process.pulse import Pulse
from gradwire_server.engine.process.watch import Watch
from gradwire_server.engine_link.crash_marks import CrashMarks


class Ranks:
    """The ranks of an engine, of which this process is the first.

    Args:
        settings: The engine's.
        marks: File descriptor of the front's page of marks; None without a front.
        share: The engine's share of the machine.

    Attributes:
        agreement: This rank's agreement with the others.
    """

    def __init__(self, settings: EngineSettings, marks: int | None = None, share: Share | None = None) -> None:
        page = None if marks is None else CrashMarks(marks)
        self._watch: Watch | None = None
        self._followers = Followers()
        self.agreement = Agreement(page)
        if settings.num_ranks > 1:
            self._start(settings, page, share or Share())

    def send(self, decision: Decision) -> None:
        """Hand on a decision to the other ranks; see :meth:`.Followers.send`."""
        if self._watch is not None and any(request.ends for request in decision.requests):
            self._watch.stop()
        self._followers.send(decision)

    def report(self, activity: Activity, device: torch.device) -> list[engine_pb2.EngineRank]:
        """The ranks that have told of themselves, by number; none in an engine of one process.

        Args:
            activity: This process's.
            device: This process's.
        """
        if self._watch is None or not isinstance(self.agreement, GroupAgreement):
            return []
        now = time.perf_counter()
        heard = {0: (Pulse.take(self.agreement, activity, device), now)} | self._watch.heard
        return [
            pulse.to_proto(f"cuda:{rank}" if device.type == "cuda" else device.type, now - at)
            for rank, (pulse, at) in sorted(heard.items())
        ]

    def _start(self, settings: EngineSettings, marks: CrashMarks | None, share: Share) -> None:
        agreement = self.agreement = GroupAgreement(0, settings.num_ranks, marks, divides=divided_device(settings, 0))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        sockets, pipes = [], []
        with tempfile.TemporaryDirectory(prefix="gradwire-ranks-") as folder:
            store = Path(folder) / "store"
            for rank in range(1, settings.num_ranks):
                ours, theirs = socket.socketpair()
                reading, writing = os.pipe()
                with theirs:
                    subprocess.Popen(
                        command(settings, share, rank, theirs.fileno(), writing, store),
                        pass_fds=[theirs.fileno(), writing],
                        stdin=subprocess.DEVNULL,
                    )
                os.close(writing)
                sockets.append(ours)
                pipes.append(reading)
            self._followers, self._watch = Followers(sockets), Watch(agreement, pipes)
            self._watch.start()
            agreement.join(store)


def divided_device(settings: EngineSettings, rank: int) -> torch.device | None:
    """The device of a rank, if models are divided among the ranks."""
    return torch.device(device_of(settings, rank)) if settings.shard == "on" else None


def command(settings: EngineSettings, share: Share, rank: int, fd: int, pulse: int, store: Path) -> list[str]:
    """The command line of a rank's process."""
    words = [sys.executable, "-m", "gradwire_server.engine.process.follower", "--rank", str(rank), "--fd", str(fd)]
    return [
        *words,
        "--pulse",
        str(pulse),
        "--store",
        str(store),
        "--number",
        str(share.number),
        "--engines",
        str(share.engines),
        "--settings",
        settings.model_dump_json(),
    ]
