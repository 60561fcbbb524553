"""Simulate a fleet: where queues build up, and what a lost rack costs.

    python tools/simulate_fleet.py [--active 0.03] [--lose 80] [--seconds 1200] ...    # every field of `Fleet`
    python tools/simulate_fleet.py --check

A step is a forward_backward and an optim_step. A run takes one after another, with a pause between them; each passes
its front and then its engine, first come, first served. After some steps there is a checkpoint: it goes to the store,
which has so many transfers at a time, and is read again. A run that begins to train is restored from the store. Runs
are placed by the server's own rule. Those of a lost engine are placed elsewhere after the lease, restored, and replayed
from their newest checkpoint. Samples are not simulated.

``--check`` compares small cases with the figures of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, cast

import simpy
from gradwire_server.scheduling.who_is_next import choose

Events = Generator[simpy.Event, Any, None]

FIGURES = Path(__file__).parent.parent / "benchmarks" / "README.md"
WARM_UP = 0.25
"""Share of the simulated time before anything is counted."""
SLICE_S = 0.002
"""How long a process keeps a core that others wait for."""


@dataclass(frozen=True)
class Fleet:
    """A fleet and its load; the defaults are those of docs/scaling.md.

    Attributes:
        runs, active: Runs that exist, and the share of them that train at a time.
        session_s, pause_s: Mean seconds for which a run trains (0: for ever), and between two of its steps.
        tokens, spread: Mean tokens of a step, and the standard deviation of their logarithm.
        gpus, tokens_per_s: Engines with a GPU each, and the tokens that one trains on in a second.
        engine_s, front_s, client_s: Seconds of a step in the engine beside its tokens, in its front and in its client.
        fronts: Fronts, among which runs are divided by their ids.
        cores: Cores that all of them share, as on one small machine; 0 if each has its own.
        room: Runs that a GPU holds; with more, each step waits until its run is swapped in.
        run_bytes: Bytes of a checkpoint, and of a swap at ``swap_bytes_per_s``.
        checkpoint_steps: Steps between two automatic checkpoints of a run.
        streams, stream_bytes_per_s: Transfers of the store at a time, and how fast each is.
        lose, lease_s: Engines that die at once half-way, such as a rack; seconds until that is noticed.
        seconds, seed: Simulated time, and what decides everything.
    """

    runs: int = 100_000
    active: float = 0.02
    session_s: float = 1800.0
    pause_s: float = 4.0
    tokens: float = 8192.0
    spread: float = 0.7
    gpus: int = 600
    tokens_per_s: float = 8100.0
    engine_s: float = 0.01
    front_s: float = 2 / 681
    client_s: float = 0.0
    fronts: int = 2
    cores: int = 0
    room: int = 21
    run_bytes: float = 1.05e9
    swap_bytes_per_s: float = 50e9
    checkpoint_steps: int = 120
    stream_bytes_per_s: float = 1e9
    streams: int = 10
    lose: int = 0
    lease_s: float = 10.0
    seconds: float = 1200.0
    seed: int = 1


@dataclass(eq=False)
class Engine:
    """An engine, with what the server's placement looks at: ``nbytes``, ``fair_queue.load`` and ``engine.number``."""

    number: int
    station: simpy.Resource
    runs: dict[int, simpy.Process] = field(default_factory=dict)
    alive: bool = True

    engine = property(lambda self: self)
    fair_queue = property(lambda self: self)
    load = nbytes = property(lambda self: len(self.runs))


