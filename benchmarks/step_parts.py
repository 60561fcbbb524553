"""The time of a training step by the roofline's parts, measured in an engine in this process by torch's profiler.

On a GPU a kernel's time, and a copy's, belongs to the innermost operation that launched it; kernels that none launched
are *other*. On a CPU an operation's own time counts, without those that it calls. :func:`benchmarks.roofline.part_of`
says which part that is, for the measured step as for the least time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import typer
from gradwire_server.cli.settings import load, with_settings
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from benchmarks.in_process import InProcess
from benchmarks.machine import wait_for
from benchmarks.roofline import PARTS, part_of
from benchmarks.workload import Rows

IDLE, UNPROFILED = "idle", "unprofiled"
RUNTIME = re.compile(r"(cu|cuda|hip)[A-Z]")
"""Calls of the driver. Their numbers are not those of operations, so what has the same number is not theirs."""


def engine_settings(flags: Sequence[str]) -> dict[str, Any]:
    """The settings of the engine of ``gradwire serve`` with these flags, as keywords."""
    given: dict[str, Any] = {}

    def keep(flags: dict[str, Any]) -> None:
        given.update(flags)

    command = typer.Typer(add_completion=False)
    command.command()(with_settings(keep))
    command(list(flags), standalone_mode=False)
    return load(given, None).engine.model_dump(exclude={"models", "state_dir"}, exclude_none=True)


def step_parts(engine: InProcess, batches: Sequence[Rows], vocabulary: int, device: str) -> dict[str, float]:
    """Milliseconds of a step.

    The host waits for the device before and after the steps only, beside the engine's own waits.

    Args:
        batches: A step each. The last one is profiled; the others warm up and are then measured without the profiler.
        vocabulary: The vocabulary's size.

    Returns:
        Those of each of :data:`PARTS`; ``idle``, in which there was no kernel (on a CPU no operation); and
        ``unprofiled``, the whole step without the profiler.
    """
    *others, last = batches
    _seconds(engine, others, device)
    unprofiled = _seconds(engine, others, device) / len(others)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities, record_shapes=True) as profiled:
        took = _seconds(engine, [last], device)
    found = by_part(profiled.events(), vocabulary, device)
    return {part: each / 1e3 for part, each in found.items()} | {
        IDLE: 1e3 * took - covered(profiled.events(), device) / 1e3,
        UNPROFILED: 1e3 * unprofiled,
    }


def _seconds(engine: InProcess, batches: Sequence[Rows], device: str) -> float:
    wait_for(device)
    began = time.perf_counter()
    engine.train(batches)
    wait_for(device)
    return time.perf_counter() - began


def by_part(events: Sequence[FunctionEvent], vocabulary: int, device: str) -> dict[str, float]:
    """Microseconds of each of :data:`PARTS`."""
    found = dict.fromkeys(PARTS, 0.0)
    for event in _of_kind(events, "cpu"):
        own = event.self_cpu_time_total if device == "cpu" else sum(kernel.duration for kernel in event.kernels)
        if own and not RUNTIME.match(event.name):
            found[_part(event, vocabulary)] += own
    if device != "cpu":
        whole = sum(event.time_range.elapsed_us() for event in _of_kind(events, device))
        found["other"] += whole - sum(found.values())
    return found


def covered(events: Sequence[FunctionEvent], device: str) -> float:
    """Microseconds in which the device has at least one kernel or, a CPU, operation."""
    total = end = 0.0
    for each in sorted((event.time_range for event in _of_kind(events, device)), key=lambda each: each.start):
        total += max(0.0, each.end - max(each.start, end))
        end = max(end, each.end)
    return total


def _of_kind(events: Sequence[FunctionEvent], device: str) -> list[FunctionEvent]:
    """Without labels, which torch repeats on the device."""
    labels = {each.name for each in events if each.is_user_annotation}
    return [each for each in events if each.device_type.name == device.upper() and each.name not in labels]


def _part(event: FunctionEvent, vocabulary: int) -> str:
    names, parent = [event.name], event.cpu_parent
    while parent is not None:
        if not parent.name.startswith("autograd::"):  # which also adds up gradients, by operations of their own
            names.append(parent.name)
        parent = parent.cpu_parent
    sizes = tree_leaves([event.input_shapes, event.concrete_inputs])
    return part_of([name.removeprefix("aten::") for name in names], sizes, vocabulary)
