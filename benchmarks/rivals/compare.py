"""Our side and a rival's by turns on each work, and the figures."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import gradwire

from benchmarks.report import Figure, Size
from benchmarks.rivals import servers
from benchmarks.rivals.sides import BareSide, Measured, OurSdk, Side, TinkerSide
from benchmarks.rivals.workload import DIFFERENT_BATCHES, WORKS, Work, model
from benchmarks.turns import check_losses


@dataclass(frozen=True)
class Rival:
    """Whom we are compared with.

    Attributes:
        name: In the table.
        targets: By the name of a work: how many times as long as we it takes at least; for the bare loop, how many
            times as long as it we take at most. None: only reported.
        python: The interpreter of its environment; None for the bare loop.
        start: Starts its server for a model, with a folder of its own.
    """

    name: str
    targets: Mapping[str, float | None]
    python: Path | None = None
    start: Callable[[Path, Path], servers.Server] | None = None


ONE, EIGHT, MANY = (work.name for work in WORKS)
RIVALS = (
    Rival("peft loop", {ONE: 1.5, EIGHT: 1.1}),
    Rival("TuFT", {ONE: 3.0, EIGHT: 3.0, MANY: 6.0}, servers.TUFT_PYTHON, servers.tuft),
    Rival("SkyRL", dict.fromkeys((ONE, EIGHT, MANY)), servers.SKYRL_PYTHON, servers.skyrl),
)


OURS, GROUPED = "ours", "ours with --group-runs on"
"""Our SDK and a server with its defaults; and the same with a server that computes many runs at once, for many runs."""


@asynccontextmanager
async def opened(rival: Rival, works: Sequence[Work]) -> AsyncIterator[tuple[list[Side], Side]]:
    """Start both sides; yield ours, by our own SDK and by Tinker's, and the rival's."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rivals-")))
        path = model(folder)

        async def started(name: str, *settings: str) -> tuple[OurSdk, servers.Server]:
            server, address = servers.ours(path, folder / name, *settings)
            stack.enter_context(server)
            return OurSdk(name, await stack.enter_async_context(gradwire.connect(address)), server), server

        ours, server = await started(OURS)
        sides: list[Side] = [ours]
        if rival.python is None or rival.start is None:
            yield sides, BareSide(ours, path, folder / "adapters")
            return
        door = stack.enter_context(servers.TinkerProgram(servers.TINKER_PYTHON, server))
        sides.append(TinkerSide("our Tinker door", door, server.process))
        if any(work.runs > 1 for work in works):
            sides.append((await started(GROUPED, "--group-runs", "on"))[0])
        theirs = stack.enter_context(rival.start(path, folder / "theirs"))
        program = stack.enter_context(servers.TinkerProgram(rival.python, theirs))
        yield sides, TinkerSide(rival.name, program, theirs.process)


async def by_turns(work: Work, sides: Sequence[Side], size: Size) -> dict[str, Measured]:
    """Measure every side once a turn; the first turn of each warms up and is dropped."""
    measured = {side.name: Measured() for side in sides}
    batches = work.batches()
    steps = size.pick(work.steps, 2)
    done = 0
    for side in sides:
        await side.create(work)
    for _ in range(max(size.repeats, 2 * DIFFERENT_BATCHES // steps) + 1):
        chosen = [batches[(done + step) % DIFFERENT_BATCHES] for step in range(steps)]
        done += steps
        for side in sides:
            await side.turn(work, chosen, measured[side.name])
    for each in measured.values():
        del each.wall_ms[0], each.cpu_ms[0]
    return measured


def check(measured: Mapping[str, Measured], rival: str) -> None:
    """Check that all sides did the same work, as far as they can be compared.

    A new adapter changes nothing, so that all first losses are the model's own. Later ones differ with the adapters'
    first random numbers and scales; they must have fallen. The bare loop begins with our adapter: all are equal.

    Raises:
        AssertionError: They did not.
    """
    ours = measured[OURS]
    for name, side in measured.items():
        check_losses(side.losses[:1], ours.losses[:1], rtol=1e-4)
        first, last = (statistics.fmean(part) for part in (side.losses[:DIFFERENT_BATCHES], _last(side)))
        if not last < first:
            raise AssertionError(f"{name} has not learned: {first:.6g} at first, {last:.6g} in the end")
    if rival == "peft loop":
        check_losses(ours.losses, measured[rival].losses)


def _last(side: Measured) -> list[float]:
    return side.losses[-DIFFERENT_BATCHES:]


def figure(work: Work, ours: str, rival: Rival, measured: Mapping[str, Measured]) -> Figure:
    """The ratio of their time to ours; for the bare loop, of ours to its."""
    mine, theirs = measured[ours], measured[rival.name]
    bare = rival.python is None
    above, below = (mine, theirs) if bare else (theirs, mine)
    sdk = ours in (OURS, GROUPED)
    who = ours.replace(OURS, "own SDK") if sdk else ours
    name = f"{work.name}: {who}, " + ("time over a bare peft loop's" if bare else f"against {rival.name}")
    target = rival.targets[work.name] if sdk else None
    detail = f"{_said(ours, mine)}, {_said(rival.name, theirs)}; {_ratio(above.cpu_ms, below.cpu_ms):.2f} x by CPU; "
    detail += _losses_said(work, ours, mine, rival.name, theirs)
    samples = {f"{side}, ms": values.wall_ms for side, values in ((ours, mine), (rival.name, theirs))}
    return Figure(name, _ratio(above.wall_ms, below.wall_ms), "x", target, not bare, detail, samples)


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def _said(name: str, side: Measured) -> str:
    wall, cpu = statistics.median(side.wall_ms), statistics.median(side.cpu_ms)
    return f"{name} {wall:.1f} ms a step (CPU {cpu:.1f})"


def _losses_said(work: Work, ours: str, mine: Measured, rival: str, theirs: Measured) -> str:
    tokens = work.runs * work.rows * work.tokens
    first = f"loss a token {mine.losses[0] / tokens:.4f} at first on both"
    ends = [statistics.fmean(_last(side)) / tokens for side in (mine, theirs)]
    return f"{first}, after {len(mine.losses)} steps {ends[0]:.3f} and {ends[1]:.3f}"


async def compare(rival: Rival, size: Size) -> list[Figure]:
    """Measure all of the works that this rival is compared on.

    Raises:
        FileNotFoundError: An environment is missing.
    """
    if rival.python is not None:
        for python in (rival.python, servers.TINKER_PYTHON):
            if not python.exists():
                raise FileNotFoundError(f"{python} is not there: make {python.parent.parent.name}/.installed")
    works = [work for work in WORKS if work.name in rival.targets and size.wants(work.name)]
    figures = []
    async with opened(rival, works) as (ours, theirs):
        for work in works:
            sides = [side for side in ours if side.name != GROUPED or work.runs > 1]
            measured = await by_turns(work, [*sides, theirs], size)
            check(measured, rival.name)
            figures += [figure(work, side.name, rival, measured) for side in sides]
    return figures