class Simulation:
    """One simulation.

    Attributes:
        waits: Seconds that each step waited at "front", "engine" and "store"; of each "step" in all, pauses aside.
        busy: Seconds of work at these.
        lost, back_after: Of runs that were lost, the steps to be repeated, and the seconds until they trained on.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.env, self.rng = fleet, simpy.Environment(), random.Random(fleet.seed)
        env = self.env
        self.client = simpy.Resource(env, 1)
        self.fronts = [simpy.Resource(env, 1) for _ in range(fleet.fronts)]
        self.engines = [Engine(number, simpy.Resource(env, 1)) for number in range(fleet.gpus)]
        self.store = simpy.Resource(env, fleet.streams)
        self.cores = simpy.Resource(env, fleet.cores) if fleet.cores else None
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.busy: dict[str, float] = defaultdict(float)
        self._numbers = itertools.count()
        self.lost: dict[int, int] = {}
        self.back_after: dict[int, float] = {}
        self.counted_from = fleet.seconds * WARM_UP
        self.lost_at = (self.counted_from + fleet.seconds) / 2

    def run(self) -> Simulation:
        fleet = self.fleet
        count = round(fleet.runs * fleet.active)
        for _ in range(count):
            self._start(begun=True)
        if fleet.session_s:
            self.env.process(self._arrivals(count / fleet.session_s))
        if fleet.lose:
            self.env.process(self._loss())
        self.env.run(fleet.seconds)
        return self

    def _arrivals(self, a_second: float) -> Events:
        while True:
            yield self.env.timeout(self.rng.expovariate(a_second))
            self._start(begun=False)

    def _start(self, *, begun: bool) -> None:
        run, there = next(self._numbers), self._place()
        there.runs[run] = self.env.process(self._session(run, there, begun))

    def _place(self) -> Engine:
        able: Any = [engine for engine in self.engines if engine.alive]
        return cast(Engine, choose(able, 1))

    def _loss(self) -> Events:
        yield self.env.timeout(self.lost_at)
        dead = self.engines[: self.fleet.lose]
        for engine in dead:
            engine.alive = False
        for process in [process for engine in dead for process in engine.runs.values()]:
            process.interrupt()

    # ---- what a run does

    def _session(self, run: int, there: Engine, begun: bool) -> Events:
        fleet, rng = self.fleet, self.rng
        ends = self.env.now + (rng.expovariate(1 / fleet.session_s) if fleet.session_s else fleet.seconds)
        behind = rng.randrange(fleet.checkpoint_steps) if begun else 0  # steps since the newest checkpoint
        restored = begun
        front = self.fronts[zlib.crc32(b"%d" % run) % fleet.fronts]
        while self.env.now < ends:
            try:
                if not restored:
                    yield from self._transfer()
                    for _ in range(behind):
                        yield from self._work("engine", there.station, self._step_s(there))
                    restored = True
                    if run in self.lost:
                        self.back_after[run] = self.env.now - self.lost_at
                if fleet.pause_s:
                    yield self.env.timeout(rng.expovariate(1 / fleet.pause_s))
                began = self.env.now
                yield from self._work("client", self.client, fleet.client_s)
                yield from self._work("front", front, fleet.front_s)
                yield from self._work("engine", there.station, self._step_s(there))
                self._note("step", self.env.now - began)
                behind += 1
                if behind % fleet.checkpoint_steps == 0:
                    behind = 0
                    self.env.process(self._checkpoint())
            except simpy.Interrupt:
                self.lost[run] = behind
                process, restored = there.runs.pop(run), False
                yield self.env.timeout(fleet.lease_s)
                there = self._place()
                there.runs[run] = process
        there.runs.pop(run, None)

    def _step_s(self, there: Engine) -> float:
        fleet = self.fleet
        tokens = fleet.tokens * self.rng.lognormvariate(-(fleet.spread**2) / 2, fleet.spread)
        swapped = fleet.run_bytes / fleet.swap_bytes_per_s if len(there.runs) > fleet.room else 0.0
        return fleet.engine_s + tokens / fleet.tokens_per_s + swapped

    def _checkpoint(self) -> Events:
        yield from self._transfer()
        yield from self._transfer()  # read again by the front

    def _transfer(self) -> Events:
        yield from self._work("store", self.store, self.fleet.run_bytes / self.fleet.stream_bytes_per_s)

    def _work(self, name: str, station: simpy.Resource, seconds: float) -> Events:
        if not seconds:
            return
        asked = self.env.now
        with station.request() as turn:
            yield turn
            self._note(name, self.env.now - asked)
            if self.cores is None:
                yield self.env.timeout(seconds)
            else:
                for start in range(ceil(seconds / SLICE_S)):
                    with self.cores.request() as core:
                        yield core
                        yield self.env.timeout(min(SLICE_S, seconds - start * SLICE_S))
        if self.env.now >= self.counted_from:
            self.busy[name] += seconds

    def _note(self, name: str, seconds: float) -> None:
        if self.env.now >= self.counted_from:
            self.waits[name].append(seconds)

    # ---- what is said of it

    def rate(self) -> float:
        """Steps a second."""
        return len(self.waits["step"]) / (self.env.now - self.counted_from)

    def table(self) -> Iterator[str]:
        fleet = self.fleet
        yield f"{self.rate():,.0f} steps a second; a step takes {said(self.waits['step'])}"
        for name, places in (("front", fleet.fronts), ("engine", fleet.gpus), ("store", fleet.streams)):
            share = self.busy[name] / (self.env.now - self.counted_from) / places
            yield f"{name}: {share:.0%} busy, wait {said(self.waits[name])}"
        if fleet.lose:
            again = sum(self.lost.values())
            yield f"{len(self.lost):,} runs lost, {again:,} of their steps repeated, {len(self.back_after):,} runs back"
            yield f"after {said(self.back_after.values())}"


def said(seconds: Iterable[float]) -> str:
    """The mean, median, 99th percentile and greatest of some durations."""
    found = sorted(seconds) or [0.0]
    median, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
    return f"{sum(found) / len(found):.3g} s (median {median:.3g}, p99 {p99:.3g}, at most {found[-1]:.3g})"


# ---------------------------------------------------------------- small cases, as measured


def measured(row: str, pattern: str) -> list[float]:
    """Numbers of a row of the benchmarks' table."""
    line = next(line for line in FIGURES.read_text().splitlines() if line.startswith(f"| {row} |"))
    found = re.search(pattern, line)
    assert found is not None, line
    return [float(number.replace(",", "")) for number in found.groups()]


