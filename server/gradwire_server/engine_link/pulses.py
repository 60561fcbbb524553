"""The watch over an engine's ranks, by the pulses that they send to the front.

A rank that computes for minutes sends pulses all the time; the others wait for it in their collective, and nothing is
wrong. A rank that dies is noticed by rank 0, whose child it is, and rank 0's death by the front.
"""

from __future__ import annotations

from gradwire_proto.v1 import engine_pb2

PULSE_S = 0.25
"""Seconds between two pulses of a rank."""
SILENCE_S = 10.0
"""A rank is taken for stopped after so long without a pulse."""
APART = 8
"""Ranks are out of step if each has sent so many pulses while all waited, in different places that did not change."""
PLACE_BITS = 32
"""Lower bits of a pulse's collective, which name its place; its number is above them."""
MAX_PULSE_BYTES = 4096
_LONGEST_GAP_S = 1.0
"""Longer gaps between two looks are the front's own: it, or the whole machine, was stopped."""


class RankWatch:
    """The pulses of the ranks of one engine process.

    Attributes:
        newest: Rank -> its newest pulse; only ranks that have sent one are known.
        silent_s: Rank -> seconds since then, as far as the front was awake.
    """

    def __init__(self) -> None:
        self.newest: dict[int, engine_pb2.EnginePulse] = {}
        self.silent_s: dict[int, float] = {}
        self._places: dict[int, tuple[int, bool]] = {}
        self._since: dict[int, int] = {}

    def heard(self, pulse: engine_pb2.EnginePulse) -> None:
        """Take a pulse."""
        place = pulse.collective, pulse.waits
        if self._places.get(pulse.rank) != place:
            self._places[pulse.rank] = place
            self._since.clear()
        self._since[pulse.rank] = self._since.get(pulse.rank, 0) + 1
        self.newest[pulse.rank] = pulse
        self.silent_s[pulse.rank] = 0.0

    def waited(self, seconds: float) -> None:
        """Count time that has passed since the last look."""
        for rank in self.silent_s:
            self.silent_s[rank] += min(seconds, _LONGEST_GAP_S)

    def trouble(self) -> str:
        """Describe a fault of the group; empty if there is none."""
        silent = [rank for rank, seconds in sorted(self.silent_s.items()) if seconds > SILENCE_S]
        if silent:
            return f"rank {silent[0]} has been silent for {SILENCE_S:.0f} s"
        places = [place for _, place in sorted(self._places.items())]
        apart = len(set(places)) > 1 and all(waits for _, waits in places)
        if apart and all(self._since.get(rank, 0) >= APART for rank in self._places):
            numbers = [collective >> PLACE_BITS for collective, _ in places]
            return f"the ranks wait in different places, at their collectives {numbers}"
        return ""
