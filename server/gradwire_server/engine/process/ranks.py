"""The ranks of an engine: rank 0 starts the others as its children, and hands them its decisions.

They end when rank 0 does, and rank 0 ends when one of them does: the group lives and dies as one, and the front starts
it again like an engine of one process. The front ends it when a rank is stopped or the ranks are out of step
(:mod:`gradwire_server.engine_link.pulses`).
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from gradwire_server.config import EngineSettings
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.group_agreement import GroupAgreement
from gradwire_server.engine.group_buffers import open_buffers
from gradwire_server.engine.machine import Share
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.process.activity import Activity
from gradwire_server.engine.process.decision_link import Followers
from gradwire_server.engine.process.engine import device_of
from gradwire_server.engine.process.pulse import BROKEN, Pulse
from gradwire_server.engine_link.crash_marks import CrashMarks

logger = logging.getLogger("gradwire_server.engine")


class Ranks:
    """The ranks of an engine, of which this process is the first.

    Args:
        activity: The time that this process spends on decisions.
        marks: File descriptor of the front's page of marks; None without a front.
        pulses: File descriptor of the socket on which the ranks tell the front of themselves, if there are several.
    """

    def __init__(
        self,
        settings: EngineSettings,
        activity: Activity | None = None,
        share: Share | None = None,
        *,
        marks: int | None = None,
        pulses: int | None = None,
    ) -> None:
        page = None if marks is None else CrashMarks(marks)
        self._pulse: Pulse | None = None
        self._followers, self._over = Followers(), False
        self.agreement = Agreement(page)
        if settings.num_ranks > 1:
            assert pulses is not None, "without --pulses, nobody watches the ranks"
            agreement = GroupAgreement(0, settings.num_ranks, page, divides=divided_device(settings, 0))
            self._pulse = Pulse(agreement, activity or Activity())
            self._pulse.start(socket.socket(fileno=os.dup(pulses)))
            self.agreement = agreement
            self._start(settings, agreement, share or Share(), pulses)

    def send(self, decision: Decision) -> None:
        """Hand on a decision to the other ranks; see :meth:`.Followers.send`."""
        self._over = any(request.ends for request in decision.requests)
        self._followers.send(decision)

    def loaded(self, device: torch.device) -> None:
        """Take note of the device, once the models are there."""
        if self._pulse is not None:
            self._pulse.device = device

    def _start(self, settings: EngineSettings, agreement: GroupAgreement, share: Share, pulses: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        sockets, messages, buffers = [], [], open_buffers(settings.num_ranks)
        # In memory: a folder would stay behind where a rank is killed in the start.
        shared = os.memfd_create("gradwire-ranks")
        try:
            store = Path(f"/proc/self/fd/{shared}")
            for rank in range(1, settings.num_ranks):
                (ours, theirs), (my_messages, their_messages) = socket.socketpair(), socket.socketpair()
                with theirs, their_messages:
                    fds = [theirs.fileno(), their_messages.fileno(), pulses, *buffers]
                    process = subprocess.Popen(
                        command(settings, share, rank, fds, store), pass_fds=[*fds, shared], stdin=subprocess.DEVNULL
                    )
                threading.Thread(target=self._wait, args=[rank, process], name=f"rank {rank}", daemon=True).start()
                sockets.append(ours)
                messages.append(my_messages)
            os.close(pulses)
            self._followers = Followers(sockets)
            agreement.join(store, messages, buffers)
        finally:
            os.close(shared)

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._over:
            logger.critical(
                "rank %d ended with code %d, and the engine with it; its runs are restored from their journals",
                rank,
                code,
            )
            logging.shutdown()
            os._exit(BROKEN)


def divided_device(settings: EngineSettings, rank: int) -> torch.device | None:
    """The device of a rank, if models are divided among the ranks."""
    return torch.device(device_of(settings, rank)) if settings.shard == "on" else None


def command(settings: EngineSettings, share: Share, rank: int, fds: Sequence[int], store: Path) -> list[str]:
    """The command line of a rank's process.

    Args:
        fds: Its sockets, of decisions, messages and pulses, and the memory of all ranks.
    """
    options = {
        "--rank": rank,
        "--fds": ",".join(map(str, fds)),
        "--store": store,
        "--number": share.number,
        "--engines": share.engines,
        "--settings": settings.model_dump_json(),
    }
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "gradwire_server.engine.process.follower", str(os.getpid()), *words]