def checks() -> Iterator[tuple[str, float, float]]:
    """What is compared, as simulated and as measured."""
    small = Fleet(active=1.0, session_s=0, pause_s=0, fronts=1, cores=2, room=32, checkpoint_steps=10**9, seconds=60)
    operations, client, front, engine = measured(
        "operations in a pipeline", r"\| ([\d,]+) operations/s .* ([\d.]+) client, ([\d.]+) front, ([\d.]+) engine"
    )
    pipeline = replace(
        small, runs=32, gpus=1, tokens=0, client_s=client / 1e3, front_s=front / 1e3, engine_s=engine / 1e3, seconds=10
    )
    yield "operations a second in a pipeline of 32", Simulation(pipeline).run().rate(), operations
    two, alone = measured("eight LoRA runs: two engines against one", r"([\d,]+) and ([\d,]+) tokens/s")
    eight = replace(
        pipeline, runs=8, gpus=2, tokens=960, tokens_per_s=alone,
        client_s=2 * client / 1e3, front_s=2 * front / 1e3, engine_s=0, seconds=60,
    )  # fmt: skip
    yield "tokens a second of eight runs on two engines", Simulation(eight).run().rate() * eight.tokens, two


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare small cases with what was measured")
    for each in fields(Fleet):
        flag = f"--{each.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(each.default), default=each.default, help=f"{each.default}")
    options = vars(parser.parse_args())
    if options.pop("check"):
        for what, simulated, found in checks():
            print(f"{what}: simulated {simulated:,.0f}, measured {found:,.0f} ({simulated / found:.2f} x)")
        return
    for line in Simulation(Fleet(**options)).run().table():
        print(line)


if __name__ == "__main__":
    main()
