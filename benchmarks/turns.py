"""Two sides that take turns in one run, so that the machine's noise hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil


def cpu_seconds(process: psutil.Process | None = None) -> float:
    """CPU seconds used by a process (None: this one) and its children so far."""
    process = process or psutil.Process()
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


class Turns:
    """Rates of two sides, or more, turn by turn.

    Attributes:
        rates: Name of the side -> rate per second in each turn; higher is better.
        cpu_rates: The same per CPU second, which depends less on the load of the machine.
    """

    def __init__(self, ours: str, theirs: str, *more: str) -> None:
        self._ours, self._theirs = ours, theirs
        self.rates: dict[str, list[float]] = {side: [] for side in (ours, theirs, *more)}
        self.cpu_rates: dict[str, list[float]] = {side: [] for side in self.rates}

    @contextmanager
    def turn(self, side: str, amount: float) -> Iterator[None]:
        """One turn of a side; the block does this amount of work."""
        wall, cpu = time.perf_counter(), cpu_seconds()
        yield
        self.add(side, amount, time.perf_counter() - wall, cpu_seconds() - cpu)

    def add(self, side: str, amount: float, wall: float, cpu: float) -> None:
        self.rates[side].append(amount / wall)
        self.cpu_rates[side].append(amount / max(cpu, 1e-3))

    def drop_first(self) -> None:
        """Drop each side's first turn, its warm-up."""
        for rates in (*self.rates.values(), *self.cpu_rates.values()):
            del rates[0]

    def cpu_ratio(self) -> float:
        """The same as :meth:`ratio`, per CPU second."""
        return self._ratio(self.cpu_rates)

    def ratio(self, side: str = "") -> float:
        """The median over turns of our rate, or another side's, divided by theirs in the same turn."""
        return self._ratio(self.rates, side)

    def said(self, unit: str) -> str:
        """Format all sides' median rates, and the ratio per CPU second."""
        sides = ", ".join(f"{side} {statistics.median(rates):,.0f}" for side, rates in self.rates.items())
        return f"{sides} {unit}/s; {self.cpu_ratio():.2f} x a CPU second"

    def _ratio(self, rates: dict[str, list[float]], side: str = "") -> float:
        pairs = zip(rates[side or self._ours], rates[self._theirs], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def check_losses(ours: Sequence[float], theirs: Sequence[float], *, rtol: float = 2e-3, atol: float = 1e-5) -> None:
    """Check that both sides computed the same.

    Raises:
        AssertionError: Their losses differ by more than rounding explains.
    """
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if abs(mine - other) > atol + rtol * abs(other):
            raise AssertionError(f"step {step} of this turn: our loss is {mine:.6g}, theirs {other:.6g}")
