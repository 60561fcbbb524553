"""Peak memory and time of one row of 65,536 tokens on a tiny model, by what becomes of its activations.

Two layers of 64 units. Each way has a server of its own: all activations kept, as the model is small for its machine;
recomputed, as the run asks for it; and within an activation budget of 64 MiB, where the engine chooses to recompute
them with feed-forward layers in chunks of tokens. Measured is the most that the engine's process ever held (``VmHWM``)
in one ``forward_backward`` of LoRA, less what it held before any model was loaded, and the engine's own seconds, of the
clock and of the processor.
Nothing is offloaded on a CPU, whose host memory is the device's.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gradwire

from benchmarks.machine import engine_process, memory_bytes
from benchmarks.report import Figure, Size, run_alone
from benchmarks.workload import Draw, standard_model

MIB = 2**20
TOKENS = 65_536


@dataclass(frozen=True)
class Way:
    """What becomes of the activations.

    Attributes:
        name: What the result then says of them.
        gradient_checkpointing: The run's setting; None leaves it to the engine.
        server_args: Arguments of ``gradwire serve``.
        most_mib: Bound of the peak that is stated in benchmarks/measurements.md; None for none.
    """

    name: str
    gradient_checkpointing: bool | None = None
    server_args: Sequence[str] = ()
    most_mib: int | None = None


WAYS = (
    Way("keep"),
    Way("recompute", gradient_checkpointing=True),
    Way("recompute+chunk", server_args=("--activation-budget-gib", "0.0625"), most_mib=557),
)


async def measured(way: Way, size: Size) -> Figure:
    tokens = size.pick(TOKENS, 8192)
    draw = Draw.of(6, smoke=size.smoke)
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(
            Path(folder) / "model", smoke=size.smoke, hidden_size=64, num_layers=2, context_length=tokens
        )
        async with gradwire.connect(models=[f"m={model}"], server_args=way.server_args) as service:
            engine = engine_process()
            before = memory_bytes(engine, "VmRSS")
            run = await service.create_run(
                "m", lora={"rank": 8}, gradient_checkpointing=way.gradient_checkpointing, seed=3
            )
            started = sum(engine.cpu_times()[:2])
            result = await run.forward_backward({"input_ids": [draw.tokens(tokens)]}, "causal_lm")
            computed = sum(engine.cpu_times()[:2]) - started
            peak = memory_bytes(engine, "VmHWM") - before
    if dict(result.activations) != {way.name: 1}:
        raise RuntimeError(f"{way.name} was asked for, and the engine chose {dict(result.activations)}")
    seconds = result.timings.engine_s
    detail = f"{tokens:,} tokens in {seconds:.0f} s of the engine, {computed:.0f} s of CPU; loss {result.loss!r}"
    return Figure(f"a long row, {way.name}", peak / MIB, "MiB", way.most_mib, at_least=False, detail=detail)


def measure(size: Size) -> list[Figure]:
    return [asyncio.run(measured(way, size)) for way in WAYS if size.wants(way.name)]


if __name__ == "__main__":
    run_alone(measure, __doc__)
