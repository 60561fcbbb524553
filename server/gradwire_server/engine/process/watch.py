"""The watch over an engine's ranks: when one is gone, stopped or out of step, all end.

Each rank but the first writes a pulse (:mod:`.pulse`) into a pipe every quarter of a second: the number of its newest
collective, whether it waits in it, and what it uses. A thread of rank 0 reads them. A rank that computes for minutes
beats all the time; the others wait for it in their collective, and nothing is wrong.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from gradwire_server.engine.group_agreement import GroupAgreement
from gradwire_server.engine.process.pulse import SIZE, Pulse

logger = logging.getLogger(__name__)

BEAT_S = 0.25
SILENCE_S = 10.0
"""A rank is taken for stopped after so long without a pulse."""
APART_S = 2.0
"""Ranks are taken for out of step after they have waited in different collectives for so long."""
BROKEN = 70
"""Exit code of a rank that ends its group."""


def send_pulses(take: Callable[[], Pulse], pipe: int) -> None:
    """Send this rank's pulses from a thread of its own, until rank 0 is gone; then end this process."""

    def beat() -> None:
        while True:
            try:
                os.write(pipe, take().pack())
            except OSError:
                os._exit(BROKEN)
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


class Watch:
    """The watch of rank 0 over the others.

    Args:
        agreement: Rank 0's.
        pipes: The reading ends of the other ranks' pipes, by rank from 1 on.

    Attributes:
        heard: Rank -> its newest pulse, and when it came.
    """

    def __init__(self, agreement: GroupAgreement, pipes: Sequence[int]) -> None:
        self._agreement, self._pipes = agreement, pipes
        self.heard: dict[int, tuple[Pulse, float]] = {}
        self._seen: list[tuple[int, bool]] = []
        self._since = 0.0
        self._over = False

    def start(self) -> None:
        """Watch from a thread of its own; it ends this process, and with it the group, when a rank is lost."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Expect the ranks to end."""
        self._over = True

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select(self._pipes, [], [], BEAT_S)
            trouble = self._read(ready) or self._judge(time.perf_counter())
            if self._over:
                return
            if trouble:
                logger.critical("the engine ends, and starts again from its runs' journals: %s", trouble)
                logging.shutdown()
                os._exit(BROKEN)

    def _read(self, ready: Sequence[int]) -> str:
        for pipe in ready:
            rank, data = self._pipes.index(pipe) + 1, os.read(pipe, 64 * SIZE)
            if not data:
                return f"rank {rank} is gone"
            self.heard[rank] = Pulse.unpack(data), time.perf_counter()
        return ""

    def _judge(self, now: float) -> str:
        """What is wrong at a time, or nothing; a rank that has not started to beat is starting."""
        silent = [rank for rank, (_, at) in self.heard.items() if now - at > SILENCE_S]
        if silent:
            return f"rank {silent[0]} has been silent for {SILENCE_S:.0f} s"
        others = [(pulse.collective, pulse.inside) for pulse, _ in self.heard.values()]
        at = [(self._agreement.collective, self._agreement.inside), *others]
        if at != self._seen:
            self._seen, self._since = at, now
        apart = len(at) > len(self._pipes) and all(inside for _, inside in at) and len({number for number, _ in at}) > 1
        if apart and now - self._since > APART_S and all(at > self._since for _, at in self.heard.values()):
            return f"the ranks wait in different collectives: {[number for number, _ in at]}"
        return ""
